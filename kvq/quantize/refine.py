"""After the GPTQ sweep: scales by least squares and codes by coordinate descent, under the same dampened Hessian.

The sweep decides each column once, without knowing how later columns will be rounded. Going over scales and codes
again, each given all others, can only lower the same output error
sum over rows of (q - w) H (q - w)^T. On the three trained test checkpoints two passes took 3 to 8 % off the mean KL
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
    codes_EIO = codes_EOI.transpose(1, 2).contiguous()
    scale_EIO = scale_EOG.float().transpose(1, 2).repeat_interleave(columns // scale_EOG.shape[-1], dim=1)
    gradient_EIO = torch.bmm(hessian_EII, codes_EIO.float() * scale_EIO - weight_EOI.transpose(1, 2))
    for start in range(0, columns, block_size):
        part = slice(start, min(start + block_size, columns))
        change_EBO = _descend_block(
            codes_EIO[:, part], scale_EIO[:, part], gradient_EIO[:, part].clone(), hessian_EII[:, part, part]
        )
        gradient_EIO.baddbmm_(hessian_EII[:, :, part], change_EBO)
    return codes_EIO.transpose(1, 2).contiguous()


def _descend_block(codes_EBO: Tensor, scale_EBO: Tensor, gradient_EBO: Tensor, hessian_EBB: Tensor) -> Tensor:
    """Columns of one block, in turn: codes in place, the change of the quantized values as result.

    Everything is transposed here, so that a column's values lie together in memory.
    """
    before_EBO = codes_EBO.float()
    for column in range(codes_EBO.shape[1]):
        scale_EO = scale_EBO[:, column]
        pull_EO = gradient_EBO[:, column] / hessian_EBB[:, column, column, None]
        code_EO = torch.round(before_EBO[:, column] - pull_EO / scale_EO).clamp_(CODE_MIN, CODE_MAX)
        step_EO = (code_EO - before_EBO[:, column]) * scale_EO
        codes_EBO[:, column] = code_EO.to(torch.int8)
        later = slice(column + 1, None)
        gradient_EBO[:, later].addcmul_(hessian_EBB[:, later, column, None], step_EO.unsqueeze(1))
    return (codes_EBO.float() - before_EBO) * scale_EBO
