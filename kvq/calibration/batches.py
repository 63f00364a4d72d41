"""How many calibration tokens go through a layer at once. Knows no tensors, so that a plan can say what a run needs."""

BATCH_TOKENS = {"cpu": 512, "cuda": 16384}
