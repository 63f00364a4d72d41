"""The distance between two checkpoints: against whole logits in float64, itself, and what it refuses."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kvq.errors import CalibrationError, VerificationError
from tests.checkpoints import edit_config, edit_tensor
from tests.runs import Shared, write_calibration
from tests.verify.comparison import compare, whole_logits


@pytest.mark.parametrize("name", ["glm-5", "glm-4.7", "kimi-k2", "deepseek-v3", "kimi-k2.5"])
def test_a_checkpoint_is_at_no_distance_from_itself(shared: Shared, name: str) -> None:
    found = compare(shared.source(name), shared.source(name), shared.calibration, rows=3)
    figures = found.figures
    assert (figures.mean_kld.value, figures.max_kld.value, figures.same_top_p.value) == (0.0, 0.0, 1.0)
    assert figures.ppl_ratio is not None and figures.ppl_ratio.value == 1.0
    assert (figures.num_documents, figures.num_positions, figures.num_predicted) == (3, 180, 177)
    assert found.damage is not None and set(map(str, found.damage["worst"].values())) == {"[]"}
    assert {row["own_error"] for row in found.damage["layers"]} == {0.0}
    assert {row["accumulated_cosine"] for row in found.damage["layers"]} == {1.0}
    assert {row["router_agreement"] for row in found.damage["layers"]} == {None, 1.0}
    assert found.distance["checkpoint"]["is_source"] is True and found.kv is None


def test_pass_through_is_at_no_distance(shared: Shared) -> None:
    found = compare(shared.output("kimi-k2.5"), shared.source("kimi-k2.5"), shared.calibration, rows=2)
    assert (found.figures.mean_kld.value, found.figures.same_top_p.value) == (0.0, 1.0)
    assert found.distance["checkpoint"]["is_source"] is False


@pytest.mark.parametrize("damage", [True, False])
@pytest.mark.parametrize("name", ["glm-5", "kimi-k2"])
def test_equals_whole_logits(shared: Shared, name: str, damage: bool, tmp_path: Path) -> None:
    """Rows of two lengths, on either side of what GLM-5's indexer selects, against one row at a time in float64."""
    data = [write_calibration(tmp_path / f"{n}.jsonl", rows=2, tokens=n) for n in (21, 9)]
    ours = compare(shared.output(name), shared.source(name), *data, length=20, damage=damage).figures
    kl, same, base_ln, other_ln = [], [], [], []
    for line in "".join(file.read_text() for file in data).splitlines():
        ids = torch.tensor(json.loads(line)["input_ids"][:20])
        p, q = (
            whole_logits(folder, ids).double().log_softmax(-1) for folder in (shared.source(name), shared.output(name))
        )
        kl += (p.exp() * (p - q)).sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
        base_ln += p[:-1].gather(1, ids[1:, None]).flatten().tolist()
        other_ln += q[:-1].gather(1, ids[1:, None]).flatten().tolist()
    assert ours.num_positions == len(kl) == 58 and ours.num_predicted == len(base_ln) == 54
    assert ours.mean_kld.value == pytest.approx(float(np.mean(kl)), rel=1e-3) and ours.mean_kld.value > 1e-5
    assert ours.max_kld.value == pytest.approx(max(kl), rel=1e-3)
    assert ours.same_top_p.value == pytest.approx(float(np.mean(same)), abs=1e-9)
    assert ours.mean_ppl_base is not None and ours.mean_ppl_q is not None
    assert ours.mean_ppl_base.value == pytest.approx(math.exp(-float(np.mean(base_ln))), rel=1e-4)
    assert ours.mean_ppl_q.value == pytest.approx(math.exp(-float(np.mean(other_ln))), rel=1e-4)


def test_domains_are_the_rows_own_or_their_files(shared: Shared, tmp_path: Path) -> None:
    plain = write_calibration(tmp_path / "plain.jsonl", rows=2, tokens=10)
    rows = [
        json.loads(line) for line in write_calibration(tmp_path / "b.jsonl", rows=3, tokens=12).read_text().splitlines()
    ]
    named = [rows[0] | {"domain": "code"}, rows[1] | {"kind": "arithmetic"}, rows[2]]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, named)))
    found = compare(shared.output("kimi-k2"), shared.source("kimi-k2"), plain, tmp_path / "b.jsonl", damage=False)
    domains = found.distance["domains"]
    assert {name: row["num_positions"] for name, row in domains.items()} == {
        "plain": 20, "code": 12, "arithmetic": 12, "b": 12,
    }  # fmt: skip
    alone = compare(shared.output("kimi-k2"), shared.source("kimi-k2"), plain, damage=False)
    assert domains["plain"]["mean_kld"]["value"] == pytest.approx(alone.figures.mean_kld.value, rel=1e-9)
    assert [row["num_documents"] for row in found.distance["data"]] == [2, 3]
    assert [(row["from"], row["num_positions"]) for row in found.distance["positions"]] == [
        (0, 5), (1, 5), (2, 10), (4, 20), (8, 16),
    ]  # fmt: skip


def test_long_sequences_are_packed_and_kept_apart(shared: Shared) -> None:
    """12 rows of 60 tokens give 18 sequences of 40, of which 8 are taken; the other figures do not see them."""
    out, source = shared.output("glm-5"), shared.source("glm-5")
    found = compare(out, source, shared.calibration, length=12, long_context=40)
    alone = compare(out, source, shared.calibration, length=12, damage=False)
    assert found.figures == alone.figures
    long = found.distance["long_context"]
    assert (long["num_sequences"], long["length"], long["figures"]["num_positions"]) == (8, 40, 320)
    ids = [i for line in shared.calibration.read_text().splitlines() for i in json.loads(line)["input_ids"]]
    p, q = (whole_logits(folder, torch.tensor(ids[40:80])).double().log_softmax(-1) for folder in (source, out))
    kl = (p.exp() * (p - q)).sum(-1)
    assert long["figures"]["max_kld"]["value"] >= float(kl.max()) * 0.999
    with pytest.raises(CalibrationError, match="720 tokens in all, fewer than one sequence of --long-context 721"):
        compare(out, source, shared.calibration, long_context=721)


# What it refuses.


def test_vocabularies_must_agree(shared: Shared, tmp_path: Path) -> None:
    other = shared.copy(shared.output("kimi-k2"), tmp_path / "other")
    edit_config(other, lambda config: config.update(vocab_size=120))
    with pytest.raises(VerificationError, match=r"vocabularies of different size \(120 and 128\)"):
        compare(other, shared.source("kimi-k2"), shared.calibration, rows=1)


def test_logits_that_are_not_finite(shared: Shared, tmp_path: Path) -> None:
    other = shared.copy(shared.output("kimi-k2"), tmp_path / "other")
    edit_tensor(other, "lm_head.weight", lambda weight: torch.full_like(weight, 3e38))
    with pytest.raises(CalibrationError, match="other gives logits that are NaN or Inf"):
        compare(other, shared.source("kimi-k2"), shared.calibration, rows=1)


def test_tokenizers_must_agree(shared: Shared, tmp_path: Path) -> None:
    """Two ids swapped: rows of text are refused, rows of ids are not read by any tokenizer."""
    other = shared.copy(shared.output("glm-4.7"), tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[1:3]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "".join(map(str, vocabulary))}) + "\n")
    with pytest.raises(
        VerificationError, match=r"text\.jsonl:1: .* part at token 1: their tokenizers or chat templates"
    ):
        compare(other, shared.source("glm-4.7"), text)
    assert compare(other, shared.source("glm-4.7"), shared.calibration, rows=1, damage=False).distance["notes"] == []


def test_a_missing_tokenizer_is_noted(shared: Shared, tmp_path: Path) -> None:
    other = shared.copy(shared.output("glm-4.7"), tmp_path / "other")
    (other / "tokenizer.json").unlink()
    (note,) = compare(other, shared.source("glm-4.7"), shared.calibration, rows=1, damage=False).distance["notes"]
    assert note == "other has no tokenizer; the source's was used unchecked"


def test_data_without_two_tokens(shared: Shared, tmp_path: Path) -> None:
    data = tmp_path / "short.jsonl"
    data.write_text('{"input_ids": [1]}\n')
    with pytest.raises(CalibrationError, match=r"short\.jsonl: no row gives two tokens or more"):
        compare(shared.output("kimi-k2"), shared.source("kimi-k2"), data)
    data.write_text('{"input_ids": [1]}\n{"input_ids": [1, 2]}\n')
    found = compare(shared.output("kimi-k2"), shared.source("kimi-k2"), data, damage=False)
    assert found.distance["data"][0]["num_left_out"] == 1 and found.figures.num_predicted == 1


def test_other_models_and_the_wrong_way_round(shared: Shared) -> None:
    with pytest.raises(VerificationError, match="are not forms of one model"):
        compare(shared.source("glm-4.7"), shared.source("kimi-k2"), shared.calibration)
    with pytest.raises(VerificationError, match="exchanged"):
        compare(shared.source("kimi-k2"), shared.output("kimi-k2"), shared.calibration)
