"""transformers and compressed-tensors load what kvq writes, and compute what kvq's evaluation computes."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from kvq.verify.streaming import final_hidden
from tests.checkpoints import edit_config
from tests.loading import load_pretrained, rounded_runner
from tests.runs import CASES, QUANTIZED, Shared


def readable(shared: Shared, folder: Path, name: str, tmp_path: Path) -> Path:
    """kimi_k2 is deepseek_v3 to transformers, which knows the former only by code that comes with a checkpoint."""
    if CASES[name].family != "kimi_k2":
        return folder
    copy = shared.copy(folder, tmp_path / "as-deepseek")
    edit_config(copy, lambda config: (config.update(model_type="deepseek_v3"), config.pop("auto_map")))
    return copy


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, ()) for name in QUANTIZED),
        ("glm-5", ("solver=rtn",)),
        ("glm-5", ("rest=bf16",)),
        ("glm-4.7", ("rest=bf16",)),
        ("kimi-k2", ("rest=bf16",)),
    ],
)
def test_no_key_is_missing_and_the_logits_agree(
    shared: Shared, tmp_path: Path, name: str, settings: tuple[str, ...]
) -> None:
    folder = readable(shared, shared.output(name, *settings), name, tmp_path)
    model, report = load_pretrained(folder)
    mtp = f"model.layers.{CASES[name].dims.num_hidden_layers}."
    assert not report["missing_keys"] and not report["mismatched_keys"] and not report["error_msgs"]
    assert all(key.startswith(mtp) for key in report["unexpected_keys"])  # transformers has no draft layer
    ids = torch.randint(0, CASES[name].dims.vocab_size, (3, 40), generator=torch.Generator().manual_seed(5))
    runner = rounded_runner(folder)
    with torch.no_grad():
        theirs = model(ids).logits
        ours = F.linear(final_hidden(runner, [ids], lambda text: None)[0], runner.lm_head())
    assert theirs.abs().max() > 1
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)
