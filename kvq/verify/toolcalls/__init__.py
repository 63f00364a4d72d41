"""Tool calls as an operator meets them: parsed from the model's own text or from a server, checked and compared."""
