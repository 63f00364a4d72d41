"""kvq: FP8 mixture-of-experts checkpoints in, checked INT4-expert checkpoints out.

Nothing heavy is imported here: `kvq --help` must not load torch.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
