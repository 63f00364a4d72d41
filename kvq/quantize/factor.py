"""Cholesky factors of many large matrices, and systems solved by them, in blocks.

The vendor's libraries factorize a batch of large matrices one by one, and solve by kernels that were made for small
ones (on an H200, 34 systems of 2048 with as many right sides: 50 ms by `torch.cholesky_solve`). In blocks, nearly all
of the work is products over the whole batch. All of it is in float32: see `rounding.tensor_core_products`.

Shape suffixes: E = matrices, I = rows and columns, O = right sides, B = columns of a block.
"""

import torch
from torch import Tensor

FACTOR_BLOCK = 512


def cholesky_in_blocks(matrix_EII: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Lower Cholesky factors of all matrices at once, in place (what lies above the diagonal is left as it was), and
    which matrices are not positive definite.

    Left-looking: Golub and Van Loan, Matrix Computations, 4.2.5.
    """
    columns = matrix_EII.shape[1]
    failed_E = torch.zeros(matrix_EII.shape[0], dtype=torch.bool, device=matrix_EII.device)
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        panel_EIB = matrix_EII[:, start:, start:stop]
        if start:
            done_EIB = matrix_EII[:, start:, :start]
            panel_EIB.baddbmm_(done_EIB, done_EIB[:, : stop - start].mT, alpha=-1)
        factor_EBB, info_E = torch.linalg.cholesky_ex(panel_EIB[:, : stop - start])
        failed_E |= info_E != 0
        panel_EIB[:, : stop - start] = factor_EBB
        if stop < columns:
            panel_EIB[:, stop - start :] = torch.bmm(panel_EIB[:, stop - start :], _lower_inverse(factor_EBB).mT)
    return matrix_EII, failed_E


def solve_in_blocks(lower_EII: Tensor, right_EIO: Tensor, block: int) -> Tensor:
    """X of L L^T X = R for each matrix, in place of R. What lies above L's diagonal is not read."""
    columns = lower_EII.shape[1]
    parts = [slice(start, min(start + block, columns)) for start in range(0, columns, block)]
    inverses = [_lower_inverse(lower_EII[:, part, part]) for part in parts]
    for part, inverse_EBB in zip(parts, inverses, strict=True):
        right_EBO, done = right_EIO[:, part], slice(0, part.start)
        if part.start:
            right_EBO.baddbmm_(lower_EII[:, part, done], right_EIO[:, done], alpha=-1)
        right_EIO[:, part] = torch.bmm(inverse_EBB, right_EBO)
    for part, inverse_EBB in zip(reversed(parts), reversed(inverses), strict=True):
        right_EBO, done = right_EIO[:, part], slice(part.stop, None)
        if part.stop < columns:
            right_EBO.baddbmm_(lower_EII[:, done, part].mT, right_EIO[:, done], alpha=-1)
        right_EIO[:, part] = torch.bmm(inverse_EBB.mT, right_EBO)
    return right_EIO


def _lower_inverse(lower_EBB: Tensor) -> Tensor:
    identity_BB = torch.eye(lower_EBB.shape[1], dtype=lower_EBB.dtype, device=lower_EBB.device).expand_as(lower_EBB)
    inverse_EBB: Tensor = torch.linalg.solve_triangular(lower_EBB, identity_BB, upper=False)
    return inverse_EBB
