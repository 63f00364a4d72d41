"""Sources of every family, and the ways to quantize them: in this process or in one of its own."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import kvq
from kvq.checkpoint.hashing import sha256_file
from kvq.checkpoint.index import MANIFEST_NAME
from kvq.checkpoint.source import resolve_source
from kvq.checkpoint.writer import dump_json
from kvq.pipeline import prepare, quantize_checkpoint
from kvq.recipes.schema import load_recipe, override
from tests.checkpoints import TINY, Json, Options, Tiny, make_checkpoint, preset, read_json

# Groups of 32 fit 64 columns; few tokens, so that some experts see less than 64 of them.
SETTINGS = ("group_size=32", "num_calibration_samples=8", "max_seq_length=64")
CALIBRATION = "calibration.jsonl"


@dataclass(frozen=True)
class Case:
    """One family in the format that its makers publish."""

    family: str
    source: str
    dims: Tiny = TINY
    options: Options = field(default_factory=lambda: Options())


CASES: Mapping[str, Case] = {
    "glm-5": Case("glm_moe_dsa", "fp8_block", options={"block_size": (32, 32)}),
    "glm-4.7": Case("glm4_moe", "fp8_channel"),
    "kimi-k2": Case("kimi_k2", "fp8_block", preset("deepseek-v3"), {"block_size": (32, 32)}),
    "deepseek-v3": Case("deepseek_v3", "bf16", options={"single_file": True}),
    "kimi-k2.5": Case("kimi_k25", "int4"),
}
PASS_THROUGH = "kimi-k2.5"
QUANTIZED = tuple(name for name in CASES if name != PASS_THROUGH)


class Quiet:
    """Progress that nobody watches."""

    def stage(self, layer: int | None, num_layers: int, text: str) -> None:
        pass

    def layer_done(self, layer: int, num_layers: int) -> None:
        pass


def write_calibration(path: Path, rows: int = 12, tokens: int = 60, vocab_size: int = 128) -> Path:
    """Rows of random token ids, as JSON lines."""
    draw = random.Random(7)
    lines = [json.dumps({"input_ids": [draw.randrange(vocab_size) for _ in range(tokens)]}) for _ in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def quantize(source: Path, out: Path, calibration: Path, *settings: str, recipe: str = "int4") -> dict[str, Any]:
    """Run the pipeline here; gives the manifest that it wrote."""
    chosen = override(load_recipe(recipe), [*SETTINGS, *settings])
    prepared = prepare(resolve_source(str(source)), chosen, out, device="cpu", calibration=calibration)
    return quantize_checkpoint(prepared, Quiet())


@dataclass
class Shared:
    """Checkpoints that many tests read and none may change, made when first asked for."""

    root: Path

    @property
    def calibration(self) -> Path:
        path = self.root / CALIBRATION
        return path if path.exists() else write_calibration(path)

    def source(self, name: str) -> Path:
        folder, case = self.root / "sources" / name, CASES[name]
        if not folder.exists():
            make_checkpoint(folder, case.family, case.source, case.dims, **case.options)
        return folder

    def output(self, name: str, *settings: str) -> Path:
        folder = self.root / "outputs" / "+".join([name, *settings])
        if not folder.exists():
            quantize(self.source(name), folder, self.calibration, *settings)
        return folder

    def copy(self, folder: Path, to: Path) -> Path:
        """A copy that may be damaged."""
        return Path(shutil.copytree(folder, to))


def manifest_of(folder: Path) -> Json:
    return read_json(folder / MANIFEST_NAME)


def rewrite_manifest(folder: Path, manifest: Json) -> None:
    """Write a manifest whose hashes fit the files as they are now: what a consistent mistake would leave."""
    manifest["files"] = {name: sha256_file(folder / name) for name in manifest["files"] if (folder / name).exists()}
    (folder / MANIFEST_NAME).write_text(dump_json(manifest), encoding="utf-8")


def all_bytes(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def output_bytes(folder: Path) -> dict[str, bytes]:
    """All that has its place when a run's folder gets its name: no reports, which come after it."""
    return {name: data for name, data in all_bytes(folder).items() if not name.startswith("kvq-reports/")}


def fresh_environment() -> dict[str, str]:
    """Environment of a new interpreter for this kvq, with as many threads as here: sums depend on their number."""
    root = str(Path(kvq.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": str(torch.get_num_threads()), "COLUMNS": "120"}


def fresh_kvq(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`kvq` in a process of its own."""
    command = [sys.executable, "-m", "kvq", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=fresh_environment(), capture_output=True, text=True, check=False)
