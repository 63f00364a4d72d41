"""Sequences longer than a sparse-attention indexer selects: block by block as in one piece.

Shape suffixes: N = sequences, S = tokens per sequence, K = positions selected.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvq.calibration.sparse_attention import COPY_BYTES, FLOAT_BYTES, BlockwiseIndexer, SelectAll
from kvq.checkpoint.source import Source
from kvq.pipeline import prepare, quantize_checkpoint
from kvq.quantize.capture import Capture
from kvq.recipes.schema import load_recipe, override
from tests.calibration.models import (
    assert_same,
    kvq_outputs,
    layer_with_experts,
    load_model,
    open_runner,
    random_tokens,
    transformers_outputs,
)
from tests.checkpoints import make_checkpoint, preset
from tests.runs import Quiet

LENGTH = 75


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "glm", "glm_moe_dsa", "bf16", preset("glm-5.2"))


@pytest.fixture(autouse=True)
def no_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """relu makes many scores zero, and topk may take any of equal ones."""
    monkeypatch.setattr(functional, "relu", lambda score: functional.leaky_relu(score, 0.1))


def visible(topk_NSK: Tensor) -> Tensor:
    """[N, S, S]: which positions a query reads, the causal mask included."""
    chosen = torch.zeros(*topk_NSK.shape[:2], LENGTH, dtype=torch.bool).scatter(2, topk_NSK.long(), True)
    return chosen.tril()


def set_block(monkeypatch: pytest.MonkeyPatch, folder: Path, queries: int, sequences: int) -> None:
    indexer = layer_with_experts(open_runner(folder), 0).self_attn.indexer
    monkeypatch.setitem(COPY_BYTES, "cpu", queries * FLOAT_BYTES * sequences * indexer.head_dim * LENGTH)


@pytest.mark.parametrize("queries", [1, 8, 16, 17, 40, LENGTH, 1000])
def test_selects_what_the_indexer_selects(folder: Path, monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    runner = open_runner(folder)
    assert runner.config.index_topk == 16 < LENGTH
    set_block(monkeypatch, folder, queries, 3)
    hidden_NSH = runner.embed(random_tokens(3, LENGTH)).hidden_NSH
    module = layer_with_experts(runner, 1)
    selected, outputs = [], []
    for indexer in (module.self_attn.indexer, BlockwiseIndexer(module.self_attn.indexer)):
        module.self_attn.indexer = indexer
        with torch.no_grad():
            output_NSH, topk_NSK = module(
                hidden_NSH,
                attention_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(3, 1, -1, -1),
                position_embeddings=runner.rotary(hidden_NSH, torch.arange(LENGTH)[None]),
            )
        assert topk_NSK.shape == (3, LENGTH, 16) and topk_NSK.dtype == torch.int32
        selected.append(visible(topk_NSK))
        outputs.append(output_NSH)
    assert torch.equal(*selected)
    assert bool((selected[0].sum(dim=-1) == torch.arange(1, LENGTH + 1).clamp(max=16)).all())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-6)


def test_whole_model_equals_transformers_block_by_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that share the selection of the layer before them included."""
    set_block(monkeypatch, folder, 10, 2)
    tokens_NS = random_tokens(2, LENGTH)
    assert_same(kvq_outputs(folder, tokens_NS), transformers_outputs(folder, tokens_NS))


def test_experts_are_calibrated_on_what_transformers_gives_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole run over sequences longer than the selection, with the source's own experts handed on."""
    set_block(monkeypatch, folder, 10, 3)
    tokens_NS = random_tokens(3, LENGTH)
    (rows := tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"input_ids": r}) + "\n" for r in tokens_NS.tolist())
    )
    found: list[Tensor] = []
    real = Capture.of

    def watched(x_TH: Tensor, *rest: Any) -> Capture:
        found.append(x_TH)
        return real(x_TH, *rest)

    monkeypatch.setattr(Capture, "of", watched)
    settings = [f"max_seq_length={LENGTH}", "group_size=32", "propagate_error=false"]
    chosen = override(load_recipe("int4"), settings)
    source = Source(folder, str(folder))
    quantize_checkpoint(prepare(source, chosen, tmp_path / "out", device="cpu", calibration=rows), Quiet())
    model, expected = load_model(folder), []
    for layer in open_runner(folder).facts.moe_layers:
        if layer < len(model.model.layers):
            model.model.layers[layer].mlp.register_forward_pre_hook(lambda _, given: expected.append(given[0]))
    with torch.no_grad():
        model(tokens_NS, use_cache=False)
    assert len(expected) > 1
    for ours, theirs in zip(found, expected, strict=False):  # ours has the draft layer after these
        torch.testing.assert_close(ours, theirs.flatten(0, 1), rtol=0, atol=1e-4)


def test_memory_is_that_of_a_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor that the indexer makes is larger than the copies of the keys for a block of queries."""
    queries = 5
    set_block(monkeypatch, folder, queries, 2)
    runner = open_runner(folder)
    module = layer_with_experts(runner, 0)
    largest = 0
    real = torch.matmul

    def watched(left: Tensor, right: Tensor) -> Tensor:
        nonlocal largest
        result: Tensor = real(left, right)
        if left.dim() == right.dim() == 4:  # the indexer's: queries by head, keys
            largest = max(largest, left.shape[0] * left.shape[1] * right.shape[2] * right.shape[3])
        return result

    monkeypatch.setattr(torch, "matmul", watched)
    runner.run(module, 0, runner.embed(random_tokens(2, LENGTH)))
    assert isinstance(module.self_attn.indexer, BlockwiseIndexer)
    assert 0 < FLOAT_BYTES * largest <= COPY_BYTES["cpu"]


def test_one_module_runs_sequences_of_several_lengths(folder: Path) -> None:
    """Evaluation runs documents of all lengths through the same layer."""
    runner = open_runner(folder)
    module = layer_with_experts(runner, 0)
    for length in (40, 12, 16, 17, 40):
        used, fresh = (runner.embed(random_tokens(1, length)) for _ in range(2))
        runner.run(module, 0, used)
        assert isinstance(module.self_attn.indexer, SelectAll if length <= 16 else BlockwiseIndexer)
        runner.run(layer_with_experts(runner, 0), 0, fresh)
        assert torch.equal(used.hidden_NSH, fresh.hidden_NSH)
