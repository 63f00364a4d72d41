"""Bad input: an exit code per class, one sentence that names the place and the remedy, and nothing under the name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kvq.checkpoint.index import MANIFEST_NAME
from kvq.quantize import gptq
from kvq.quantize.sweep import Swept
from tests.checkpoints import drop_tensor as drop
from tests.checkpoints import (
    edit_config,
    edit_tensor,
    make_checkpoint,
    preset,
    read_json,
    shard_of,
    truncate_shard,
)
from tests.conftest import Kvq
from tests.runs import SETTINGS, Shared, manifest_of

SET = [f"--set={setting}" for setting in SETTINGS]
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
Damage = Callable[[Path], object]


class Fails:
    """Runs `kvq quantize` and asserts that it fails as a person should see it."""

    def __init__(self, kvq_main: Kvq, shared: Shared, out: Path) -> None:
        self._main, self._shared, self.out = kvq_main, shared, out

    def __call__(self, model: object, *flags: object, code: int, says: tuple[object, ...]) -> None:
        arguments = ["quantize", model, *flags, "--out", self.out, "--json"]
        if "--calibration" not in flags:
            arguments += ["--calibration", self._shared.calibration]
        said = self._main(*arguments)
        assert said.code == code, said
        assert said.out == "" and "Traceback" not in said.err
        assert said.err.startswith("kvq: ") and said.err.count("\n") == 1 and said.err.endswith("\n")
        assert all(str(word) in said.err for word in says), said.err
        assert not self.out.exists() or not any(self.out.rglob("*.safetensors"))


@pytest.fixture
def fails(kvq_main: Kvq, shared: Shared, tmp_path: Path) -> Fails:
    return Fails(kvq_main, shared, tmp_path / "out")


@pytest.fixture
def source(shared: Shared, tmp_path: Path) -> Path:
    """A GLM-5 that a test may damage."""
    return shared.copy(shared.source("glm-5"), tmp_path / "source")


def nowhere(tmp_path: Path) -> bool:
    """Neither an output nor a part of one."""
    return not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


def drop_all(folder: Path, *names: str) -> None:
    for name in names:
        drop(folder, name)


class Bad(NamedTuple):
    """Damage to a source that a plan finds, before anything is read or written."""

    damage: Damage
    says: tuple[str, ...]


PLANNED = {
    "missing shard": Bad(lambda s: shard_of(s, EXPERT).unlink(), ("shards are missing", "model-0000", "Download")),
    "truncated shard": Bad(lambda s: truncate_shard(s, EXPERT), ("model-0000", "truncated", "Download this shard")),
    "absent tensor": Bad(lambda s: drop(s, EXPERT, keep_in_index=True), ("index.json", EXPERT, "Download the index")),
    "expert left out": Bad(lambda s: drop_all(s, EXPERT, f"{EXPERT}_scale_inv"), (EXPERT, "Download it again")),
    "no scale": Bad(
        lambda s: drop(s, f"{EXPERT}_scale_inv"), (EXPERT, "has no scale", "Download the index and the shards")
    ),
    "no config": Bad(lambda s: (s / "config.json").unlink(), ("config.json",)),
    "config key": Bad(
        lambda s: edit_config(s, lambda c: c.pop("moe_intermediate_size")),
        ("config.json", "'moe_intermediate_size'", "Download config.json again"),
    ),
    "model_type": Bad(
        lambda s: edit_config(s, lambda c: c.update(model_type="qwen3_moe")),
        ("config.json", "'qwen3_moe' is not supported", "glm_moe_dsa", "`kvq models`"),
    ),
    "another quant_method": Bad(
        lambda s: edit_config(s, lambda c: c["quantization_config"].update(quant_method="mxfp4")),
        ("config.json", "'mxfp4' is not supported", "Start from the FP8 or BF16 release"),
    ),
    "packed floats": Bad(
        lambda s: edit_tensor(s, EXPERT, lambda w: w.view(torch.uint8)), ("model-0000", EXPERT, "not supported")
    ),
    "another shape": Bad(
        lambda s: edit_config(s, lambda c: c.update(moe_intermediate_size=96)), ("[64, 64]", "[96, 64]")
    ),
}


@pytest.mark.parametrize("name", PLANNED)
def test_a_bad_source_stops_at_plan_time(fails: Fails, source: Path, tmp_path: Path, name: str) -> None:
    PLANNED[name].damage(source)
    fails(source, *SET, code=3, says=(source, *PLANNED[name].says))
    assert nowhere(tmp_path)


def fill(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.float()
        changed.view(-1)[5] = value
        return changed.to(tensor.dtype)

    return change


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (EXPERT, float("nan")),
        (f"{EXPERT}_scale_inv", 0.0),
        (f"{EXPERT}_scale_inv", float("inf")),
        ("model.layers.1.self_attn.q_a_layernorm.weight", float("nan")),
        ("model.layers.2.mlp.gate.weight", float("inf")),
        ("lm_head.weight", float("nan")),
    ],
)
@pytest.mark.parametrize("solver", ["gptq", "rtn"])
def test_damaged_weights(fails: Fails, source: Path, name: str, value: float, solver: str) -> None:
    edit_tensor(source, name, (lambda t: t.index_fill(1, torch.tensor([0]), value)) if "_inv" in name else fill(value))
    fails(source, *SET, f"--set=solver={solver}", code=3, says=(shard_of(source, name), name, "damaged"))


def test_activations_that_overflow(fails: Fails, source: Path) -> None:
    for layer in (0, 1):
        edit_tensor(source, f"model.layers.{layer}.input_layernorm.weight", lambda w: torch.full_like(w, 3e38))
    fails(source, *SET, code=4, says=("layer 0 gives NaN or Inf", source))


@pytest.mark.parametrize("wanted", [32, 64, 128])
def test_groups_that_do_not_divide(fails: Fails, tmp_path: Path, wanted: int) -> None:
    """88 = 8 * 11 columns, as 1408 = 128 * 11 in GLM-4.5-Air has no group of 256."""
    air = make_checkpoint(tmp_path / "air", "glm4_moe", "bf16", preset("glm-4.5-air"))
    says = (f"group_size {wanted}", "moe_intermediate_size 88", "sizes that fit: none")
    fails(air, f"--set=group_size={wanted}", code=2, says=says)


def test_groups_that_do_not_divide_but_others_do(fails: Fails, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "glm4_moe", "bf16", preset("glm-4.7"))
    says = ("group_size 64", "moe_intermediate_size 96", "sizes that fit: [32]", "use --set group_size=32")
    fails(model, "--w", "int4-g64", code=2, says=says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ("holds no rows", "Give a JSON-lines file")),
        ("\n\n", ("holds no rows",)),
        ('{"text": "a"}\n{"text": ', (":2: not valid JSON",)),
        ('{"prompt": "a"}\n', (":1: a row needs `text`",)),
        ('{"input_ids": [1, 2, 900]}\n', (":1: token id 900", "vocabulary size 128")),
        ('{"input_ids": [1, 2, 3]}\n', ("gives 3 tokens, too few", "Give more rows")),
        ('{"messages": [{"role": "user", "tool_calls": [1]}]}\n', (":1: the model's chat template cannot render",)),
        ("\x00\udc80", ("calibration.jsonl",)),
    ],
)
def test_bad_calibration_data(fails: Fails, source: Path, tmp_path: Path, text: str, says: tuple[str, ...]) -> None:
    data = tmp_path / "calibration.jsonl"
    data.write_bytes(text.encode(errors="surrogateescape"))
    fails(source, *SET, "--calibration", data, code=4, says=(data, *says))
    assert nowhere(tmp_path)  # it is read before anything is written


def test_calibration_file_that_is_not_there(fails: Fails, source: Path, tmp_path: Path) -> None:
    fails(
        source, *SET, "--calibration", tmp_path / "none.jsonl", code=4, says=(tmp_path / "none.jsonl", "cannot be read")
    )
    assert nowhere(tmp_path)


def test_fewer_rows_than_asked_are_used_and_reported(
    shared: Shared, kvq_main: Kvq, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "few.jsonl").write_text(json.dumps({"input_ids": list(range(90))}) + "\n")
    out = tmp_path / "out"
    said = kvq_main("quantize", source, *SET, "--calibration", tmp_path / "few.jsonl", "--out", out)
    assert said.code == 0 and "holds fewer sequences than the recipe asks for" in said.err
    calibration = manifest_of(out)["calibration"]
    assert (calibration["num_sequences"], calibration["num_sequences_asked"]) == (1, 8)


def test_disk_too_full(fails: Fails, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    fails(source, *SET, code=7, says=(tmp_path, "GB are free", "Make room or choose another --out"))
    assert nowhere(tmp_path)


def test_an_output_that_is_not_empty(fails: Fails, source: Path) -> None:
    fails.out.mkdir()
    (fails.out / "note.txt").write_text("mine")
    fails(source, *SET, code=7, says=(fails.out, "not empty", "Choose another --out or remove it"))
    assert [path.name for path in fails.out.iterdir()] == ["note.txt"]


def test_an_output_that_is_a_file(fails: Fails, source: Path) -> None:
    fails.out.write_text("mine")
    fails(source, *SET, code=7, says=(fails.out, "not a folder"))


def test_a_leftover_of_another_run(fails: Fails, source: Path) -> None:
    left = fails.out.with_name("out.partial")
    left.mkdir()
    (left / "old").write_text("old")
    fails(source, *SET, code=7, says=(left, "Remove it"))
    assert [path.name for path in left.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--set", "groupsize=64"], ("--set groupsize=64", "group_size")),
        (["--set", "group_size"], ("--set group_size", "expected key=value")),
        (["--set", "group_size=48"], ("group_size", "found 48")),
        (["--set", "solver=best"], ("solver", "found 'best'")),
        (["--set", "name=other"], ("--set name=other",)),
        (["--set", "solver=["], ("--set solver=[", "not a YAML value")),
        (["--set", "dampening_frac=.nan"], ("dampening_frac",)),
        (["--w", "int3"], ("int3: no such recipe", "int4-rtn")),
        (["--w", "int4", "--recipe", "int4"], ("give one of them",)),
        (["--device", "tpu"], ("--device tpu",)),
        (["--device", "cuda:99"], ("--device cuda:99",)),
        (["--device", "meta"], ("--device meta", "cpu and cuda")),
    ],
)
def test_bad_requests(fails: Fails, source: Path, tmp_path: Path, flags: list[str], says: tuple[str, ...]) -> None:
    fails(source, *flags, code=2, says=says)
    assert nowhere(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: r\ngroupsize: 32\n", "groupsize"),
        ("name: r\ngroup_size: 33\n", "group_size"),
        ("solver: rtn\n", "name"),
        ("- a\n", "expected a mapping"),
        ("name: [\n", "not valid YAML"),
        ("", "expected a mapping"),
    ],
)
def test_bad_recipe_files(fails: Fails, source: Path, tmp_path: Path, text: str, says: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    fails(source, "--recipe", recipe, code=2, says=(recipe, says))


def test_an_unknown_name(fails: Fails, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    fails("glm-9", code=3, says=("glm-9: no such folder, no known alias (`kvq models` lists them)",))
    fails("/no/such/folder", code=3, says=("/no/such/folder: no such folder",))


def test_the_hub_does_not_answer(fails: Fails, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    fails("glm-5", code=8, says=("zai-org/GLM-5-FP8: the Hub did not deliver", "run the same command again"))


def refuse_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every factorization fails, at any dampening; codes stay rounded."""

    def sweep(weight: torch.Tensor, *_: Any) -> Swept:
        every_E = torch.ones(weight.shape[0], dtype=torch.bool)
        return Swept(torch.zeros(weight.shape, dtype=torch.int8), failed_E=every_E, finite_E=every_E)

    monkeypatch.setitem(gptq.SWEEPS, "ldl", sweep)


def test_too_many_fallbacks(fails: Fails, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_all(monkeypatch)
    says = ("24 of 72 modules fell back", "allowed 1.0%", "model.layers.1.mlp.experts.0.gate_proj", "--set solver=rtn")
    fails(source, *SET, code=6, says=says)
    assert not fails.out.exists()


def test_fallbacks_within_the_limit_are_counted(
    shared: Shared, kvq_main: Kvq, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_all(monkeypatch)
    flags = [
        *SET,
        "--set=max_fallback_frac=1",
        "--calibration",
        shared.calibration,
        "--out",
        tmp_path / "out",
        "--json",
    ]
    said = kvq_main("quantize", source, *flags)
    summary = json.loads(said.out)["summary"]
    assert said.code == 0 and summary["num_fallbacks"] == len(summary["fallbacks"]) == 72
    outcomes = {row["outcome"] for row in manifest_of(tmp_path / "out")["modules"]}
    assert outcomes == {"hessian_not_positive_definite"}
    assert kvq_main("verify", tmp_path / "out", "--source", source).code == 0


def test_verify_of_something_else(kvq_main: Kvq, tmp_path: Path) -> None:
    said = kvq_main("verify", tmp_path)
    assert said.code == 3 and said.err.startswith(f"kvq: {tmp_path}: no config.json there.")


@pytest.mark.parametrize("flags", [["--nothing"], ["--target", "llamacpp"], []])
def test_usage_errors(kvq_main: Kvq, flags: list[str]) -> None:
    said = kvq_main("quantize", *flags)
    assert said.code == 2 and said.out == "" and "Usage" in said.err


def test_a_damaged_output_is_no_source(fails: Fails, shared: Shared, tmp_path: Path) -> None:
    """What kvq wrote is INT4 already and not rounded again; with its manifest it would be refused whatever it holds."""
    again = shared.copy(shared.output("glm-5"), tmp_path / "again")
    (again / MANIFEST_NAME).unlink()
    drop(again, "model.layers.0.mlp.up_proj.weight_scale")
    fails(again, *SET, code=3, says=("model.layers.0.mlp.up_proj.weight", "has no scale"))
    assert read_json(again / "config.json")["quantization_config"]["format"] == "pack-quantized"


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")]
)
def test_out_of_memory_is_one_sentence(
    fails: Fails, source: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("kvq.pipeline.quantize_checkpoint", exhausted)
    fails(source, *SET, code=9, says=("out of memory", "num_calibration_samples"))


def test_a_place_that_nobody_looked_at_is_named_without_a_number(
    fails: Fails, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error", "/disk/file")

    monkeypatch.setattr("kvq.pipeline.quantize_checkpoint", failing)
    fails(source, *SET, code=7, says=("kvq: /disk/file: Input/output error. Mend that",))


def test_names_in_square_brackets_are_printed(kvq_main: Kvq, shared: Shared, tmp_path: Path) -> None:
    out = tmp_path / "x[/b]y[red]"
    said = kvq_main("quantize", shared.source("kimi-k2"), *SET, "--set=solver=rtn", "--out", out)
    assert said.code == 0 and "x[/b]y[red]" in said.err
