"""What kvq computes, once more: plain, in float64, written to be read. Nothing of kvq is used here.

One matrix at a time, one column at a time, no blocks and no Cholesky factor, so that a mistake in the fast code has no
twin in this file.

Shape suffixes: O = out_features, I = in_features, G = groups of columns, W = words of 8 codes, T = tokens,
H = hidden size, J = 2 I (gate rows, then up rows), K = experts per token, E = experts, P, Q = tiles down and across.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CODE_MIN, CODE_MAX = -8, 7


# Rounding to a grid.


def column_scale(scale_OG: Tensor, column: int, num_columns: int) -> Tensor:
    """The scales [O] of the group that a column belongs to."""
    group_size = num_columns // scale_OG.shape[1]
    return scale_OG[:, column // group_size].double()


def rtn(w_OI: Tensor, scale_OG: Tensor) -> Tensor:
    """Codes nearest to w / scale, ties to even."""
    codes_OI = torch.zeros(w_OI.shape, dtype=torch.float64)
    for column in range(w_OI.shape[1]):
        ratio_O = w_OI[:, column].double() / column_scale(scale_OG, column, w_OI.shape[1])
        codes_OI[:, column] = ratio_O.round().clamp(CODE_MIN, CODE_MAX)
    return codes_OI


def dequantize(codes_OI: Tensor, scale_OG: Tensor) -> Tensor:
    """Code times scale."""
    w_OI = torch.zeros(codes_OI.shape, dtype=torch.float64)
    for column in range(codes_OI.shape[1]):
        w_OI[:, column] = codes_OI[:, column].double() * column_scale(scale_OG, column, codes_OI.shape[1])
    return w_OI


# Scales.


def bf16(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32).bfloat16())


def minmax_scale(group: Sequence[float]) -> float:
    """15 steps over [-amax, amax], in BF16; 1 for a group of zeros."""
    scale = bf16(max(abs(w) for w in group) / 7.5)
    return scale if scale > 0 else 1.0


def group_error(group: Sequence[float], importance: Sequence[float], scale: float) -> float:
    """Sum of importance * (w - fake quantized w)^2."""
    total = 0.0
    for w, weight in zip(group, importance, strict=True):
        code = min(max(round(w / scale), CODE_MIN), CODE_MAX)
        total += weight * (w - code * scale) ** 2
    return total


def mse_scale(group: Sequence[float], importance: Sequence[float], factors: Sequence[float]) -> float:
    """The first of the shrunken min-max scales with the least error."""
    base = max(abs(w) for w in group) / 7.5
    scales = [bf16(base * factor) or 1.0 for factor in factors]
    return min(scales, key=lambda scale: group_error(group, importance, scale))


# AWQ.


def clip_scale(group_C: Tensor, moment_CD: Tensor, factors: Sequence[float]) -> float:
    """The first of the shrunken min-max scales whose rounding changes the mean square of the group's output least."""
    scales = [bf16(float(group_C.abs().max()) / 7.5 * factor) or 1.0 for factor in factors]
    errors = []
    for scale in scales:
        delta_C = (group_C.double() / scale).round().clamp(CODE_MIN, CODE_MAX) * scale - group_C.double()
        errors.append(float(delta_C @ moment_CD.double() @ delta_C))
    return scales[errors.index(min(errors))]


def smoothing_candidates(hidden_TI: Tensor, alphas: Sequence[float]) -> list[Tensor]:
    """For each alpha the powers of two nearest to (size of a column / geometric mean of the sizes) ** alpha."""
    size_I = hidden_TI.double().square().mean(dim=0).sqrt()
    middle = float(torch.exp(size_I[size_I > 0].log().mean()))
    candidates = []
    for alpha in alphas:
        factor_I = torch.ones_like(size_I)
        for column, size in enumerate(size_I.tolist()):
            if size > 0:
                factor_I[column] = 2.0 ** round(math.log2((size / middle) ** alpha))
        candidates.append(factor_I)
    return candidates


def smoothing_error(down_OI: Tensor, hidden_TI: Tensor, factor_I: Tensor, group_size: int) -> float:
    """Mean square change of the output when down * factor is rounded and its input divided by the factor."""
    scaled_OI = down_OI.double() * factor_I
    groups = scaled_OI.reshape(len(scaled_OI), -1, group_size).tolist()
    scale_OG = torch.tensor([[minmax_scale(group) for group in row] for row in groups], dtype=torch.float64)
    rounded_OI = dequantize(rtn(scaled_OI, scale_OG), scale_OG)
    change_TO = (hidden_TI.double() / factor_I) @ rounded_OI.T - hidden_TI.double() @ down_OI.double().T
    return float(change_TO.square().sum(dim=1).mean())


# Inputs that have drifted.


def corrected(w_OI: Tensor, source_TI: Tensor, x_TI: Tensor, ridge: float) -> Tensor:
    """Least squares over tokens for the outputs w source on inputs x, held to w.

    Least is sum |W x - w source|^2 + ridge |W - w|^2.
    """
    identity_II = torch.eye(w_OI.shape[1], dtype=torch.float64)
    inputs = torch.cat([x_TI.double(), ridge**0.5 * identity_II])
    outputs = torch.cat([source_TI.double() @ w_OI.double().T, ridge**0.5 * w_OI.double().T])
    solution_IO: Tensor = torch.linalg.lstsq(inputs, outputs).solution
    return solution_IO.T


# GPTQ.


@dataclass(frozen=True)
class GptqSteps:
    """`before_OI` is weight / scale just before a column was rounded; `order` the columns as they were solved."""

    codes_OI: Tensor
    before_OI: Tensor
    order: list[int]


def damp(hessian_II: Tensor, dampening_frac: float) -> Tensor:
    mean = hessian_II.double().diagonal().mean()
    return hessian_II.double() + dampening_frac * mean * torch.eye(hessian_II.shape[0], dtype=torch.float64)


def gptq(w_OI: Tensor, hessian_II: Tensor, scale_OG: Tensor, dampening_frac: float, static_order: bool) -> GptqSteps:
    """Round a column, move what that changes in the output into the columns still open, go on (arXiv 2208.11580, 3).

    The inverse of the Hessian of the open columns is kept up to date by one step of Gaussian elimination.
    """
    num_columns = w_OI.shape[1]
    order = list(range(num_columns))
    if static_order:
        order.sort(key=lambda column: -float(hessian_II[column, column]))
    open_OI = w_OI.double().clone()
    inverse_II = torch.linalg.inv(damp(hessian_II, dampening_frac))
    codes_OI, before_OI = torch.zeros_like(open_OI), torch.zeros_like(open_OI)
    for column in order:
        scale_O = column_scale(scale_OG, column, num_columns)
        before_OI[:, column] = open_OI[:, column] / scale_O
        codes_OI[:, column] = before_OI[:, column].round().clamp(CODE_MIN, CODE_MAX)
        error_O = (open_OI[:, column] - codes_OI[:, column] * scale_O) / inverse_II[column, column]
        open_OI -= torch.outer(error_O, inverse_II[column])
        inverse_II -= torch.outer(inverse_II[:, column], inverse_II[column]) / inverse_II[column, column]
    return GptqSteps(codes_OI, before_OI, order)


def output_error(delta_OI: Tensor, hessian_II: Tensor) -> float:
    """Mean over tokens of |delta x|^2."""
    return float(torch.trace(delta_OI.double() @ hessian_II.double() @ delta_OI.double().T))


# Second moments.


def moment_sum(x_TI: Tensor) -> Tensor:
    """Sum over tokens of x x^T."""
    total_II = torch.zeros(x_TI.shape[1], x_TI.shape[1], dtype=torch.float64)
    for x_I in x_TI.double():
        total_II += torch.outer(x_I, x_I)
    return total_II


def blend(x_TI: Tensor, layer_mean_II: Tensor, blend_tokens: float) -> Tensor:
    """(1 - w) own mean + w layer mean, with w = b / (b + n); the layer's for an expert without tokens."""
    count = x_TI.shape[0]
    if count == 0:
        return layer_mean_II.double()
    share = blend_tokens / (blend_tokens + count)
    return (1 - share) * moment_sum(x_TI) / count + share * layer_mean_II.double()


# Packing.


def pack(codes_OI: Tensor) -> Tensor:
    """int32 words [O, W]: code + 8 in four bits, the lowest column in the lowest bits."""
    words = []
    for row in codes_OI.tolist():
        for start in range(0, len(row), 8):
            word = sum((int(code) + 8) << (4 * place) for place, code in enumerate(row[start : start + 8]))
            words.append(word - 2**32 if word >= 2**31 else word)
    return torch.tensor(words, dtype=torch.int32).reshape(codes_OI.shape[0], -1)


def unpack(packed_OW: Tensor) -> Tensor:
    """int8 codes [O, 8 W]."""
    rows = [[((word >> (4 * place)) & 15) - 8 for word in row for place in range(8)] for row in packed_OW.tolist()]
    return torch.tensor(rows, dtype=torch.int8)


# Mixture of experts.


def gated_activation(x_TH: Tensor, gate_up_JH: Tensor) -> Tensor:
    """silu(gate x) * (up x)."""
    half = gate_up_JH.shape[0] // 2
    gate_TI, up_TI = (x_TH.double() @ part.double().T for part in (gate_up_JH[:half], gate_up_JH[half:]))
    return gate_TI / (1 + torch.exp(-gate_TI)) * up_TI


def moe_forward(x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor) -> Tensor:
    """Each token through each of its experts, summed by the router's weights."""
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
    for token in range(x_TH.shape[0]):
        for expert, weight in zip(expert_TK[token].tolist(), weight_TK[token].tolist(), strict=True):
            hidden_1I = gated_activation(x_TH[token : token + 1], gate_up_EJH[expert])
            out_TH[token] += weight * (hidden_1I @ down_EHI[expert].double().T)[0]
    return out_TH


def dequantize_blocks(w_OI: Tensor, scale_PQ: Tensor, block: tuple[int, int]) -> Tensor:
    """FP8 values times the scale of their tile, of which the last may be partial; exact in float32."""
    value_OI = w_OI.float()
    for p in range(scale_PQ.shape[0]):
        for q in range(scale_PQ.shape[1]):
            value_OI[p * block[0] : (p + 1) * block[0], q * block[1] : (q + 1) * block[1]] *= scale_PQ[p, q]
    return value_OI
