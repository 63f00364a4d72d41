"""After the GPTQ sweep: scales by least squares and codes by coordinate descent, under the same dampened Hessian.

The sweep decides each column once, without knowing how later columns will be rounded. Going over scales and codes
again, each given all others, can only lower the same output error
sum over rows of (q - w) H (q - w)^T. On the three trained test checkpoints two passes took 3 to 8 % off the mean KL
(benchmarks/2026-11-29_h200_solver-choices.md).

A pass goes over blocks of columns. With the pull p = (q - w) H / diag(H), the best real value of column k is q_k - p_k
given all others, and the best scale of a group follows from p alone. Every change e = old - new of the values lowers
later pulls by e M, M_jk = H_jk / H_kk, which is what `rounding.py` needs to know.

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups, W = columns of a block, C = columns of a
group.
"""

import torch
from torch import Tensor

from kvq.quantize.qparams import from_codes
from kvq.quantize.rounding import Grid, round_block, tensor_core_products

MAX_BLOCK = 128  # a block's products are kept in the GPU's shared memory


def refine(
    weight_EOI: Tensor, codes_EOI: Tensor, scale_EOG: Tensor, hessian_EII: Tensor, passes: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Better codes and BF16 scales; `hessian_EII` must have a positive diagonal. Nothing is changed in place."""
    codes_EOI, scale_EOG = codes_EOI.clone(memory_format=torch.contiguous_format), scale_EOG.float().contiguous()
    diagonal_EI = hessian_EII.diagonal(dim1=-2, dim2=-1)
    columns, size = weight_EOI.shape[-1], weight_EOI.shape[-1] // scale_EOG.shape[-1]
    group_I = torch.arange(columns, device=weight_EOI.device, dtype=torch.int32) // size
    grid = Grid(scale_EOG, group_I.expand_as(diagonal_EI), hessian_EII / diagonal_EI.unsqueeze(1))
    block_size = max(size, min(block_size, MAX_BLOCK))
    blocks = [slice(start, min(start + block_size, columns)) for start in range(0, columns, block_size)]
    descent = _Descent(weight_EOI, codes_EOI, grid, diagonal_EI)
    for number in range(passes):
        if number:
            descent.catch_up(blocks)
        for part in blocks:
            descent.block(part)
    return codes_EOI, scale_EOG.to(torch.bfloat16)


class _Descent:
    """Codes and float32 scales, changed in place block after block, and the pull on every column."""

    def __init__(self, weight_EOI: Tensor, codes_EOI: Tensor, grid: Grid, diagonal_EI: Tensor) -> None:
        self.codes_EOI, self.grid, self.diagonal_EI = codes_EOI, grid, diagonal_EI
        with tensor_core_products():
            self.pull_EOI = torch.bmm(from_codes(codes_EOI, grid.scale_EOG).sub_(weight_EOI), grid.feedback_EII)
        self.change_EOI = torch.empty_like(self.pull_EOI)

    def catch_up(self, blocks: list[slice]) -> None:
        """After a pass: a block's pull knows what changed before it; now also what changed in it and after it."""
        for part in blocks:
            self._pulled(part, slice(part.start, None))

    def _pulled(self, part: slice, changed: slice) -> Tensor:
        """The pull on a block, less what the changes of these columns take away from it; kept in place."""
        pull_EOW = self.pull_EOI[:, :, part]
        with tensor_core_products():
            pull_EOW.baddbmm_(self.change_EOI[:, :, changed], self.grid.feedback_EII[:, changed, part], alpha=-1)
        return pull_EOW

    def block(self, part: slice) -> None:
        """Scales, then codes of the columns of a block, given everything before."""
        pull_EOW = self._pulled(part, slice(0, part.start)) if part.start else self.pull_EOI[:, :, part]
        target_EOW, base_EOW, refit_EOW = self._refit_scales(pull_EOW, part)
        round_block(target_EOW, base_EOW, self.grid, self.codes_EOI, self.change_EOI, part)
        self.change_EOI[:, :, part] += refit_EOW

    def _refit_scales(self, pull_EOW: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Moves each scale to its least-squares value, if BF16 rounding lets it gain. Gives the best values of the
        block, its values, and what the moves changed them by."""
        if pull_EOW.is_cuda:
            from kvq.quantize import triton_kernels

            return triton_kernels.refit_block(
                pull_EOW, self.codes_EOI, self.grid.scale_EOG, self.diagonal_EI, self.grid.feedback_EII, part.start
            )
        size = self.codes_EOI.shape[-1] // self.grid.scale_EOG.shape[-1]
        code_EOW = self.codes_EOI[:, :, part].float()
        change_EOW = torch.zeros_like(code_EOW)
        for group in range(part.start // size, part.stop // size):
            columns = slice(group * size, (group + 1) * size)
            inside = slice(columns.start - part.start, columns.stop - part.start)
            change_EOC = self._refit_scale(group, columns, pull_EOW[:, :, inside])
            change_EOW[:, :, inside] = change_EOC
            pull_EOW = torch.baddbmm(pull_EOW, change_EOC, self.grid.feedback_EII[:, columns, part], alpha=-1)
        base_EOW = from_codes(
            self.codes_EOI[:, :, part], self.grid.scale_EOG[:, :, part.start // size : part.stop // size]
        )
        return base_EOW - pull_EOW, base_EOW, change_EOW

    def _refit_scale(self, group: int, columns: slice, pull_EOC: Tensor) -> Tensor:
        """One group's scale, and what its move changes the group's values by."""
        code_EOC = self.codes_EOI[:, :, columns].float()
        weighted_EOC = code_EOC * self.diagonal_EI[:, None, columns]
        slope_EO = (pull_EOC * weighted_EOC).sum(dim=-1)
        curvature_EO = (torch.bmm(code_EOC, self.grid.feedback_EII[:, columns, columns]) * weighted_EOC).sum(dim=-1)
        old_EO = self.grid.scale_EOG[:, :, group].clone()
        best_EO = torch.where(curvature_EO > 0, old_EO - slope_EO / curvature_EO, old_EO)
        new_EO = best_EO.to(torch.bfloat16).float()
        gains = (new_EO > 0) & ((new_EO - best_EO).abs() < (old_EO - best_EO).abs())
        new_EO = torch.where(gains, new_EO, old_EO)
        self.grid.scale_EOG[:, :, group] = new_EO
        return code_EOC * (old_EO - new_EO).unsqueeze(-1)
