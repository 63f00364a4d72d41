"""Tasks with a right answer: source and quantized side by side, with intervals and the answers that changed."""
