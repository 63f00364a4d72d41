"""Distance between the next-token probabilities of two checkpoints, computed layer by layer with the memory of one.

Definitions as in llama.cpp's perplexity tool: KL(base || quantized) over the full vocabulary at every position, same
top p = share of positions whose most likely token agrees, perplexities over the same positions.

Shape suffixes: D = documents of one length, S = tokens, H = hidden size, V = vocabulary,
P = positions of all documents.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvq.calibration.activations import ActivationStore
from kvq.calibration.dataset import load_documents
from kvq.calibration.experts import RoutedExperts
from kvq.calibration.forward import ModelRunner
from kvq.checkpoint.reader import CheckpointReader
from kvq.errors import CalibrationError, VerificationError

PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0)
LOGIT_ROWS = 512


@dataclass(frozen=True, slots=True)
class Distance:
    """`ln_ppl_ratio` is the mean of ln PPL(quantized) - ln PPL(base); errors are standard errors of the means."""

    num_documents: int
    num_positions: int
    mean_kl: float
    mean_kl_error: float
    max_kl: float
    percentile_kl: dict[str, float]
    same_top_p: float
    same_top_p_error: float
    base_perplexity: float
    quantized_perplexity: float
    perplexity_ratio: float
    ln_ppl_ratio_error: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def final_hidden(runner: ModelRunner, groups: list[Tensor], stage: Callable[[str], None]) -> list[Tensor]:
    """Hidden states after the final norm for every group of token sequences [D, S], on the host."""
    stores = [runner.embed(tokens_DS) for tokens_DS in groups]
    for layer in range(runner.facts.num_layers):
        stage(f"layer {layer + 1}/{runner.facts.num_layers}")
        experts: Any = torch.nn.Identity()
        if layer in runner.facts.moe_layers:
            everyone = range(runner.facts.num_experts)
            experts = RoutedExperts(runner.expert_gate_up(layer, everyone), runner.expert_down(layer, everyone))
        module = runner.build_layer(layer, experts)
        for store in stores:
            runner.run(module, layer, store)
        runner.reader.release()
    norm = runner.final_norm()
    with torch.no_grad():
        return [_normed(runner, store, norm) for store in stores]


def _normed(runner: ModelRunner, store: ActivationStore, norm: torch.nn.Module) -> Tensor:
    for batch in store.batches():
        store.write(batch, norm(store.read(batch, runner.device)))
    return store.hidden_NSH


def group_by_length(documents: list[Tensor]) -> list[Tensor]:
    """Documents of equal length stacked: [D, S] each, longest first."""
    lengths = sorted({len(document) for document in documents}, reverse=True)
    return [torch.stack([document for document in documents if len(document) == length]) for length in lengths]


def measure_distance(
    quantized: Path,
    source: Path,
    data: Path,
    *,
    max_rows: int | None,
    max_seq_length: int,
    device: torch.device,
    stage: Callable[[str], None],
) -> Distance:
    """Compare two checkpoint folders on the rows of a data file. Raises CalibrationError, VerificationError."""
    base, other = (ModelRunner(CheckpointReader(folder), device) for folder in (source, quantized))
    vocab_size = int(base.facts.text_config["vocab_size"])
    if int(other.facts.text_config["vocab_size"]) != vocab_size:
        raise VerificationError(
            f"{quantized} and {source} have vocabularies of different size; they cannot be compared."
        )
    _expect_comparable(base, other)
    documents = load_documents(source, vocab_size, data, max_rows, max_seq_length)
    groups = group_by_length(documents)
    base_hidden = final_hidden(base, groups, lambda text: stage(f"source {text}"))
    other_hidden = final_hidden(other, groups, lambda text: stage(f"quantized {text}"))
    stage("comparing")
    base_head, other_head = base.lm_head(), other.lm_head()
    parts = [
        _compare(tokens.reshape(-1), _next(tokens), left.flatten(0, 1), right.flatten(0, 1), (base_head, other_head))
        for tokens, left, right in zip(groups, base_hidden, other_hidden, strict=True)
    ]
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return summarize_positions(len(documents), *columns)


def _expect_comparable(base: ModelRunner, other: ModelRunner) -> None:
    """Two forms of one model, the quantized one second. Raises VerificationError."""
    ours, theirs = ((r.facts.arch.model_type, r.facts.num_layers, r.facts.hidden_size) for r in (other, base))
    if ours != theirs:
        raise VerificationError(
            f"{other.reader.folder} {ours} and {base.reader.folder} {theirs} are not forms of one model "
            "(model_type, layers, hidden size)."
        )
    if base.source.kind == "int4-packed" and other.source.kind != "int4-packed":
        raise VerificationError(
            f"{base.reader.folder} is quantized and {other.reader.folder} is not: "
            "are the folder and --source exchanged?"
        )


def _next(tokens_DS: Tensor) -> Tensor:
    """The token to predict at each position, -1 where there is none."""
    return F.pad(tokens_DS[:, 1:], (0, 1), value=-1).reshape(-1)


def _compare(
    tokens_P: Tensor, next_P: Tensor, base_PH: Tensor, other_PH: Tensor, heads: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per position: KL, same top token, and both models' log p of the next token (NaN at a document's end)."""
    rows: list[tuple[Tensor, ...]] = []
    with torch.no_grad():
        for start in range(0, tokens_P.shape[0], LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            base_V, other_V = (
                F.log_softmax(F.linear(hidden[part].to(head), head).float(), dim=-1)
                for hidden, head in zip((base_PH, other_PH), heads, strict=True)
            )
            if not bool(torch.isfinite(base_V).all() and torch.isfinite(other_V).all()):
                raise CalibrationError(
                    "a model gives logits that are NaN or Inf; look at its weights with `kvq verify`."
                )
            rows.append(tuple(value.cpu() for value in position_rows(base_V, other_V, next_P[part].to(base_V.device))))
    kl, same, base_next, other_next = (torch.cat(column) for column in zip(*rows, strict=True))
    return kl, same, base_next, other_next


def position_rows(base_PV: Tensor, other_PV: Tensor, next_P: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From log probabilities: KL(base || other), whether the top tokens agree, log p of the next token in both."""
    kl_P = (base_PV.double().exp() * (base_PV.double() - other_PV.double())).sum(dim=-1)
    same_P = base_PV.argmax(dim=-1) == other_PV.argmax(dim=-1)
    index = next_P.clamp(min=0).unsqueeze(-1)
    picked = [
        torch.where(next_P >= 0, log_p.gather(-1, index).squeeze(-1).double(), torch.nan)
        for log_p in (base_PV, other_PV)
    ]
    return kl_P.clamp(min=0), same_P, picked[0], picked[1]


def summarize_positions(num_documents: int, kl_P: Tensor, same_P: Tensor, base_P: Tensor, other_P: Tensor) -> Distance:
    """Means, standard errors and percentiles over all positions."""
    count = kl_P.numel()
    top = float(same_P.double().mean())
    known = ~torch.isnan(base_P)
    base_ln, other_ln = -base_P[known], -other_P[known]
    difference = other_ln - base_ln
    base_ppl, other_ppl = math.exp(float(base_ln.mean())), math.exp(float(other_ln.mean()))
    quantiles = torch.quantile(kl_P, torch.tensor([p / 100 for p in PERCENTILES], dtype=torch.float64)).tolist()
    return Distance(
        num_documents=num_documents,
        num_positions=count,
        mean_kl=float(kl_P.mean()),
        mean_kl_error=_standard_error(kl_P),
        max_kl=float(kl_P.max()),
        percentile_kl={f"{p:g}": value for p, value in zip(PERCENTILES, quantiles, strict=True)},
        same_top_p=top,
        same_top_p_error=math.sqrt(max(0.0, top * (1 - top)) / count),
        base_perplexity=base_ppl,
        quantized_perplexity=other_ppl,
        perplexity_ratio=other_ppl / base_ppl,
        ln_ppl_ratio_error=_standard_error(difference),
    )


def _standard_error(values: Tensor) -> float:
    return float(values.std() / math.sqrt(values.numel())) if values.numel() > 1 else 0.0
