"""After the GPTQ sweep: scales by least squares and codes by coordinate descent, under the same dampened Hessian.

The sweep decides each column once, without knowing how later columns will be rounded. Going over scales and codes
again, each given all others, can only lower the same output error
sum over rows of (q - w) H (q - w)^T. On the three trained test checkpoints two passes took 5 to 9 % off the mean KL
(benchmarks/2026-11-29_h200_solver-choices.md).

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups, B = columns of a block.
"""

import torch
from torch import Tensor

from kvq.quantize.qparams import CODE_MAX, CODE_MIN, from_codes


def refine(
    weight_EOI: Tensor, codes_EOI: Tensor, scale_EOG: Tensor, hessian_EII: Tensor, passes: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Better codes and BF16 scales; `hessian_EII` must have a positive diagonal. Nothing is changed in place."""
    for _ in range(passes):
        scale_EOG = refit_scales(weight_EOI, codes_EOI, scale_EOG, hessian_EII)
        codes_EOI = descend_codes(weight_EOI, codes_EOI, scale_EOG, hessian_EII, block_size)
    return codes_EOI, scale_EOG


def refit_scales(weight_EOI: Tensor, codes_EOI: Tensor, scale_EOG: Tensor, hessian_EII: Tensor) -> Tensor:
    """Each group's scale, in turn, moves to its least-squares value given all others, if BF16 rounding lets it gain."""
    size = weight_EOI.shape[-1] // scale_EOG.shape[-1]
    scale = scale_EOG.float()
    residual = from_codes(codes_EOI, scale_EOG) - weight_EOI
    for group in range(scale.shape[-1]):
        part = slice(group * size, (group + 1) * size)
        code = codes_EOI[:, :, part].float()
        slope = (torch.bmm(residual, hessian_EII[:, :, part]) * code).sum(dim=-1)
        curvature = (torch.bmm(code, hessian_EII[:, part, part]) * code).sum(dim=-1)
        old = scale[:, :, group]
        best = torch.where(curvature > 0, old - slope / curvature, old)
        new = best.to(torch.bfloat16).float()
        new = torch.where((new > 0) & ((new - best).abs() < (old - best).abs()), new, old)
        residual[:, :, part] += code * (new - old).unsqueeze(-1)
        scale[:, :, group] = new
    return scale.to(torch.bfloat16)


def descend_codes(
    weight_EOI: Tensor, codes_EOI: Tensor, scale_EOG: Tensor, hessian_EII: Tensor, block_size: int
) -> Tensor:
    """Each code, column by column, moves to the value that is best given all others.

    With gradient g = (q - w) H the best real value of column j is q_j - g_j / H_jj; on a line the nearest code to the
    minimum of a parabola is the best code. Changes reach the columns of the same block at once, the others block-wise.
    """
    columns = weight_EOI.shape[-1]
    scale_EOI = scale_EOG.float().repeat_interleave(columns // scale_EOG.shape[-1], dim=-1)
    quantized = codes_EOI.float() * scale_EOI
    gradient = torch.bmm(quantized - weight_EOI, hessian_EII)
    codes = codes_EOI.clone()
    for start in range(0, columns, block_size):
        part = slice(start, min(start + block_size, columns))
        change_EOB = _descend_block(
            codes[:, :, part],
            quantized[:, :, part],
            scale_EOI[:, :, part],
            gradient[:, :, part].clone(),
            hessian_EII[:, part, part],
        )
        gradient.baddbmm_(change_EOB, hessian_EII[:, part, :])
    return codes


def _descend_block(
    codes_EOB: Tensor, quantized_EOB: Tensor, scale_EOB: Tensor, gradient_EOB: Tensor, hessian_EBB: Tensor
) -> Tensor:
    """Columns of one block, in turn. Changes codes and quantized values in place; gives the change of the latter."""
    before_EOB = quantized_EOB.clone()
    diagonal_E1B = hessian_EBB.diagonal(dim1=-2, dim2=-1).unsqueeze(1)
    for column in range(codes_EOB.shape[-1]):
        target = quantized_EOB[:, :, column] - gradient_EOB[:, :, column] / diagonal_E1B[:, :, column]
        code = torch.round(target / scale_EOB[:, :, column]).clamp_(CODE_MIN, CODE_MAX)
        value = code * scale_EOB[:, :, column]
        step = value - quantized_EOB[:, :, column]
        codes_EOB[:, :, column] = code.to(torch.int8)
        quantized_EOB[:, :, column] = value
        gradient_EOB += step.unsqueeze(-1) * hessian_EBB[:, column].unsqueeze(1)
    return quantized_EOB - before_EOB
