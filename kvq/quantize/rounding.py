"""Rounding column after column, where each column is told what the ones before it did wrong.

Both halves of GPTQ as kvq runs it are this one loop. With feedback M (its upper triangle) and errors
e = base - rounded,

    rounded_k = nearest(target_k + sum over j < k of e_j M_jk)

is the sweep when target = base = w and M comes from H = (I + M) D (I + M)^T (`sweep.py`), and coordinate descent when
base is the value so far, target its best real value and M_jk = H_jk / H_kk (`refine.py`).

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups, W = columns of a block.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.quantize.qparams import CODE_MAX, CODE_MIN

CPU_SLICE = 16  # columns whose errors reach each other one by one; later ones get them as a product


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """What columns are rounded to (float32 scales, and for each column, int32, which one), and how errors travel."""

    scale_EOG: Tensor
    group_EI: Tensor
    feedback_EII: Tensor


@contextmanager
def tensor_core_products() -> Iterator[None]:
    """Float32 products on the matrix units (TF32) of a GPU: 2^-11 of each factor, which moves a rounding decision as
    little as a tie does. Never for a factorization."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def round_columns(
    target_EOI: Tensor, base_EOI: Tensor, scale_EOG: Tensor, group_EI: Tensor, feedback_EII: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """int8 codes and float32 errors [E, O, I]. `group_EI` names the scale of each column (int32).

    Errors reach the columns of their block at once and later blocks by one matrix product each.
    """
    codes_EOI = torch.empty(base_EOI.shape, dtype=torch.int8, device=base_EOI.device)
    error_EOI = torch.empty_like(base_EOI)
    grid = Grid(scale_EOG.float(), group_EI, feedback_EII)
    for start in range(0, base_EOI.shape[2], block_size):
        part = slice(start, min(start + block_size, base_EOI.shape[2]))
        target_EOW = target_EOI[:, :, part]
        if start:
            with tensor_core_products():
                target_EOW = torch.baddbmm(target_EOW, error_EOI[:, :, :start], feedback_EII[:, :start, part])
        round_block(target_EOW, base_EOI[:, :, part], grid, codes_EOI, error_EOI, part)
    return codes_EOI, error_EOI


def round_block(
    target_EOW: Tensor, base_EOW: Tensor, grid: Grid, codes_EOI: Tensor, error_EOI: Tensor, part: slice
) -> None:
    """The columns of one block, given their targets; codes and errors are written in place."""
    if base_EOW.is_cuda:
        from kvq.quantize import triton_kernels

        triton_kernels.round_block(
            target_EOW, base_EOW, grid.scale_EOG, grid.group_EI, grid.feedback_EII, codes_EOI, error_EOI, part.start,
            (CODE_MIN, CODE_MAX),
        )  # fmt: skip
        return
    # Transposed, so that a column's values lie together in memory.
    target_EWO, base_EWO = target_EOW.transpose(1, 2).contiguous(), base_EOW.transpose(1, 2).contiguous()
    index_EOW = grid.group_EI[:, None, part].long().expand(-1, target_EOW.shape[1], -1)
    scale_EWO = grid.scale_EOG.gather(2, index_EOW).transpose(1, 2).contiguous()
    feedback_EWW = grid.feedback_EII[:, part, part]
    code_EWO, error_EWO = torch.empty_like(base_EWO), torch.empty_like(base_EWO)
    width = target_EWO.shape[1]
    for start in range(0, width, CPU_SLICE):
        stop = min(start + CPU_SLICE, width)
        for column in range(start, stop):
            code_EO = torch.round(target_EWO[:, column] / scale_EWO[:, column]).clamp_(CODE_MIN, CODE_MAX)
            error_EO = torch.addcmul(base_EWO[:, column], code_EO, scale_EWO[:, column], value=-1)
            code_EWO[:, column], error_EWO[:, column] = code_EO, error_EO
            near = slice(column + 1, stop)
            target_EWO[:, near].addcmul_(feedback_EWW[:, column, near].unsqueeze(-1), error_EO.unsqueeze(1))
        if stop < width:
            target_EWO[:, stop:].baddbmm_(feedback_EWW[:, start:stop, stop:].mT, error_EWO[:, start:stop])
    codes_EOI[:, :, part] = code_EWO.transpose(1, 2).to(torch.int8)
    error_EOI[:, :, part] = error_EWO.transpose(1, 2)
