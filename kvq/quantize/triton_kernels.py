"""Loops that PyTorch cannot run fast on a GPU: rounding column after column, refitting and trying scales, adding rows.

The door to Triton. Each does what the plain version in `rounding.py`, `refine.py`, `qparams.py` or `capture.py` does;
tests run them in Triton's interpreter and on a GPU.

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups, R = rows of a program, W = columns of a
block, S = columns of a slice, C = columns of a group, F = factors, T = tokens, N = rows to add, H = hidden size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, WARPS, REFIT_WARPS = 64, 2, 8
SLICE = 16  # the least that the matrix units take
SCALE_ROWS = 16
ADDED_COLUMNS = 1024
MAGIC: Any = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and taking it away rounds to even, for |x| < 2^22


@triton.jit
def _bf16(value_R):
    """Rounded to BF16, ties to even, by its bits: the interpreter's own conversion cuts off."""
    bits_R = value_R.to(tl.int32, bitcast=True)
    bits_R = (bits_R + 0x7FFF + ((bits_R >> 16) & 1)) & -65536
    return bits_R.to(tl.float32, bitcast=True)


@triton.jit
def _storable(scale_R):
    """What is stored of a scale: BF16, and 1 in place of 0."""
    rounded_R = _bf16(scale_R)
    return tl.where(rounded_R > 0, rounded_R, 1.0)


@triton.jit
def _round_block_kernel(
    target_ptr, base_ptr, scale_ptr, group_ptr, feedback_ptr, codes_ptr, error_ptr, num_rows, num_columns, start, width,
    num_groups, code_min, code_max,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_fits_R1 = (row_R < num_rows)[:, None]
    row_R1 = row_R.to(tl.int64)[:, None]
    slice_S = tl.arange(0, SLICE)
    block_W = tl.arange(0, WIDTH)
    feedback_at = feedback_ptr + matrix * num_columns * num_columns
    for offset in range(0, WIDTH, SLICE):
        column_S = start + offset + slice_S
        fits_RS = row_fits_R1 & (offset + slice_S < width)[None, :]
        in_block_RS = (matrix * num_rows + row_R1) * width + offset + slice_S[None, :]
        in_matrix_RS = (matrix * num_rows + row_R1) * num_columns + column_S[None, :]
        target_RS = tl.load(target_ptr + in_block_RS, fits_RS, 0.0)
        if offset > 0:  # what earlier columns of this block did wrong; this program wrote it itself
            earlier_W = (block_W < offset) & (block_W < width)
            error_RW = tl.load(
                error_ptr + (matrix * num_rows + row_R1) * num_columns + start + block_W[None, :],
                row_fits_R1 & earlier_W[None, :], 0.0,
            )  # fmt: skip
            feedback_WS = tl.load(
                feedback_at + (start + block_W[:, None]) * num_columns + column_S[None, :],
                earlier_W[:, None] & (offset + slice_S < width)[None, :], 0.0,
            )  # fmt: skip
            target_RS += tl.dot(error_RW, feedback_WS, input_precision=PRECISION)
        base_RS = tl.load(base_ptr + in_block_RS, fits_RS, 0.0)
        group_S = tl.load(group_ptr + matrix * num_columns + column_S, offset + slice_S < width, 0)
        scale_RS = tl.load(scale_ptr + (matrix * num_rows + row_R1) * num_groups + group_S[None, :], fits_RS, 1.0)
        inverse_RS = 1.0 / scale_RS
        inner_ptr_S = feedback_at + (start + offset) * num_columns + column_S
        codes_RS = tl.zeros((ROWS, SLICE), tl.float32)
        errors_RS = tl.zeros((ROWS, SLICE), tl.float32)
        for column in tl.static_range(SLICE):
            here_1S = slice_S[None, :] == column
            value_R = tl.sum(tl.where(here_1S, target_RS, 0.0), axis=1)
            scale_R = tl.sum(tl.where(here_1S, scale_RS, 0.0), axis=1)
            base_R = tl.sum(tl.where(here_1S, base_RS, 0.0), axis=1)
            ratio_R = value_R * tl.sum(tl.where(here_1S, inverse_RS, 0.0), axis=1)
            code_R = (tl.minimum(tl.maximum(ratio_R, code_min), code_max) + MAGIC) - MAGIC
            code_R = tl.where(ratio_R == ratio_R, code_R, ratio_R)  # NaN stays, so that it is found
            error_R = base_R - code_R * scale_R
            later = (slice_S > column) & (offset + slice_S < width)
            later_S = tl.load(inner_ptr_S + column * num_columns, later, 0.0)
            target_RS += error_R[:, None] * later_S[None, :]
            codes_RS = tl.where(here_1S, code_R[:, None], codes_RS)
            errors_RS = tl.where(here_1S, error_R[:, None], errors_RS)
        tl.store(codes_ptr + in_matrix_RS, codes_RS.to(tl.int8), fits_RS)
        tl.store(error_ptr + in_matrix_RS, errors_RS, fits_RS)
        tl.debug_barrier()  # the next slice reads these errors in another layout


def round_block(
    target_EOW: Tensor, base_EOW: Tensor, scale_EOG: Tensor, group_EI: Tensor, feedback_EII: Tensor, codes_EOI: Tensor,
    error_EOI: Tensor, start: int, limits: tuple[int, int],
) -> None:  # fmt: skip
    """Columns `start` on of every matrix, one after the other; codes and errors are written in place."""
    matrices, rows, columns = error_EOI.shape
    width = target_EOW.shape[2]
    assert codes_EOI.is_contiguous() and error_EOI.is_contiguous() and feedback_EII.is_contiguous()
    _round_block_kernel[(triton.cdiv(rows, ROWS), matrices)](
        target_EOW.contiguous(), base_EOW.contiguous(), scale_EOG.contiguous(), group_EI.contiguous(), feedback_EII,
        codes_EOI, error_EOI, rows, columns, start, width, scale_EOG.shape[2], float(limits[0]), float(limits[1]),
        ROWS=ROWS, WIDTH=triton.next_power_of_2(width), SLICE=SLICE, PRECISION="tf32", num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _refit_block_kernel(
    pull_ptr, codes_ptr, scale_ptr, diagonal_ptr, feedback_ptr, target_ptr, base_ptr, change_ptr, num_rows, num_columns,
    start, width, num_groups, ROWS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    row_R = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    row_fits_R = row_R < num_rows
    block_W = tl.arange(0, WIDTH)
    fits_RW = row_fits_R[:, None] & (block_W < width)[None, :]
    in_block_RW = (matrix * num_rows + row_R[:, None]) * width + block_W[None, :]
    pull_RW = tl.load(pull_ptr + in_block_RW, fits_RW, 0.0)
    codes_at = codes_ptr + (matrix * num_rows + row_R[:, None]) * num_columns + start + block_W[None, :]
    code_RW = tl.load(codes_at, fits_RW, 0).to(tl.float32)
    diagonal_W = tl.load(diagonal_ptr + matrix * num_columns + start + block_W, block_W < width, 0.0)
    feedback_at = feedback_ptr + matrix * num_columns * num_columns
    feedback_WW = tl.load(
        feedback_at + (start + block_W[:, None]) * num_columns + start + block_W[None, :],
        (block_W < width)[:, None] & (block_W < width)[None, :], 0.0,
    )  # fmt: skip
    scale_RW = tl.zeros((ROWS, WIDTH), tl.float32)
    change_RW = tl.zeros((ROWS, WIDTH), tl.float32)
    for offset in tl.static_range(0, WIDTH, SIZE):
        inside_1W = (block_W >= offset)[None, :] & (block_W < offset + SIZE)[None, :]
        here_RW = tl.where(inside_1W, code_RW, 0.0)
        weighted_RW = here_RW * diagonal_W[None, :]
        slope_R = tl.sum(pull_RW * weighted_RW, axis=1)
        curvature_R = tl.sum(tl.dot(here_RW, feedback_WW, input_precision="tf32") * weighted_RW, axis=1)
        scale_at = scale_ptr + (matrix * num_rows + row_R) * num_groups + (start + offset) // SIZE
        old_R = tl.load(scale_at, row_fits_R & (offset < width), 1.0)
        curved_R = curvature_R > 0
        best_R = tl.where(curved_R, old_R - slope_R / tl.where(curved_R, curvature_R, 1.0), old_R)
        new_R = _bf16(best_R)
        gains_R = (new_R > 0) & (tl.abs(new_R - best_R) < tl.abs(old_R - best_R))
        new_R = tl.where(gains_R, new_R, old_R)
        part_RW = here_RW * (old_R - new_R)[:, None]
        pull_RW -= tl.dot(part_RW, feedback_WW, input_precision="tf32")
        change_RW += part_RW
        scale_RW = tl.where(inside_1W, new_R[:, None], scale_RW)
        tl.store(scale_at, new_R, row_fits_R & (offset < width))
    base_RW = code_RW * scale_RW
    tl.store(target_ptr + in_block_RW, base_RW - pull_RW, fits_RW)
    tl.store(base_ptr + in_block_RW, base_RW, fits_RW)
    tl.store(change_ptr + in_block_RW, change_RW, fits_RW)


def refit_block(
    pull_EOW: Tensor, codes_EOI: Tensor, scale_EOG: Tensor, diagonal_EI: Tensor, feedback_EII: Tensor, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of a block's groups, in place; then, for the block, best values, values, and the change that was made."""
    matrices, rows, columns = codes_EOI.shape
    width, pull_EOW = pull_EOW.shape[2], pull_EOW.contiguous()
    assert codes_EOI.is_contiguous() and scale_EOG.is_contiguous() and feedback_EII.is_contiguous()
    target_EOW, base_EOW, change_EOW = (torch.empty_like(pull_EOW) for _ in range(3))
    _refit_block_kernel[(triton.cdiv(rows, ROWS), matrices)](
        pull_EOW, codes_EOI, scale_EOG, diagonal_EI.contiguous(), feedback_EII, target_EOW, base_EOW, change_EOW, rows,
        columns, start, width, scale_EOG.shape[2], ROWS=ROWS, WIDTH=triton.next_power_of_2(width),
        SIZE=columns // scale_EOG.shape[2], num_warps=REFIT_WARPS,
    )  # fmt: skip
    return target_EOW, base_EOW, change_EOW


@triton.jit
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
        ratio_RC = tl.minimum(tl.maximum(weight_RC * (1.0 / scale_R)[:, None], code_min), code_max)
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


@triton.jit
def _add_weighted_rows_kernel(output_ptr, token_ptr, y_ptr, weight_ptr, num_columns, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column_W = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    fits_W = column_W < num_columns
    y_W = tl.load(y_ptr + row * num_columns + column_W, fits_W, 0.0).to(tl.float32)
    output_at = output_ptr + tl.load(token_ptr + row) * num_columns + column_W
    tl.store(output_at, tl.load(output_at, fits_W, 0.0) + y_W * tl.load(weight_ptr + row), fits_W)


def add_weighted_rows(output_TH: Tensor, token_N: Tensor, y_NH: Tensor, weight_N: Tensor) -> None:
    """Adds to float32 rows in one pass over memory. No token may come twice: programs would overwrite it."""
    rows, columns = y_NH.shape
    assert output_TH.is_contiguous() and output_TH.dtype == weight_N.dtype == torch.float32
    if rows:
        _add_weighted_rows_kernel[(rows, triton.cdiv(columns, ADDED_COLUMNS))](
            output_TH, token_N.contiguous(), y_NH.contiguous(), weight_N.contiguous(), columns, WIDTH=ADDED_COLUMNS
        )
