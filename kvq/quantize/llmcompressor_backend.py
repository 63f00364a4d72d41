"""The one module that imports llmcompressor: its batched GPTQ sweep (Triton on CUDA).

`sweep: llmcompressor` in a recipe asks for it. The default is `sweep.py`, which gives the same codes in less than half
the time (benchmarks/2026-11-30_h200_real-size-layer.md, benchmarks/2026-11-30_cpu_against_oneshot.md).

Two habits of `quantize_weight` are kept from the caller: it works inside the tensors it is given, and it sets the
weights of columns with a zero Hessian diagonal to zero.
"""

import functools
import os
from typing import Any

import torch
from torch import Tensor

from kvq.errors import QuantizationError
from kvq.recipes.schema import Recipe


@functools.cache
def _quantize_weight() -> Any:
    """Imported at first use: it takes seconds. At import it would also take over loguru and write to stdout."""
    os.environ.setdefault("LLM_COMPRESSOR_LOG_DISABLED", "true")
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    return quantize_weight


def _arguments(recipe: Recipe) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(
        num_bits=recipe.num_bits, symmetric=recipe.symmetric, strategy="group", group_size=recipe.group_size,
        actorder=recipe.actorder,
    )  # fmt: skip


def gptq_sweep(
    weight_EOI: Tensor, hessian_EII: Tensor, scale_EOG: Tensor, recipe: Recipe, dampening_frac: float
) -> tuple[Tensor, Tensor]:
    """Fake-quantized weights [E, O, I] in float32, and for each matrix whether its Hessian was not positive definite
    (its weights are then rounded to nearest). The arguments are not changed.

    Raises QuantizationError for a Hessian with NaN or Inf, which LAPACK may let through the first factorization.
    """
    hessian = hessian_EII.clone()
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    if not bool(torch.isfinite(diagonal).all()):
        raise QuantizationError(
            "a Hessian holds NaN or Inf: the activations are extreme. Look at the calibration data, or use "
            "--set solver=rtn."
        )
    # Every column gets a positive diagonal, so that the backend finds no column "dead".
    floor_E1 = diagonal.mean(dim=-1, keepdim=True) * dampening_frac
    diagonal.copy_(torch.where(diagonal > 0, diagonal, floor_E1.clamp(min=torch.finfo(hessian.dtype).tiny)))
    quantized, _, failed = _quantize_weight()(
        weights=weight_EOI.clone(), hessians=hessian, scale=scale_EOG.float(), zero_point=torch.zeros_like(scale_EOG),
        global_scale=None, quant_args=_arguments(recipe), blocksize=recipe.block_size, percdamp=dampening_frac,
    )  # fmt: skip
    return quantized, failed
