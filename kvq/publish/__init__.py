"""What goes out with the weights: the manifest, and how to serve them."""
