"""Kept base states give the same figures to the last digit, and are refused for anything else."""

import json
from pathlib import Path

import pytest
import torch

from kvq.errors import OutputError, RecipeError, VerificationError
from tests.checkpoints import edit_tensor
from tests.runs import Shared, write_calibration
from tests.verify.comparison import compare


@pytest.mark.parametrize("name", ["glm-5", "kimi-k2.5"])
def test_same_figures_as_with_the_source_s_run(shared: Shared, name: str, tmp_path: Path) -> None:
    out, source, kept = shared.output(name), shared.source(name), tmp_path / "base.safetensors"
    both = compare(out, source, shared.calibration, rows=3, length=40, long_context=50, save_base_logits=kept)
    again = compare(out, source, shared.calibration, rows=3, length=40, long_context=50, base_logits=kept)
    assert again.figures == both.figures and again.distance["long_context"] == both.distance["long_context"]
    assert both.damage is not None and again.damage is None
    assert again.distance["settings"]["base_logits"] == "base.safetensors"
    positions = 3 * 40 + 3 * 50
    assert positions * 64 * 4 < kept.stat().st_size < positions * 64 * 4 + 4096  # hidden 64 in float32
    assert not (tmp_path / "base.safetensors.partial").exists()


def test_refused_for_anything_else(shared: Shared, tmp_path: Path) -> None:
    out, source, kept = shared.output("kimi-k2"), shared.source("kimi-k2"), tmp_path / "base.safetensors"
    compare(out, source, shared.calibration, rows=2, save_base_logits=kept, damage=False)
    with pytest.raises(VerificationError, match="was kept for another data, so comparing"):
        compare(out, source, shared.calibration, rows=3, base_logits=kept)
    with pytest.raises(VerificationError, match="was kept for another data and tokenizer"):
        other = shared.copy(source, tmp_path / "tokenizer")
        (other / "chat_template.jinja").write_text("{{ messages }}")
        compare(out, other, write_calibration(tmp_path / "x.jsonl", rows=1), base_logits=kept)
    with pytest.raises(VerificationError, match="was kept for another source"):
        other = shared.copy(source, tmp_path / "weights")
        edit_tensor(other, "model.norm.weight", lambda weight: weight * 2)
        compare(out, other, shared.calibration, rows=2, base_logits=kept)


def test_files_that_are_none(shared: Shared, tmp_path: Path) -> None:
    out, source = shared.output("kimi-k2"), shared.source("kimi-k2")
    with pytest.raises(VerificationError, match="is no file of base logits"):
        compare(out, source, shared.calibration, rows=1, base_logits=tmp_path / "absent")
    (tmp_path / "text").write_text(json.dumps({"a": 1}))
    with pytest.raises(VerificationError, match="is no file of base logits"):
        compare(out, source, shared.calibration, rows=1, base_logits=tmp_path / "text")
    with pytest.raises(VerificationError, match="was not written by `kvq evaluate --save-base-logits`"):
        shard = next(iter(sorted(source.glob("*.safetensors"))))
        compare(out, source, shared.calibration, rows=1, base_logits=shard)
    with pytest.raises(RecipeError, match="lies inside the checkpoint"):
        compare(out, source, shared.calibration, rows=1, save_base_logits=out / "kvq-reports" / "x.safetensors")
    with pytest.raises(OutputError, match="cannot be written"):
        compare(out, source, shared.calibration, rows=1, damage=False, save_base_logits=tmp_path / "none" / "x")


def test_another_torch_is_another_base(shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, source, kept = shared.output("kimi-k2"), shared.source("kimi-k2"), tmp_path / "base.safetensors"
    compare(out, source, shared.calibration, rows=1, damage=False, save_base_logits=kept)
    monkeypatch.setattr(torch, "__version__", "1.0.0")
    with pytest.raises(VerificationError, match="was kept for another torch"):
        compare(out, source, shared.calibration, rows=1, base_logits=kept)
