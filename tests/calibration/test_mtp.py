"""The multi-token-prediction layer's input.

Shape suffixes: N = sequences, S = tokens per sequence, H = hidden size.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvq.calibration.activations import ActivationStore
from kvq.calibration.forward import ModelRunner
from tests.calibration.models import layer_with_experts, open_runner, random_tokens
from tests.checkpoints import TINY, edit_config, make_checkpoint, read_tensors

LAYER = TINY.num_hidden_layers
FAMILIES = ("glm_moe_dsa", "glm4_moe")


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "source", request.param, "bf16")


def last_hidden(length: int = 12) -> ActivationStore:
    generator = torch.Generator().manual_seed(3)
    return ActivationStore(torch.randn(3, length, TINY.hidden_size, generator=generator), 2)


def rms(x: Tensor, weight_H: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight_H.float()


def plain_input(folder: Path, tokens_NS: Tensor, hidden_NSH: Tensor) -> Tensor:
    """Position i: eh_proj of (the embedding of token i + 1, the model's normed output at i), each normed."""
    tensors, prefix = read_tensors(folder), f"model.layers.{LAYER}."
    table = tensors.get(f"{prefix}embed_tokens.weight", tensors["model.embed_tokens.weight"])
    rows = []
    for tokens_S, hidden_SH in zip(tokens_NS, hidden_NSH, strict=True):
        for position in range(len(tokens_S) - 1):
            embedded_H = rms(table[tokens_S[position + 1]].float(), tensors[f"{prefix}enorm.weight"])
            output_H = rms(hidden_SH[position], tensors["model.norm.weight"])
            joined = torch.cat([embedded_H, rms(output_H, tensors[f"{prefix}hnorm.weight"])])
            rows.append(tensors[f"{prefix}eh_proj.weight"].float() @ joined)
    return torch.stack(rows).reshape(len(tokens_NS), -1, TINY.hidden_size)


def mtp_input(runner: ModelRunner, tokens_NS: Tensor) -> Tensor:
    return runner.mtp_input(LAYER, tokens_NS, last_hidden()).hidden_NSH


def test_equals_the_plain_formula(folder: Path) -> None:
    tokens_NS = random_tokens(3, 12)
    found_NSH = mtp_input(open_runner(folder), tokens_NS)
    assert found_NSH.shape == (3, 11, TINY.hidden_size)
    expected_NSH = plain_input(folder, tokens_NS, last_hidden().hidden_NSH)
    torch.testing.assert_close(found_NSH, expected_NSH, rtol=0, atol=1e-4)


def test_position_i_reads_token_i_plus_one(folder: Path) -> None:
    runner = open_runner(folder)
    tokens_NS = random_tokens(3, 12)
    changed_NS = tokens_NS.clone()
    changed_NS[1, 5] = (changed_NS[1, 5] + 1) % TINY.vocab_size
    changed = (mtp_input(runner, tokens_NS) != mtp_input(runner, changed_NS)).any(dim=-1)
    assert changed.nonzero().tolist() == [[1, 4]]


def test_the_first_token_is_not_read(folder: Path) -> None:
    runner = open_runner(folder)
    tokens_NS = random_tokens(3, 12)
    changed_NS = tokens_NS.clone()
    changed_NS[:, 0] = (changed_NS[:, 0] + 1) % TINY.vocab_size
    assert torch.equal(mtp_input(runner, tokens_NS), mtp_input(runner, changed_NS))


def test_the_model_s_last_hidden_states_are_not_changed(folder: Path) -> None:
    last = last_hidden()
    kept = last.hidden_NSH.clone()
    open_runner(folder).mtp_input(LAYER, random_tokens(3, 12), last)
    assert torch.equal(last.hidden_NSH, kept)


@pytest.mark.parametrize("length", [12, 24])
def test_the_layer_runs(folder: Path, length: int) -> None:
    runner = open_runner(folder)
    assert list(runner.facts.mtp_layers) == [LAYER]
    store = runner.mtp_input(LAYER, random_tokens(3, length), last_hidden(length))
    before = store.hidden_NSH.clone()
    runner.run(layer_with_experts(runner, LAYER), LAYER, store)
    assert store.hidden_NSH.shape == (3, length - 1, TINY.hidden_size)
    assert float((store.hidden_NSH - before).abs().max()) > 0.1


def test_the_layer_equals_a_decoder_layer_of_the_same_weights(folder: Path) -> None:
    """transformers has no MTP layers; as the last layer of a deeper model it is an ordinary one."""
    runner = open_runner(folder)
    store = runner.mtp_input(LAYER, random_tokens(3, 12), last_hidden())
    start = store.hidden_NSH.clone()
    runner.run(layer_with_experts(runner, LAYER), LAYER, store)

    def deepen(config: dict[str, object]) -> None:
        config.update(num_hidden_layers=LAYER + 1, num_nextn_predict_layers=0)
        if isinstance(config.get("indexer_types"), list):
            config["indexer_types"] = ["full"] * (LAYER + 1)

    edit_config(folder, deepen)
    deeper = open_runner(folder)
    other = ActivationStore(start, store.batch_size)
    deeper.run(layer_with_experts(deeper, LAYER), LAYER, other)
    assert torch.equal(store.hidden_NSH, other.hidden_NSH)
