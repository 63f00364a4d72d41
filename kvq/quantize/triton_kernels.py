"""Two loops that PyTorch cannot run fast on a GPU: rounding column after column, and trying scales. The door to Triton.

Both do what the plain versions in `rounding.py` and `qparams.py` do; tests run them in Triton's interpreter and on a GPU.

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups, R = rows of a program, W = columns of a
block, S = columns of a slice, C = columns of a group, F = factors.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
SLICE = 16  # the least that the matrix units take
SCALE_ROWS = 16
MAGIC: Any = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and taking it away rounds to even, for |x| < 2^22


@triton.jit  # type: ignore[untyped-decorator]
def _round_block_kernel(
    target_ptr, base_ptr, scale_ptr, group_ptr, feedback_ptr, codes_ptr, error_ptr, num_rows, num_columns, start, width,
    row_stride, scale_row_stride, code_min, code_max,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_fits_R1 = (row_R < num_rows)[:, None]
    row_R1 = row_R.to(tl.int64)[:, None]
    slice_S = tl.arange(0, SLICE)
    block_W = tl.arange(0, WIDTH)
    matrix_ptr = matrix * num_rows * row_stride
    for offset in range(0, WIDTH, SLICE):
        column_S = start + offset + slice_S
        fits_RS = row_fits_R1 & (offset + slice_S < width)[None, :]
        place_RS = matrix_ptr + row_R1 * row_stride + column_S[None, :]
        target_RS = tl.load(target_ptr + (matrix * num_rows + row_R1) * width + offset + slice_S[None, :], fits_RS, 0.0)
        feedback_at = feedback_ptr + matrix * num_columns * num_columns
        if offset > 0:  # what earlier columns of this block did wrong; this program wrote it itself
            earlier_W = block_W < offset
            error_RW = tl.load(
                error_ptr + matrix_ptr + row_R1 * row_stride + start + block_W[None, :],
                row_fits_R1 & earlier_W[None, :], 0.0,
            )  # fmt: skip
            feedback_WS = tl.load(
                feedback_at + (start + block_W[:, None]) * num_columns + column_S[None, :],
                earlier_W[:, None] & (offset + slice_S < width)[None, :], 0.0,
            )  # fmt: skip
            target_RS += tl.dot(error_RW, feedback_WS, input_precision=PRECISION)
        base_RS = tl.load(base_ptr + place_RS, fits_RS, 0.0)
        group_S = tl.load(group_ptr + matrix * num_columns + column_S, offset + slice_S < width, 0)
        scale_RS = tl.load(scale_ptr + (matrix * num_rows + row_R1) * scale_row_stride + group_S[None, :], fits_RS, 1.0)
        inner_SS = tl.load(
            feedback_at + (start + offset + slice_S[:, None]) * num_columns + column_S[None, :],
            (slice_S[:, None] < slice_S[None, :]) & (offset + slice_S < width)[None, :], 0.0,
        )  # fmt: skip
        codes_RS = tl.zeros((ROWS, SLICE), tl.float32)
        errors_RS = tl.zeros((ROWS, SLICE), tl.float32)
        for column in tl.static_range(SLICE):
            here_1S = slice_S[None, :] == column
            value_R = tl.sum(tl.where(here_1S, target_RS, 0.0), axis=1)
            scale_R = tl.sum(tl.where(here_1S, scale_RS, 0.0), axis=1)
            base_R = tl.sum(tl.where(here_1S, base_RS, 0.0), axis=1)
            ratio_R = tl.div_rn(value_R, scale_R)
            code_R = (tl.minimum(tl.maximum(ratio_R, code_min), code_max) + MAGIC) - MAGIC
            code_R = tl.where(ratio_R == ratio_R, code_R, ratio_R)  # NaN stays, so that it is found
            error_R = base_R - code_R * scale_R
            later_S = tl.sum(tl.where(slice_S[:, None] == column, inner_SS, 0.0), axis=0)
            target_RS += error_R[:, None] * later_S[None, :]
            codes_RS = tl.where(here_1S, code_R[:, None], codes_RS)
            errors_RS = tl.where(here_1S, error_R[:, None], errors_RS)
        tl.store(codes_ptr + place_RS, codes_RS.to(tl.int8), fits_RS)
        tl.store(error_ptr + place_RS, errors_RS, fits_RS)
        tl.debug_barrier()  # the next slice reads these errors in another layout


def round_block(
    target_EOW: Tensor, base_EOI: Tensor, scale_EOG: Tensor, group_EI: Tensor, feedback_EII: Tensor, codes_EOI: Tensor,
    error_EOI: Tensor, start: int, limits: tuple[int, int],
) -> None:  # fmt: skip
    """Columns `start` on of every matrix, one after the other; codes and errors are written in place."""
    matrices, rows, columns = base_EOI.shape
    width = target_EOW.shape[2]
    assert target_EOW.is_contiguous() and base_EOI.is_contiguous() and feedback_EII.is_contiguous()
    assert codes_EOI.is_contiguous() and error_EOI.is_contiguous() and scale_EOG.is_contiguous()
    _round_block_kernel[(triton.cdiv(rows, ROWS), matrices)](
        target_EOW, base_EOI, scale_EOG, group_EI, feedback_EII, codes_EOI, error_EOI, rows, columns, start,
        width, columns, scale_EOG.shape[2], float(limits[0]), float(limits[1]),
        ROWS=ROWS, WIDTH=triton.next_power_of_2(width), SLICE=SLICE, PRECISION="tf32x3", num_warps=4,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _storable(scale_R):
    """Rounded to BF16, ties to even, by its bits (the interpreter's own conversion cuts off); 1 in place of 0."""
    bits_R = scale_R.to(tl.int32, bitcast=True)
    bits_R = (bits_R + 0x7FFF + ((bits_R >> 16) & 1)) & -65536
    rounded_R = bits_R.to(tl.float32, bitcast=True)
    return tl.where(rounded_R > 0, rounded_R, 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _search_scales_kernel(
    weight_ptr, importance_ptr, factor_ptr, best_ptr, num_rows, num_groups, code_min, code_max, half_range,
    ROWS: tl.constexpr, SIZE: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    matrix, group = tl.program_id(2).to(tl.int64), tl.program_id(1)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_C = group * SIZE + tl.arange(0, SIZE)
    fits_R = row_R < num_rows
    columns = num_groups * SIZE
    place_RC = (matrix * num_rows + row_R.to(tl.int64)[:, None]) * columns + column_C[None, :]
    weight_RC = tl.load(weight_ptr + place_RC, fits_R[:, None], 0.0)
    importance_C = tl.load(importance_ptr + matrix * columns + column_C)
    base_R = tl.max(tl.abs(weight_RC), axis=1) / half_range
    best_R = _storable(base_R)
    least_R = tl.full((ROWS,), float("inf"), tl.float32)
    for index in range(FACTORS):
        scale_R = _storable(base_R * tl.load(factor_ptr + index))
        ratio_RC = tl.minimum(tl.maximum(tl.div_rn(weight_RC, scale_R[:, None]), code_min), code_max)
        error_RC = ((ratio_RC + MAGIC) - MAGIC) * scale_R[:, None] - weight_RC
        total_R = tl.sum(error_RC * error_RC * importance_C[None, :], axis=1)
        better_R = total_R < least_R
        least_R = tl.where(better_R, total_R, least_R)
        best_R = tl.where(better_R, scale_R, best_R)
    tl.store(best_ptr + (matrix * num_rows + row_R.to(tl.int64)) * num_groups + group, best_R, fits_R)


def search_scales(
    weight_EOI: Tensor, importance_EI: Tensor, factors: tuple[float, ...], group_size: int, limits: tuple[int, int]
) -> Tensor:
    """BF16 scales [E, O, G] that have the least importance-weighted squared error among base * factor."""
    matrices, rows, columns = weight_EOI.shape
    groups = columns // group_size
    weight, importance = weight_EOI.contiguous(), importance_EI.float().contiguous()
    best_EOG = torch.empty(matrices, rows, groups, device=weight.device)
    factor_F = torch.tensor(factors, dtype=torch.float32, device=weight.device)
    _search_scales_kernel[(triton.cdiv(rows, SCALE_ROWS), groups, matrices)](
        weight, importance, factor_F, best_EOG, rows, groups, float(limits[0]), float(limits[1]),
        (limits[1] - limits[0]) / 2, ROWS=SCALE_ROWS, SIZE=group_size, FACTORS=len(factors), num_warps=4,
    )  # fmt: skip
    return best_EOG.to(torch.bfloat16)
