"""The whole way, for every family: what a run leaves on disk, read back without kvq's own reader."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvq.calibration.activations import ActivationStore
from kvq.checkpoint.dequant import dequantize_block, dequantize_channel
from kvq.errors import CalibrationError, OutputError
from kvq.run import add_experts
from tests.checkpoints import INDEX, edit_tensor, make_checkpoint, mtp_layers, read_json, read_tensors, starved_expert
from tests.runs import CASES, PASS_THROUGH, QUANTIZED, Shared, all_bytes, fresh_kvq, manifest_of, output_bytes, quantize

GROUP = 32
PACKED_PARTS = ("weight_packed", "weight_scale", "weight_shape")


def unpacked(packed: Tensor, scale: Tensor) -> NDArray[np.float64]:
    """INT4 words and scales to weights, by hand: eight codes a word, lowest bits first, stored with 8 added."""
    words = packed.numpy().view(np.uint32)
    codes = np.stack([(words >> (4 * place)) & 15 for place in range(8)], axis=-1).reshape(words.shape[0], -1)
    steps: NDArray[np.float64] = np.repeat(scale.double().numpy(), GROUP, axis=1)
    return (codes.astype(np.float64) - 8) * steps


def source_weight(tensors: dict[str, Tensor], name: str) -> Tensor:
    if f"{name}_scale_inv" in tensors:
        return dequantize_block(tensors[name], tensors[f"{name}_scale_inv"], (GROUP, GROUP))
    if f"{name}_scale" in tensors:
        return dequantize_channel(tensors[name], tensors[f"{name}_scale"])
    return tensors[name].float()


def raw(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def errors_of_experts(source: Path, out: Path) -> dict[str, float]:
    """Relative weight error of every packed matrix, by module."""
    before, after = read_tensors(source), read_tensors(out)
    errors = {}
    for name in after:
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
            original = source_weight(before, f"{module}.weight").double().numpy()
            written = unpacked(after[name], after[f"{module}.weight_scale"])
            errors[module] = float(np.linalg.norm(written - original) / np.linalg.norm(original))
    return errors


@pytest.mark.parametrize("settings", [(), ("solver=rtn",)], ids=["gptq", "rtn"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_experts_are_int4_and_near_their_source(shared: Shared, name: str, settings: tuple[str, ...]) -> None:
    out, case = shared.output(name, *settings), CASES[name]
    errors = errors_of_experts(shared.source(name), out)
    moe_layers = case.dims.num_hidden_layers - case.dims.first_k_dense_replace + len(mtp_layers(case.family, case.dims))
    assert len(errors) == 3 * case.dims.n_routed_experts * moe_layers
    assert 0.02 < min(errors.values()) and max(errors.values()) < 0.15
    rows = {row["name"]: row for row in manifest_of(out)["modules"]}
    assert rows.keys() == errors.keys()
    assert {name: row["relative_weight_error"] for name, row in rows.items()} == pytest.approx(errors, rel=1e-4)


@pytest.mark.parametrize("name", QUANTIZED)
def test_everything_else_is_as_it_was(shared: Shared, name: str) -> None:
    """Bytes, not values; only the names of the scales change, and what the engines want in BF16."""
    before, after = read_tensors(shared.source(name)), read_tensors(shared.output(name))
    left = dict(after)
    for tensor_name, tensor in before.items():
        if ".mlp.experts." in tensor_name:
            continue
        if ".indexer.wk." in tensor_name:
            if tensor_name.endswith(".weight"):
                value = source_weight(before, tensor_name).bfloat16()
                assert raw(left.pop(tensor_name)) == raw(value), tensor_name
            continue
        assert raw(left.pop(tensor_name.replace("_scale_inv", "_scale"))) == raw(tensor), tensor_name
    assert all(".mlp.experts." in tensor_name and tensor_name.endswith(PACKED_PARTS) for tensor_name in left)


@pytest.mark.parametrize("name", CASES)
def test_index_describes_the_shards(shared: Shared, name: str) -> None:
    out = shared.output(name)
    index, tensors = read_json(out / INDEX), read_tensors(out)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    by_shard: dict[str, set[str]] = {}
    for tensor_name, shard in index["weight_map"].items():
        by_shard.setdefault(shard, set()).add(tensor_name)
    assert set(by_shard) == {path.name for path in out.glob("*.safetensors")}
    assert not (out.parent / f"{out.name}.partial").exists()
    if name != PASS_THROUGH:  # one shard per layer, and one for what lies outside
        for names in by_shard.values():
            assert (
                len({re.sub(r"(layers\.\d+\.|).*", r"\1", tensor_name.removeprefix("model.")) for tensor_name in names})
                == 1
            )


@pytest.mark.parametrize("name", CASES)
def test_side_files_are_copied_byte_for_byte(shared: Shared, name: str) -> None:
    """generation_config.json too, which transformers would refuse to save; the card under another name; no code run."""
    before, after = all_bytes(shared.source(name)), all_bytes(shared.output(name))
    side = {n: data for n, data in before.items() if ".safetensors" not in n and n not in ("config.json", "README.md")}
    assert {"generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE"} <= side.keys()
    assert {n: after.get(n) for n in side} == side
    assert after["SOURCE_README.md"] == before["README.md"]
    assert "README.md" not in after


@pytest.mark.parametrize("name", QUANTIZED)
def test_config_changes_in_one_place(shared: Shared, name: str) -> None:
    before, after = (read_json(folder / "config.json") for folder in (shared.source(name), shared.output(name)))
    described = after.pop("quantization_config")
    before.pop("quantization_config", None)
    assert list(after.items()) == list(before.items())
    weights = described["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["type"], weights["group_size"]) == (4, "int", GROUP)
    assert described["format"] == "pack-quantized"
    assert ("group_1" in described["config_groups"]) == (CASES[name].source != "bf16")


def test_native_int4_passes_through(shared: Shared) -> None:
    """Same shards under the same odd names, same config; what kvq adds is the manifest and an index of its own."""
    before, after = all_bytes(shared.source(PASS_THROUGH)), all_bytes(shared.output(PASS_THROUGH))
    shards = [name for name in before if name.endswith(".safetensors")]
    assert shards and all(re.fullmatch(r"model-\d{5}-of-\d{6}\.safetensors", name) for name in shards)
    for name in (*shards, "config.json", "modeling_kimi_k25.py"):
        assert after[name] == before[name], name
    assert json.loads(after[INDEX])["weight_map"] == json.loads(before[INDEX])["weight_map"]
    manifest = manifest_of(shared.output(PASS_THROUGH))
    assert manifest["pass_through"] is True and manifest["modules"] == []


@pytest.mark.parametrize("name", ["glm-5", "glm-4.7"])
@pytest.mark.parametrize(("mtp", "outcome"), [("gptq", "solved"), ("rtn", "rounded")])
def test_draft_layer_keeps_its_tensors_and_its_experts_are_packed(
    shared: Shared, name: str, mtp: str, outcome: str
) -> None:
    out = shared.output(name, *([] if mtp == "gptq" else [f"mtp={mtp}"]))
    layer = CASES[name].dims.num_hidden_layers
    rows = [row for row in manifest_of(out)["modules"] if row["name"].startswith(f"model.layers.{layer}.")]
    assert len(rows) == 3 * CASES[name].dims.n_routed_experts
    assert {row["outcome"] for row in rows} == {outcome}
    assert all((row["num_tokens"] is None) == (mtp == "rtn") for row in rows)
    if mtp == "gptq":  # one position fewer than the sequences have: the last has no next token
        calibration = manifest_of(out)["calibration"]
        routed = sum(row["num_tokens"] for row in rows) / 3 / CASES[name].dims.num_experts_per_tok
        assert routed == calibration["num_tokens"] - calibration["num_sequences"]


@pytest.mark.parametrize("name", ["glm-5", "glm-4.7", "kimi-k2"])
def test_rest_in_bf16(shared: Shared, name: str) -> None:
    out = shared.output(name, "rest=bf16")
    before, after = read_tensors(shared.source(name)), read_tensors(out)
    assert not [n for n, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn or n.endswith("_scale_inv")]
    for tensor_name, tensor in before.items():
        if tensor.dtype == torch.float8_e4m3fn and ".mlp.experts." not in tensor_name:
            assert raw(after[tensor_name]) == raw(source_weight(before, tensor_name).bfloat16()), tensor_name
    described = read_json(out / "config.json")["quantization_config"]
    plain = {n.removesuffix(".weight") for n, tensor in after.items() if n.endswith(".weight") and tensor.dim() == 2}
    plain = {module for module in plain if not module.endswith("embed_tokens")}
    named = {entry: {module for module in plain if ignores(entry, module)} for entry in described["ignore"]}
    assert list(described["config_groups"]) == ["group_0"] and all(named.values())
    assert set().union(*named.values()) == plain


def ignores(entry: str, module: str) -> bool:
    """As engines read an entry of `ignore` for a model whose names have no prefix."""
    return re.match(entry[3:], module) is not None if entry.startswith("re:") else entry == module


def test_every_expert_counts_its_tokens(shared: Shared) -> None:
    out = shared.output("kimi-k2")
    dims, manifest = CASES["kimi-k2"].dims, manifest_of(out)
    for layer in range(dims.first_k_dense_replace, dims.num_hidden_layers):
        rows = [row for row in manifest["modules"] if f".layers.{layer}." in row["name"] and "down" in row["name"]]
        assert (
            sum(row["num_tokens"] for row in rows) == dims.num_experts_per_tok * manifest["calibration"]["num_tokens"]
        )


def test_a_starved_expert_is_quantized_all_the_same(shared: Shared, tmp_path: Path) -> None:
    """Its Hessian is borrowed from the layer; nothing of it is zeroed, and the summary lists it."""
    case = CASES["glm-5"]
    source = make_checkpoint(
        tmp_path / "source", case.family, case.source, seed=3, block_size=(32, 32), starved_expert=True
    )
    nobody = "model.layers.1.mlp.gate.e_score_correction_bias"  # the option makes it rare; here it never wins
    edit_tensor(source, nobody, lambda bias: bias.index_fill(0, torch.tensor([starved_expert(3)]), -9.0))
    manifest = quantize(source, tmp_path / "out", shared.calibration)
    expert = f"mlp.experts.{starved_expert(3)}."
    rows = [row for row in manifest["modules"] if expert in row["name"]]
    starved = [row for row in rows if row["num_tokens"] == 0]
    assert len(rows) == 9 and [row["name"].split(".")[2] for row in starved] == ["1"] * 3
    assert all(0 < row["num_tokens"] < 64 for row in rows if row not in starved)
    assert all(row["outcome"] == "solved" and (row["blend_weight"] == 1.0) == (row in starved) for row in rows)
    errors = errors_of_experts(source, tmp_path / "out")
    assert max(errors[row["name"]] for row in rows) < 0.15
    listed = manifest["summary"]["experts_with_fewest_tokens"]
    assert {row["name"].rsplit(".", 1)[0] for row in rows} <= listed.keys()
    assert list(listed.values()) == sorted(listed.values())


def test_gptq_output_error_is_below_that_of_rounding(shared: Shared) -> None:
    """A sanity bound on the whole: the same inputs, so the two are comparable in the first MoE layer."""
    gptq = [row for row in manifest_of(shared.output("deepseek-v3"))["modules"] if ".layers.1." in row["name"]]
    before = read_tensors(shared.source("deepseek-v3"))
    assert all(row["relative_output_error"] < row["relative_weight_error"] for row in gptq)
    assert all(f"{row['name']}.weight" in before for row in gptq)


def test_the_same_run_gives_the_same_bytes(shared: Shared, tmp_path: Path) -> None:
    """Here and in a fresh process, by the command, from another folder; and that process's own verification passes."""
    first = all_bytes(shared.output("glm-5"))
    quantize(shared.source("glm-5"), tmp_path / "again", shared.calibration)
    assert all_bytes(tmp_path / "again") == first
    settings = [f"--set={key}" for key in ("group_size=32", "num_calibration_samples=8", "max_seq_length=64")]
    source, data = shared.source("glm-5"), shared.calibration
    run = fresh_kvq("quantize", source, *settings, "--calibration", data, "--device=cpu", "--out=new", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert output_bytes(tmp_path / "new") == first
    check = fresh_kvq("verify", "new", "--source", source, cwd=tmp_path)
    assert check.returncode == 0, check.stderr
    assert "FAILED" not in check.stdout


def test_an_output_inside_the_source_is_refused(shared: Shared, tmp_path: Path) -> None:
    """It would be taken for one of the source's side files."""
    source = shared.copy(shared.source("deepseek-v3"), tmp_path / "source")
    with pytest.raises(OutputError, match="inside the source"):
        quantize(source, source / "sub" / "out", shared.calibration)
    assert not (source / "sub").exists()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("token", [0, 5, 11])
def test_experts_output_that_is_not_finite_ends_the_run(token: int, bad: float) -> None:
    store = ActivationStore(torch.zeros(3, 4, 8), batch_size=2)
    output_TH = torch.ones(12, 8)
    add_experts(store, output_TH)
    assert torch.equal(store.hidden_NSH, torch.ones(3, 4, 8))
    output_TH[token, 3] = bad
    with pytest.raises(CalibrationError, match="the experts' output is NaN or Inf"):
        add_experts(store, output_TH)
