"""One module a command: its flags, one call, what it prints. Heavy imports stay inside the functions."""
