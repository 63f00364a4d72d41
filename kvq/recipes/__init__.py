"""What is asked (recipe), what will be done to each tensor (plan), and how the result is described (scheme)."""
