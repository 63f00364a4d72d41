"""The readers, each with what it is given. A target raises KvqError for what it refuses, and nothing else ever."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

from kvq.calibration.dataset import load_packed
from kvq.checkpoint.header import read_header
from kvq.checkpoint.index import INDEX_NAME, MANIFEST_NAME, CheckpointIndex, load_config, load_index
from kvq.checkpoint.journal import FOLDER, Journal, Step
from kvq.checkpoint.metadata import Metadata
from kvq.checkpoint.writer import CheckpointWriter
from kvq.errors import VerificationError
from kvq.publish.gpus import find_gpu
from kvq.publish.parallel import Parallel
from kvq.publish.plan_report import plan_report
from kvq.publish.sizing import make_deployment
from kvq.quantize.types import ModuleResult
from kvq.recipes.plan import resolve_plan
from kvq.recipes.schema import load_recipe, override
from kvq.run import step_results
from kvq.verify.checks import verify_checkpoint
from kvq.verify.inspection import inspect_folder
from kvq.verify.structure import check_files, load_manifest
from tests.checkpoints import make_checkpoint, read_json
from tests.fuzz.hostile import Edit, as_json, document, edited, edits, spoiled, value
from tests.fuzz.target import Target, near, writes
from tests.fuzz.text_targets import SMALL, chat_template, tiktoken, tokenizer, tokenizer_config
from tests.runs import quantize, write_calibration

YAML_PIECES = (
    "&a ", "*a", "!!python/object:os.system x", "<<: {a: 1}", "? ", "- ", "[", "{", "|", "!!bool x", "0b_", "1:60", "=",
    "2001-99-99", "\t", "---", "%YAML 9", "!!binary =", "'", "solver: rtn", ".inf", "0o9", "~", "\x85", "\ufeff",
    "&a [*a, *a]", "{a: b, a: c}", "[" * 500, "1" * 5000,
)  # fmt: skip


def header(folder: Path) -> Target:
    place = folder / "x.safetensors"
    base = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F8_E4M3", "shape": [4, 8], "data_offsets": [0, 32]},
        "a.weight_scale_inv": {"dtype": "F32", "shape": [1, 1], "data_offsets": [32, 36]},
        "b": {"dtype": "BF16", "shape": [0], "data_offsets": [36, 36]},
    }

    def make(draw: Random) -> bytes:
        text = document(draw, base)
        length = draw.choice((len(text), len(text), len(text), draw.randrange(2**64), draw.randrange(600)))
        return length.to_bytes(8, "little") + text + b"\1" * draw.choice((36, 36, 36, 0, 35, 37))

    def read() -> None:
        for tensor in read_header(place):
            assert 8 <= tensor.offset <= tensor.offset + tensor.nbytes <= place.stat().st_size

    return Target("safetensors header", folder, make, writes(place, read), 0.25)


def index(folder: Path) -> Target:
    make_checkpoint(folder, "kimi_k2", "bf16", SMALL)
    base = read_json(folder / INDEX_NAME)
    base["weight_map"] = dict(list(base["weight_map"].items())[:12])

    def read() -> None:
        files = {path.name for path in folder.iterdir()}
        assert set(load_index(folder).shards) <= files

    return Target("index", folder, near(base), writes(folder / INDEX_NAME, read), 0.1)


def config(folder: Path, family: str, source: str) -> Target:
    make_checkpoint(folder, family, source, SMALL, block_size=(32, 32))
    base, known = read_json(folder / "config.json"), load_index(folder)
    recipe = override(load_recipe("int4"), ["group_size=32"])

    def read() -> None:
        found = load_config(folder)
        plan = resolve_plan(recipe, found, CheckpointIndex(folder, known.tensors, known.shards))
        deployment = make_deployment(find_gpu("h200"), 8, Parallel(8, 1, 1), None, None, 2**20)
        plan_report(Metadata(str(folder), "folder", found, known), plan, deployment, "cuda", "sglang")

    return Target(f"config of {family}", folder, near(base), writes(folder / "config.json", read), 0.06)


def inspection(folder: Path) -> Target:
    make_checkpoint(folder, "glm_moe_dsa", "fp8_channel", SMALL)
    base = read_json(folder / "config.json")
    read = writes(folder / "config.json", lambda: inspect_folder(folder))
    return Target("kvq inspect", folder, near(base), read, 0.03)


def recipe(folder: Path) -> Target:
    base = load_recipe("int4").model_dump()
    yaml = "\n".join(f"{key}: {json.dumps(value)}" for key, value in base.items()).encode()

    def make(draw: Random) -> bytes:
        kind = draw.randrange(3)
        if kind == 0:
            return document(draw, base)
        if kind == 1:
            return spoiled(draw, yaml)
        lines = yaml.decode().split("\n")
        for _ in range(draw.randint(1, 4)):
            piece = draw.choice(YAML_PIECES)
            lines.insert(draw.randrange(len(lines) + 1), draw.choice((piece, f"name: {piece}", f"solver: {piece}")))
        return "\n".join(lines).encode()

    place = folder / "recipe.yaml"
    return Target("recipe file", folder, make, writes(place, lambda: load_recipe(str(place))), 0.12)


def setting(folder: Path) -> Target:
    base = load_recipe("int4")
    keys = [*base.model_dump(), "nothing", "", "name"]

    def make(draw: Random) -> str:
        text = draw.choice(YAML_PIECES) if draw.randrange(2) else as_json(value(draw)).decode("utf-8", "replace")
        return f"{draw.choice(keys)}={text}"

    return Target("--set", folder, make, lambda text: override(base, [text]), 0.05)


def calibration(folder: Path) -> Target:
    make_checkpoint(folder, "kimi_k2", "bf16", SMALL)
    place = folder / "data.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    row: Any = {"input_ids": list(range(20)), "text": "a b", "messages": messages, "tools": [{}]}
    chat = {"messages": messages, "tools": [{"function": {"name": "f"}}]}

    def make(draw: Random) -> bytes:
        return b"\n".join(document(draw, draw.choice((row, chat))) for _ in range(draw.randint(1, 3)))

    read = writes(place, lambda: load_packed(folder, SMALL.vocab_size, place, 2, 16))
    return Target("calibration data", folder, make, read, 0.12)


def manifest(folder: Path) -> Target:
    tensor = {"dtype": "BF16", "shape": [1], "shard": "x", "sources": ["a"], "action": "keep", "class": "x"}
    base: Any = {
        "manifest_version": 1, "pass_through": False, "tensors": {"a": tensor},
        "files": {"config.json": hashlib.sha256(b"{}").hexdigest(), "x": "0"},
        "modules": [{"name": "a", "outcome": "solved", "relative_weight_error": 0.1}],
    }  # fmt: skip
    (folder / "config.json").write_text("{}")

    def read() -> None:
        check_files(folder, load_manifest(folder))

    return Target("manifest", folder, near(base), writes(folder / MANIFEST_NAME, read), 0.1)


def verification(folder: Path) -> Target:
    make_checkpoint(folder / "source", "kimi_k2", "fp8_block", replace(SMALL, hidden_size=32), block_size=(32, 32))
    data = write_calibration(folder / "data.jsonl")
    quantize(folder / "source", folder / "out", data, "solver=rtn")
    names = {name: (folder / "out" / name).read_bytes() for name in (MANIFEST_NAME, "config.json", INDEX_NAME)}

    def read(given: tuple[str, list[Edit]]) -> None:
        name, changes = given
        try:
            (folder / "out" / name).write_bytes(as_json(edited(json.loads(names[name]), changes)))
            report = verify_checkpoint(folder / "out", folder / "source", lambda done, total: None)
            if not report.passed:
                raise VerificationError(report.failure())
        finally:
            (folder / "out" / name).write_bytes(names[name])

    return Target("kvq verify --source", folder, lambda draw: (draw.choice([*names]), edits(draw)), read, 0.004)


EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


def journal(folder: Path) -> Target:
    result = ModuleResult(
        name="a", outcome="rounded", num_tokens=1, blend_weight=None, dampening_frac=None, relative_weight_error=0.1,
        relative_output_error=None,
    )  # fmt: skip
    step: Any = asdict(
        Step(
            0, "model-00001-of-00002.safetensors", EMPTY_SHA256, {"a": 4}, [asdict(result)], "state-00000.safetensors",
            state_sha256="0" * 64,
        )
    )  # fmt: skip
    partial = folder / "out.partial"
    fingerprint = {"recipe": "a"}

    def record(content: Any) -> bytes:
        return as_json({"sha256": _digest(content), "record": content})

    def read(text: bytes) -> None:
        (partial / FOLDER).mkdir(parents=True, exist_ok=True)
        (partial / FOLDER / "fingerprint.json").write_bytes(record(fingerprint))
        (partial / FOLDER / "step-00000.json").write_bytes(text)
        (partial / step["shard"]).write_bytes(b"")
        opened = Journal(partial)
        opened.begin(fingerprint)
        try:
            step_results(opened)
            if opened.steps and opened.steps[-1].state is not None:
                opened.load_state()
            CheckpointWriter(folder / "out", opened).__enter__()
        finally:
            opened.close()

    def make(draw: Random) -> bytes:
        sound = step if draw.randrange(2) else {**step, "state": None, "state_sha256": None}
        if draw.randrange(3):
            return record(edited(sound, edits(draw)))
        return document(draw, {"record": sound, "sha256": ""})

    return Target("journal", folder, make, read, 0.1)


def _digest(content: Any) -> str:
    """As kvq hashes a record, where that can be done: what is refused then is refused for what it says."""
    try:
        return hashlib.sha256(json.dumps(json.loads(as_json(content)), sort_keys=True).encode()).hexdigest()
    except (ValueError, RecursionError):
        return ""


def all_targets(scratch: Path) -> list[Target]:
    """Every target with a folder of its own."""

    def place(name: str) -> Path:
        (scratch / name).mkdir(parents=True)
        return scratch / name

    return [
        header(place("header")), index(place("index")), config(place("glm5"), "glm_moe_dsa", "fp8_block"),
        config(place("glm4"), "glm4_moe", "fp8_channel"), config(place("kimi"), "kimi_k25", "int4"),
        inspection(place("inspect")), recipe(place("recipe")), setting(place("set")),
        calibration(place("calibration")),
        manifest(place("manifest")), verification(place("verify")), journal(place("journal")),
        tokenizer(place("tokenizer")), tokenizer_config(place("tokenizer_config")), chat_template(place("template")),
        tiktoken(place("tiktoken")),
    ]  # fmt: skip
