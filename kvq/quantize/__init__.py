"""Weights and second moments in, codes and scales out. Knows no layers, models or files."""
