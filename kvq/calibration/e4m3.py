"""FP8 as KV caches hold it: float8_e4m3fn under a scale."""

import torch
from torch import Tensor

E4M3_MAX = 448.0  # largest finite float8_e4m3fn; engines keep x / scale, so scale = amax / 448


def through_e4m3(x: Tensor, scale: Tensor | float) -> Tensor:
    """What is read back of `x`, in float32. `scale` broadcasts against it.

    Values beyond 448 * scale are clamped, as kernels do and as torch 2.13 casts them on a CPU; other casts may make NaN
    of them.
    """
    stored = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return stored.float() * scale
