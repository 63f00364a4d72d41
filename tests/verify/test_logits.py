"""The distance between two checkpoints: a hand-computed example, a plain float64 reference, and two equal models."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kvq.calibration.forward import ModelRunner
from kvq.checkpoint.reader import CheckpointReader
from kvq.errors import CalibrationError, VerificationError
from kvq.verify.logits import Distance, final_hidden, group_by_length, measure_distance, position_rows
from kvq.verify.logits import summarize_positions as summarize
from tests.checkpoints import edit_config, edit_tensor
from tests.runs import Shared, write_calibration

CPU = torch.device("cpu")


def distance(quantized: Path, source: Path, data: Path, rows: int | None = None, length: int = 512) -> Distance:
    return measure_distance(
        quantized, source, data, max_rows=rows, max_seq_length=length, device=CPU, stage=lambda text: None
    )


def test_two_positions_by_hand() -> None:
    """KL(p || q) = 1/2 ln 2 at the first position and ln 2 at the second; the tops agree at one of two."""
    p = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).clamp(min=1e-30)
    q = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.3, 0.2]])
    kl, same, base, other = position_rows(p.log(), q.log(), torch.tensor([1, -1]))
    assert kl.tolist() == pytest.approx([0.25 * math.log(2), math.log(2)])
    assert same.tolist() == [False, True]
    assert base[0].item() == pytest.approx(math.log(0.25)) and other[0].item() == pytest.approx(math.log(0.5))
    assert math.isnan(base[1]) and math.isnan(other[1])


def test_summary_by_hand() -> None:
    """Perplexities 4 and 2 where the next token is known: 1/ratio 2; standard errors of two values."""
    nan = math.nan
    result = summarize(
        1,
        torch.tensor([0.0, 0.2], dtype=torch.float64),
        torch.tensor([True, False]),
        torch.tensor([math.log(0.25), nan], dtype=torch.float64),
        torch.tensor([math.log(0.5), nan], dtype=torch.float64),
    )
    assert [result.num_positions, result.mean_kl, result.max_kl] == pytest.approx([2, 0.1, 0.2])
    assert result.percentile_kl["50"] == pytest.approx(0.1) and result.percentile_kl["99"] == pytest.approx(0.198)
    assert result.mean_kl_error == pytest.approx(0.1)  # std 0.2 / sqrt 2, over sqrt 2
    assert [result.same_top_p, result.same_top_p_error] == pytest.approx([0.5, 0.5 / math.sqrt(2)])
    assert [result.base_perplexity, result.quantized_perplexity] == pytest.approx([4, 2])
    assert result.perplexity_ratio == pytest.approx(0.5) and result.ln_ppl_ratio_error == 0.0


def test_equals_a_plain_reference() -> None:
    draw = torch.Generator().manual_seed(0)
    base, other = (torch.randn(40, 30, generator=draw) * 3 for _ in range(2))
    following = torch.randint(0, 30, (40,), generator=draw)
    rows = position_rows(base.log_softmax(-1), other.log_softmax(-1), following)
    p, q = (np.exp(x.double().numpy()) / np.exp(x.double().numpy()).sum(1, keepdims=True) for x in (base, other))
    assert rows[0].numpy() == pytest.approx((p * np.log(p / q)).sum(1), rel=1e-5)
    assert rows[1].tolist() == (p.argmax(1) == q.argmax(1)).tolist()
    picked = np.log(p)[np.arange(40), following.numpy()]
    assert rows[2].numpy() == pytest.approx(picked, rel=1e-5)


@pytest.mark.parametrize("name", ["glm-5", "glm-4.7", "kimi-k2", "deepseek-v3", "kimi-k2.5"])
def test_a_checkpoint_is_at_no_distance_from_itself(shared: Shared, name: str) -> None:
    same = distance(shared.source(name), shared.source(name), shared.calibration, rows=3)
    assert (same.mean_kl, same.max_kl, same.same_top_p, same.perplexity_ratio) == (0.0, 0.0, 1.0, 1.0)
    assert (same.num_documents, same.num_positions) == (3, 180)


def test_pass_through_is_at_no_distance(shared: Shared) -> None:
    same = distance(shared.output("kimi-k2.5"), shared.source("kimi-k2.5"), shared.calibration, rows=2)
    assert (same.mean_kl, same.same_top_p) == (0.0, 1.0)


@pytest.mark.parametrize("name", ["glm-5", "kimi-k2"])
def test_measured_distance_equals_whole_logits(shared: Shared, name: str, tmp_path: Path) -> None:
    """Rows of several lengths, against logits of one row at a time in float64."""
    data = write_calibration(tmp_path / "a.jsonl", rows=2, tokens=21)
    data.write_text(data.read_text() + write_calibration(tmp_path / "b.jsonl", rows=2, tokens=9).read_text())
    ours = distance(shared.output(name), shared.source(name), data, length=20)
    kl, same, base_ln, other_ln = [], [], [], []
    for line in data.read_text().splitlines():
        ids = torch.tensor(json.loads(line)["input_ids"][:20])
        p, q = (
            whole_logits(folder, ids).double().log_softmax(-1) for folder in (shared.source(name), shared.output(name))
        )
        kl += (p.exp() * (p - q)).sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
        base_ln += p[:-1].gather(1, ids[1:, None]).flatten().tolist()
        other_ln += q[:-1].gather(1, ids[1:, None]).flatten().tolist()
    assert ours.num_positions == len(kl) == 58
    assert ours.mean_kl == pytest.approx(float(np.mean(kl)), rel=1e-3)
    assert ours.max_kl == pytest.approx(max(kl), rel=1e-3)
    assert ours.same_top_p == pytest.approx(float(np.mean(same)), abs=1e-9)
    assert ours.base_perplexity == pytest.approx(math.exp(-float(np.mean(base_ln))), rel=1e-4)
    assert ours.quantized_perplexity == pytest.approx(math.exp(-float(np.mean(other_ln))), rel=1e-4)
    assert ours.mean_kl > 1e-5


def whole_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    runner = ModelRunner(CheckpointReader(folder), CPU)
    with torch.no_grad():
        return F.linear(final_hidden(runner, [ids.unsqueeze(0)], lambda text: None)[0][0], runner.lm_head())


def test_documents_of_one_length_lie_together() -> None:
    groups = group_by_length([torch.tensor([1, 2]), torch.tensor([3, 4, 5]), torch.tensor([6, 7])])
    assert [group.tolist() for group in groups] == [[[3, 4, 5]], [[1, 2], [6, 7]]]


def test_vocabularies_must_agree(shared: Shared, tmp_path: Path) -> None:
    other = shared.copy(shared.output("kimi-k2"), tmp_path / "other")
    edit_config(other, lambda config: config.update(vocab_size=120))
    with pytest.raises(VerificationError, match="vocabularies of different size"):
        distance(other, shared.source("kimi-k2"), shared.calibration, rows=1)


def test_logits_that_are_not_finite(shared: Shared, tmp_path: Path) -> None:
    other = shared.copy(shared.output("kimi-k2"), tmp_path / "other")
    edit_tensor(other, "lm_head.weight", lambda weight: torch.full_like(weight, 3e38))
    with pytest.raises(CalibrationError, match="NaN or Inf"):
        distance(other, shared.source("kimi-k2"), shared.calibration, rows=1)
