"""From final hidden states to figures of every position, over the full vocabulary, in float64.

Definitions as in llama.cpp's perplexity tool: KL(base || quantized) of the distributions of the next token; delta p,
the quantized probability of the token that follows less the base's; whether the most likely tokens agree.

Shape suffixes: N = sequences of a group, S = tokens, H = hidden size, V = vocabulary, P = positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kvq.errors import CalibrationError
from kvq.verify.documents import Group

LOGITS_AT_ONCE = 2**24  # values of one model: 128 MiB in float64


class HiddenRows(Protocol):
    """Final hidden states of a group [N * S, H]: a tensor, or a file that is read piece by piece."""

    def __getitem__(self, rows: slice) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """One entry for every position. `base_P` and `other_P` are log p of the token that follows, NaN where none does;
    `document_P` numbers the sequences, `place_P` counts the tokens before."""

    kl_P: Tensor
    same_P: Tensor
    base_P: Tensor
    other_P: Tensor
    document_P: Tensor
    place_P: Tensor

    def pick(self, mask_P: Tensor) -> "Positions":
        return Positions(*(getattr(self, field.name)[mask_P] for field in fields(self)))

    @staticmethod
    def join(parts: Sequence["Positions"]) -> "Positions":
        return Positions(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Positions)))


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The output matrix of a model, and the model's name for errors."""

    weight_VH: Tensor
    name: str

    def log_p(self, hidden_PH: Tensor) -> Tensor:
        """Log probabilities [P, V] in float64. Raises CalibrationError for logits that are not finite."""
        hidden_PH = hidden_PH.to(self.weight_VH.device, self.weight_VH.dtype)
        logits_PV = F.linear(hidden_PH, self.weight_VH)
        if not bool(torch.isfinite(logits_PV).all()):
            raise CalibrationError(
                f"{self.name} gives logits that are NaN or Inf; look at its weights with `kvq verify`."
            )
        return F.log_softmax(logits_PV.double(), dim=-1)


def compare_group(
    group: Group, hidden: tuple[HiddenRows, HiddenRows], heads: tuple[Head, Head], first: int
) -> Positions:
    """All positions of a group; base first. Its sequences are numbered as its documents, long ones from `first`."""
    count, length = group.tokens_NS.shape
    next_P = F.pad(group.tokens_NS[:, 1:], (0, 1), value=-1).reshape(-1)
    numbers = torch.tensor(group.numbers if group.numbers is not None else list(range(first, first + count)))
    rows = max(1, LOGITS_AT_ONCE // heads[0].weight_VH.shape[0])
    parts: list[tuple[Tensor, ...]] = []
    with torch.no_grad():
        for start in range(0, count * length, rows):
            piece = slice(start, min(start + rows, count * length))
            base_PV, other_PV = (head.log_p(states[piece]) for head, states in zip(heads, hidden, strict=True))
            parts.append(tuple(value.cpu() for value in position_rows(base_PV, other_PV, next_P[piece])))
    kl, same, base, other = (torch.cat(column) for column in zip(*parts, strict=True))
    return Positions(kl, same, base, other, numbers.repeat_interleave(length), torch.arange(length).repeat(count))


def position_rows(base_PV: Tensor, other_PV: Tensor, next_P: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From log probabilities: KL(base || other), whether the top tokens agree, log p of the next token in both.

    A token that the base gives no probability (log p of -inf) adds nothing. KL below zero is rounding and becomes 0.
    """
    base_PV, other_PV = base_PV.double(), other_PV.double()
    p_PV = base_PV.exp()
    kl_P = torch.where(p_PV > 0, p_PV * (base_PV - other_PV), 0.0).sum(dim=-1)
    same_P = base_PV.argmax(dim=-1) == other_PV.argmax(dim=-1)
    next_P = next_P.to(base_PV.device)
    index = next_P.clamp(min=0).unsqueeze(-1)
    picked = [torch.where(next_P >= 0, x.gather(-1, index).squeeze(-1), torch.nan) for x in (base_PV, other_PV)]
    return kl_P.clamp(min=0), same_P, picked[0], picked[1]
