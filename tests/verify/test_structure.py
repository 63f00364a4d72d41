"""Each kind of damage is found from the files alone, by the check that is for it, and the culprit is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvq.checkpoint.index import MANIFEST_NAME
from tests.checkpoints import INDEX, drop_tensor, edit_config, edit_tensor, rewrite_index, shard_of, truncate_shard
from tests.runs import CASES, Shared, manifest_of, rewrite_manifest
from tests.verify.conftest import Verify, failed

EXPERT = "model.layers.2.mlp.experts.5.up_proj"
MTP_EXPERT = "model.layers.3.mlp.experts.0.down_proj"


def rehash(folder: Path) -> None:
    rewrite_manifest(folder, manifest_of(folder))


def forget(folder: Path, *names: str) -> None:
    """Take tensors out of shards, index and manifest, as if they had never been planned."""
    manifest = manifest_of(folder)
    for name in names:
        size = manifest["tensors"].pop(name)
        drop_tensor(folder, name)
        assert size
    _fit_total(folder)
    rewrite_manifest(folder, manifest)


def _fit_total(folder: Path) -> None:
    from tests.checkpoints import read_tensors

    total = sum(tensor.nbytes for tensor in read_tensors(folder).values())
    rewrite_index(folder, lambda index: index["metadata"].update(total_size=total))


@pytest.mark.parametrize("name", CASES)
def test_a_good_output_passes(shared: Shared, verify: Verify, name: str) -> None:
    report = verify(shared.output(name), shared.source(name))
    assert failed(report) == {} and report.passed
    looked_at = {check.name: check.num_checked for check in report.checks}
    assert all(count > 0 for check, count in looked_at.items() if check not in ("MTP", "packed weights", "KV scales"))
    assert (looked_at["MTP"] > 0) == name.startswith("glm")
    assert (looked_at["packed weights"] > 0) == (name != "kimi-k2.5")
    assert verify(shared.output(name)).passed


def test_a_flipped_bit_is_found_by_the_hash(damaged: Path, verify: Verify) -> None:
    shard = shard_of(damaged, f"{EXPERT}.weight_packed")
    data = bytearray(shard.read_bytes())
    data[-3] ^= 16
    shard.write_bytes(data)
    assert failed(verify(damaged)) == {"files": [f"{shard.name} has changed since it was written (sha256 differs)"]}


def test_a_changed_side_file_is_found_by_the_hash(damaged: Path, verify: Verify) -> None:
    (damaged / "chat_template.jinja").write_text("{{ messages }}")
    (problem,) = failed(verify(damaged))["files"]
    assert problem.startswith("chat_template.jinja has changed")


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize(("text", "says"), [("", "not valid JSON"), ("[1]", "expected a JSON object, found list")])
def test_a_side_file_that_no_engine_can_read(damaged: Path, verify: Verify, name: str, text: str, says: str) -> None:
    """As the source had it: the hash is right."""
    (damaged / name).write_text(text)
    rehash(damaged)
    (problem,) = failed(verify(damaged))["files"]
    assert problem.startswith(f"{damaged / name}: {says}")


def test_a_missing_side_file(damaged: Path, verify: Verify) -> None:
    (damaged / "tokenizer.json").unlink()
    assert failed(verify(damaged)) == {"files": ["tokenizer.json is missing"]}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0.0, "a scale that is not positive"),
        (-0.5, "a scale that is not positive"),
        (float("nan"), "NaN or Inf"),
        (float("inf"), "NaN or Inf"),
    ],
)
@pytest.mark.parametrize("name", [f"{EXPERT}.weight_scale", "model.layers.1.self_attn.o_proj.weight_scale"])
def test_scales_must_be_finite_and_positive(damaged: Path, verify: Verify, name: str, value: float, says: str) -> None:
    def spoil(scale: torch.Tensor) -> torch.Tensor:
        changed = scale.clone()
        changed[1, 1] = value
        return changed

    edit_tensor(damaged, name, spoil)
    rehash(damaged)
    problems = failed(verify(damaged))
    assert list(problems) == ["values"]
    (problem,) = problems["values"]
    assert name in problem and says in problem


def test_a_weight_that_is_not_finite(damaged: Path, verify: Verify) -> None:
    edit_tensor(damaged, "lm_head.weight", lambda weight: weight.index_fill(0, torch.tensor([5]), torch.nan))
    rehash(damaged)
    (problem,) = failed(verify(damaged))["values"]
    assert "lm_head.weight holds NaN or Inf" in problem


@pytest.mark.parametrize("module", [EXPERT, MTP_EXPERT])
def test_a_planned_expert_is_missing(damaged: Path, verify: Verify, module: str) -> None:
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        drop_tensor(damaged, f"{module}.{part}")
    _fit_total(damaged)
    rehash(damaged)
    problems = failed(verify(damaged))
    assert f"{module}.weight_packed is missing" in problems["tensors"]
    assert problems["experts"] == [f"{module} is not packed"]


def test_an_expert_that_was_never_planned(damaged: Path, verify: Verify) -> None:
    forget(damaged, *(f"{EXPERT}.{part}" for part in ("weight_packed", "weight_scale", "weight_shape")))
    assert failed(verify(damaged)) == {"experts": [f"{EXPERT} is not packed"]}


def test_half_an_expert(damaged: Path, verify: Verify) -> None:
    forget(damaged, f"{EXPERT}.weight_scale")
    problems = failed(verify(damaged))
    assert problems == {"values": [f"{EXPERT} lacks one of weight_packed, weight_scale, weight_shape"]}


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("weight_shape", lambda shape: shape.flip(0) * 2),
        ("weight_shape", lambda shape: shape[:1]),
        ("weight_scale", lambda scale: scale[:, :1].repeat(1, 3)),
        ("weight_scale", lambda scale: scale.flatten()),
        ("weight_packed", lambda packed: packed[:, :5]),
        ("weight_packed", lambda packed: packed.flatten()),
    ],
)
def test_parts_that_do_not_fit_each_other(
    damaged: Path, verify: Verify, part: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    edit_tensor(damaged, f"{EXPERT}.{part}", change)
    (damaged / MANIFEST_NAME).unlink()
    (problem,) = failed(verify(damaged))["values"]
    assert EXPERT in problem and "disagree" in problem


@pytest.mark.parametrize("name", ["enorm.weight", "eh_proj.weight", "mlp.gate.e_score_correction_bias"])
def test_a_missing_mtp_tensor(damaged: Path, verify: Verify, name: str) -> None:
    forget(damaged, f"model.layers.3.{name}")
    (problem,) = failed(verify(damaged))["MTP"]
    assert problem.startswith(f"model.layers.3.{name} is missing")


def test_index_points_to_the_wrong_shard(damaged: Path, verify: Verify) -> None:
    name = f"{EXPERT}.weight_packed"
    wrong = shard_of(damaged, "lm_head.weight").name
    rewrite_index(damaged, lambda index: index["weight_map"].update({name: wrong}))
    rehash(damaged)
    (problem,) = failed(verify(damaged))["open"]
    assert name in problem and wrong in problem


def test_total_size_is_wrong(damaged: Path, verify: Verify) -> None:
    rewrite_index(damaged, lambda index: index["metadata"].update(total_size=1))
    rehash(damaged)
    (problem,) = failed(verify(damaged))["index"]
    assert problem.startswith("total_size is 1, ")


@pytest.mark.parametrize("metadata", [None, {}, [], "large"])
def test_index_without_a_total_size(damaged: Path, verify: Verify, metadata: Any) -> None:
    rewrite_index(damaged, lambda index: index.update(metadata=metadata))
    rehash(damaged)
    (problem,) = failed(verify(damaged))["index"]
    assert problem.startswith("total_size is None, ")


def test_a_shard_that_the_index_does_not_know(damaged: Path, verify: Verify) -> None:
    save_file({"extra.weight": torch.ones(2)}, damaged / "extra.safetensors")
    problems = failed(verify(damaged))
    assert problems["files"] == ["extra.safetensors is not listed in the manifest"]
    assert "extra.safetensors holds 1 tensors that the index does not list" in problems["index"][0]
    assert "extra.weight was not planned" in problems["tensors"]


def test_a_truncated_shard(damaged: Path, verify: Verify) -> None:
    truncate_shard(damaged, f"{EXPERT}.weight_packed")
    problems = failed(verify(damaged))
    assert "truncated" in problems["open"][0]
    assert shard_of(damaged, f"{EXPERT}.weight_packed").name in problems["open"][0]


def test_a_missing_shard(damaged: Path, verify: Verify) -> None:
    shard = shard_of(damaged, f"{EXPERT}.weight_packed")
    shard.unlink()
    problems = failed(verify(damaged))
    assert problems["files"] == [f"{shard.name} is missing"]
    assert shard.name in problems["open"][0]


def test_a_tensor_of_another_type_than_planned(damaged: Path, verify: Verify) -> None:
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    edit_tensor(damaged, bias, lambda value: value.bfloat16())
    rehash(damaged)
    problems = failed(verify(damaged))
    assert problems["tensors"][0].startswith(f"{bias} is ['BF16'")
    assert set(problems) == {"tensors", "index"}  # total_size too


@pytest.mark.parametrize("index", [INDEX, "config.json"])
def test_a_file_that_is_no_json(damaged: Path, verify: Verify, index: str) -> None:
    (damaged / index).write_text("{")
    assert index in failed(verify(damaged))["open"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: "[]",
        lambda manifest: "{",
        lambda manifest: json.dumps({**manifest, "files": None}),
        lambda manifest: json.dumps({**manifest, "tensors": ["lm_head.weight"]}),
        lambda manifest: json.dumps({**manifest, "tensors": {"lm_head.weight": {}}}),
        lambda manifest: json.dumps({**manifest, "modules": [{"name": EXPERT}]}),
        lambda manifest: json.dumps({key: value for key, value in manifest.items() if key != "modules"}),
    ],
)
def test_a_manifest_that_makes_no_sense(
    shared: Shared, damaged: Path, verify: Verify, change: Callable[[dict[str, Any]], str]
) -> None:
    (damaged / MANIFEST_NAME).write_text(change(manifest_of(damaged)))
    problems = failed(verify(damaged, shared.source("glm-5")))
    assert MANIFEST_NAME in problems["manifest"][0]


def test_without_a_manifest_the_rest_is_still_checked(shared: Shared, damaged: Path, verify: Verify) -> None:
    (damaged / MANIFEST_NAME).unlink()
    report = verify(damaged, shared.source("glm-5"))
    assert report.passed
    assert {check.name for check in report.checks if MANIFEST_NAME in check.note} == {"files", "tensors"}


def test_the_source_is_no_quantized_checkpoint(shared: Shared, verify: Verify) -> None:
    problems = failed(verify(shared.source("glm-5")))
    assert f"{EXPERT} is not packed" in problems["experts"]
    assert f"{EXPERT} is also there unquantized" in problems["experts"]


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q: q["ignore"].append("model.layers.0.self_attn.indexers_proj"), "indexers_proj' names no module"),
        (lambda q: q["ignore"].append(r"re:.*\.nothing$"), "nothing$' names no module"),
        (lambda q: q["ignore"].remove("lm_head"), "lm_head is not quantized, but the config does not ignore it"),
        (lambda q: q["ignore"].append("model.layers.0.mlp.up_proj"), "model.layers.0.mlp.up_proj is FP8"),
        (lambda q: q["config_groups"].pop("group_1"), "is FP8, which the config does not say"),
        (lambda q: q["config_groups"].pop("group_0"), f"no INT4 group covers {EXPERT}"),
        (
            lambda q: q["config_groups"]["group_0"].update(targets=[r"re:.*\.experts\.[0-4]\.\w+$"]),
            f"no INT4 group covers {EXPERT}",
        ),
        (lambda q: q["config_groups"]["group_0"].update(targets=["re:("]), "no regular expression"),
        (lambda q: q["ignore"].append("re:["), "no regular expression"),
        (lambda q: q["config_groups"]["group_0"].pop("targets"), "config_groups"),
        (lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits="four"), "num_bits"),
        (lambda q: q["config_groups"]["group_0"]["weights"].update(group_size={"a": 1}), "compressed-tensors refuses"),
    ],
)
def test_the_config_must_describe_what_is_stored(damaged: Path, verify: Verify, change: Change, says: str) -> None:
    edit_config(damaged, lambda config: change(config["quantization_config"]))
    rehash(damaged)
    problems = failed(verify(damaged))
    assert any(says in problem for found in problems.values() for problem in found), problems


def test_a_bf16_rest_must_be_ignored_too(shared: Shared, tmp_path: Path, verify: Verify) -> None:
    """SGLang refuses a linear module that no group targets and no entry ignores."""
    folder = shared.copy(shared.output("kimi-k2", "rest=bf16"), tmp_path / "copy")
    assert verify(folder).passed
    edit_config(folder, lambda config: config["quantization_config"].update(ignore=["lm_head"]))
    rehash(folder)
    says = "model.layers.0.self_attn.o_proj is not quantized, but the config does not ignore it"
    assert says in failed(verify(folder))["config"]


def test_a_config_without_a_quantization_config(damaged: Path, verify: Verify) -> None:
    edit_config(damaged, lambda config: config.pop("quantization_config"))
    rehash(damaged)
    assert failed(verify(damaged))


def test_a_config_of_other_groups_than_the_scales_have(shared: Shared, tmp_path: Path, verify: Verify) -> None:
    """No engine would load it, and no source or manifest is needed to see it."""
    folder = shared.copy(shared.output("glm-4.7"), tmp_path / "out")
    (folder / MANIFEST_NAME).unlink()
    text = (folder / "config.json").read_text()
    assert '"group_size": 32' in text
    (folder / "config.json").write_text(text.replace('"group_size": 32', '"group_size": 64'))
    assert "has groups of 32, config.json says 64" in str(failed(verify(folder, without_manifest=True)))
