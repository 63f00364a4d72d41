"""Quantizing experts, by whatever solver, leaves the router's choices exactly as they were.

Shape suffixes: N = sequences, S = tokens per sequence, H = hidden size, T = tokens.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvq
from kvq.calibration.dataset import load_documents
from kvq.calibration.experts import RoutingRecorder
from kvq.calibration.forward import ModelRunner
from kvq.checkpoint.source import resolve_source
from kvq.pipeline import prepare, quantize_checkpoint
from kvq.recipes.schema import load_recipe, override
from tests.calibration.models import layer_with_experts, open_runner
from tests.checkpoints import edit_tensor
from tests.runs import QUANTIZED, Quiet, Shared

EXAMPLES = Path(kvq.__file__).parent.parent / "examples"
TRAINED = EXAMPLES / "tiny-glm-5-fp8"


def routed(runner: ModelRunner, layer: int, hidden_TH: Tensor) -> tuple[Tensor, ...]:
    """All that the norm behind the attention feeds: experts chosen, their weights, and the shared experts' output."""
    recorder = RoutingRecorder()
    module = runner.build_layer(layer, recorder)
    with torch.no_grad():
        shared_1TH = module.mlp(module.post_attention_layernorm(hidden_TH.unsqueeze(0)))
    (chosen_TK,), (weight_TK,) = recorder.expert_TK, recorder.weight_TK
    return chosen_TK, weight_TK, shared_1TH


def assert_same_routing(source: Path, out: Path, hidden: dict[int, Tensor]) -> None:
    before, after = open_runner(source), open_runner(out)
    assert set(hidden) == set(before.facts.moe_layers) and hidden
    for layer, hidden_TH in hidden.items():
        pairs = zip(routed(before, layer, hidden_TH), routed(after, layer, hidden_TH), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs), f"layer {layer}"


def random_hidden(folder: Path) -> dict[int, Tensor]:
    facts, generator = open_runner(folder).facts, torch.Generator().manual_seed(1)
    return {layer: torch.randn(500, facts.hidden_size, generator=generator) for layer in facts.moe_layers}


@pytest.mark.parametrize("name", QUANTIZED)
def test_on_random_inputs(shared: Shared, name: str) -> None:
    source = shared.source(name)
    assert_same_routing(source, shared.output(name, "solver=awq"), random_hidden(source))


def test_a_rescaled_norm_would_be_seen(shared: Shared, tmp_path: Path) -> None:
    """What AWQ does elsewhere: divide the norm by factors that the experts are multiplied by, and forget the router."""
    source = shared.source("glm-5")
    out = shared.copy(shared.output("glm-5", "solver=awq"), tmp_path / "out")
    norm = "model.layers.1.post_attention_layernorm.weight"
    edit_tensor(out, norm, lambda weight: weight * torch.linspace(0.9, 1.12, len(weight)).to(weight.dtype))
    with pytest.raises(AssertionError, match="layer 1"):
        assert_same_routing(source, out, random_hidden(source))


def test_on_real_inputs(tmp_path: Path) -> None:
    """The trained example on text: the hidden states that its own layers give."""
    recipe = override(load_recipe("int4-awq"), ["num_calibration_samples=4", "max_seq_length=64", "mtp=rtn"])
    data = tmp_path / "rows.jsonl"
    lines = (EXAMPLES / "held-out.jsonl").read_text(encoding="utf-8").splitlines()
    data.write_text("\n".join(lines[:4]), encoding="utf-8")
    prepared = prepare(resolve_source(str(TRAINED)), recipe, tmp_path / "out", device="cpu", calibration=data)
    manifest = quantize_checkpoint(prepared, Quiet())
    assert json.dumps(manifest["recipe"]).count('"awq"') == 1
    runner = open_runner(TRAINED)
    (tokens_S, *_) = load_documents(TRAINED, int(runner.facts.text_config["vocab_size"]), data, 1, 256)
    store = runner.embed(tokens_S.unsqueeze(0))
    hidden = {}
    for layer in range(runner.facts.num_layers):
        module = layer_with_experts(runner, layer)
        module.post_attention_layernorm.register_forward_pre_hook(
            lambda _module, inputs, layer=layer: hidden.update({layer: inputs[0][0]})
        )
        runner.run(module, layer, store)
    last = runner.facts.mtp_layers[0]  # its own input is not at hand: that of the layer before it
    real = {layer: hidden[min(layer, last - 1)] for layer in runner.facts.moe_layers}
    assert_same_routing(TRAINED, tmp_path / "out", real)
