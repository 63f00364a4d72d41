"""After the GPTQ sweep: scales by least squares and codes by coordinate descent, under the same dampened Hessian.

The sweep decides each column once, without knowing how later columns will be rounded. Going over scales and codes
again, each given all others, can only lower the same output error
sum over rows of (q - w) H (q - w)^T. On the three trained test checkpoints two passes took 3 to 8 % off the mean KL
(benchmarks/2026-11-29_h200_solver-choices.md).

A pass goes over blocks of columns. With the pull p = (q - w) H / diag(H), the best real value of column k is q_k - p_k given
all others, and the best scale of a group follows from p alone. Every change e = old - new of the values lowers later pulls
by e M, M_jk = H_jk / H_kk, which is what `rounding.py` needs to know.

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups, W = columns of a block, C = columns of a
group.
"""

import torch
from torch import Tensor

from kvq.quantize.qparams import from_codes
from kvq.quantize.rounding import round_block, tensor_core_products


def refine(
    weight_EOI: Tensor, codes_EOI: Tensor, scale_EOG: Tensor, hessian_EII: Tensor, passes: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Better codes and BF16 scales; `hessian_EII` must have a positive diagonal. Nothing is changed in place."""
    codes_EOI, scale_EOG = codes_EOI.clone(), scale_EOG.float()
    diagonal_EI = hessian_EII.diagonal(dim1=-2, dim2=-1)
    feedback_EII = hessian_EII / diagonal_EI.unsqueeze(1)
    block_size = max(block_size, weight_EOI.shape[-1] // scale_EOG.shape[-1])
    for _ in range(passes):
        one = _Pass(weight_EOI, codes_EOI, scale_EOG, diagonal_EI, feedback_EII)
        for start in range(0, weight_EOI.shape[-1], block_size):
            one.block(slice(start, min(start + block_size, weight_EOI.shape[-1])))
    return codes_EOI, scale_EOG.to(torch.bfloat16)


class _Pass:
    """One pass: codes and float32 scales are changed in place, block after block."""

    def __init__(
        self, weight_EOI: Tensor, codes_EOI: Tensor, scale_EOG: Tensor, diagonal_EI: Tensor, feedback_EII: Tensor
    ) -> None:
        self.codes_EOI, self.scale_EOG = codes_EOI, scale_EOG
        self.diagonal_EI, self.feedback_EII = diagonal_EI, feedback_EII
        self.size = weight_EOI.shape[-1] // scale_EOG.shape[-1]
        self.value_EOI = from_codes(codes_EOI, scale_EOG)
        with tensor_core_products():
            self.pull_EOI = torch.bmm(self.value_EOI - weight_EOI, feedback_EII)
        self.change_EOI = torch.zeros_like(self.value_EOI)
        matrices, columns = diagonal_EI.shape
        group_I = torch.arange(columns, device=diagonal_EI.device, dtype=torch.int32) // self.size
        self.group_EI = group_I.expand(matrices, -1).contiguous()

    def block(self, part: slice) -> None:
        """Scales, then codes of the columns of a block, given everything before."""
        pull_EOW = self.pull_EOI[:, :, part]
        if part.start:
            earlier = slice(0, part.start)
            with tensor_core_products():
                pull_EOW = torch.baddbmm(
                    pull_EOW, self.change_EOI[:, :, earlier], self.feedback_EII[:, earlier, part], alpha=-1
                )
        for group in range(part.start // self.size, part.stop // self.size):
            pull_EOW = self._refit_scale(group, part, pull_EOW)
        base_EOW = self.value_EOI[:, :, part].clone()
        refit_EOW = self.change_EOI[:, :, part].clone()
        round_block(
            base_EOW - pull_EOW, self.value_EOI, self.scale_EOG, self.group_EI, self.feedback_EII, self.codes_EOI,
            self.change_EOI, part,
        )  # fmt: skip
        self.value_EOI[:, :, part] = base_EOW - self.change_EOI[:, :, part]
        self.change_EOI[:, :, part] += refit_EOW

    def _refit_scale(self, group: int, part: slice, pull_EOW: Tensor) -> Tensor:
        """Moves a group's scale to its least-squares value, if BF16 rounding lets it gain; the pulls after that."""
        columns = slice(group * self.size, (group + 1) * self.size)
        inside = slice(columns.start - part.start, columns.stop - part.start)
        code_EOC = self.codes_EOI[:, :, columns].float()
        weighted_EOC = code_EOC * self.diagonal_EI[:, None, columns]
        slope_EO = (pull_EOW[:, :, inside] * weighted_EOC).sum(dim=-1)
        curvature_EO = (torch.bmm(code_EOC, self.feedback_EII[:, columns, columns]) * weighted_EOC).sum(dim=-1)
        old_EO = self.scale_EOG[:, :, group]
        best_EO = torch.where(curvature_EO > 0, old_EO - slope_EO / curvature_EO, old_EO)
        new_EO = best_EO.to(torch.bfloat16).float()
        gains = (new_EO > 0) & ((new_EO - best_EO).abs() < (old_EO - best_EO).abs())
        new_EO = torch.where(gains, new_EO, old_EO)
        change_EOC = code_EOC * (old_EO - new_EO).unsqueeze(-1)
        self.scale_EOG[:, :, group] = new_EO
        self.value_EOI[:, :, columns] -= change_EOC
        self.change_EOI[:, :, columns] = change_EOC
        return torch.baddbmm(pull_EOW, change_EOC, self.feedback_EII[:, columns, part], alpha=-1)
