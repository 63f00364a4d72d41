"""Import order is data order, and each heavy dependency has one door."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvq

PACKAGE = Path(kvq.__file__).parent
ORDER = (
    "errors", "screen", "stop", "integrity", "kv_plugin", "shares", "ranks", "checkpoint", "recipes", "calibration",
    "quantize", "verify", "publish", "run", "pipeline", "console", "commands", "cli", "__main__",
)  # fmt: skip
TRANSFORMERS = ("calibration/transformers_door.py", "calibration/tiktoken_door.py")
HUB = (
    "checkpoint/hub.py",
    "checkpoint/source.py",
    "checkpoint/hub_headers.py",
    "checkpoint/arrival.py",
    "publish/hub_repo.py",
)
DOORS = {
    "accelerate": TRANSFORMERS,
    "transformers": TRANSFORMERS,
    "tokenizers": TRANSFORMERS,
    "llmcompressor": ("quantize/llmcompressor_backend.py",),
    "compressed_tensors": ("checkpoint/packing.py", "quantize/llmcompressor_backend.py", "verify/structure.py"),
    "safetensors": (
        "checkpoint/reader.py",
        "checkpoint/writer.py",
        "checkpoint/journal.py",
        "verify/base_logits.py",
    ),
    "matplotlib": ("verify/plots.py", "publish/coverage_plots.py"),
    "huggingface_hub": HUB,
    "httpx": ("checkpoint/hub.py", "calibration/tables_door.py", "verify/server.py"),
    "jsonschema": ("verify/toolcalls/tools.py",),
    "lm_eval": ("verify/tasks/harness.py", "verify/tasks/harness_model.py"),
    "datasets": ("calibration/tables_door.py",),
    "pyarrow": ("calibration/tables_door.py",),
    "pydantic": ("recipes/schema.py", "recipes/models.py"),
    "yaml": ("recipes/schema.py", "recipes/models.py", "publish/card_metadata.py"),
    "sglang": ("kv_plugin/hooks.py", *(f"integrity/{name}.py" for name in ("plugin", "hooks", "incidents"))),
    "triton": ("quantize/triton_kernels.py", "integrity/kernels.py"),
    "prometheus_client": ("integrity/counters.py",),
    "regex": ("checkpoint/patterns.py",),
    "jinja2": ("publish/card_page.py",),
    "rich": tuple(
        f"console/{name}.py"
        for name in ("screen", "run", "plan", "coverage", "evaluation", "transfer", "doctor", "serving", "tasks", "kv")
    ),
    "typer": ("cli.py", *(f"commands/{path.name}" for path in sorted((PACKAGE / "commands").glob("*.py")))),
}


def imported(path: Path, package: Path) -> Iterator[str]:
    """Dotted names of every import in a file: at the top, in functions, relative, and by importlib."""
    inside = [package.name, *path.relative_to(package).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) + 1 - node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from _first_text(node)


def _first_text(call: ast.Call) -> Iterator[str]:
    """The name that a call imports, as far as it is written there."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.JoinedStr) and first.values:
        first = first.values[0]
    yield first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else "something-computed"


def violations(package: Path) -> list[str]:
    """A sentence for each import that points up the order or goes through a wall."""
    found = []
    for path in sorted(package.rglob("*.py")):
        place = str(path.relative_to(package))
        stage = place.split("/")[0].removesuffix(".py")
        for name in imported(path, package):
            top, *rest = name.split(".")
            if top == package.name and rest and rest[0] in ORDER:
                allowed = stage in ORDER and ORDER.index(rest[0]) <= ORDER.index(stage)
                found += [] if allowed else [f"{place} imports {name}: {stage} may not import {rest[0]}"]
            elif place not in DOORS.get(top, (place,)) or top == "something-computed":
                found.append(f"{place} imports {name}, whose doors are {', '.join(DOORS.get(top, ()))}")
    return found


def test_every_module_has_a_place_in_the_order() -> None:
    stages = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert stages - {"__init__", "__pycache__"} == set(ORDER)


def test_imports_point_one_way_and_go_through_the_doors() -> None:
    assert violations(PACKAGE) == []


def test_doors_exist_and_are_used() -> None:
    for dependency, places in DOORS.items():
        present = [PACKAGE / place for place in places if (PACKAGE / place).exists()]
        users = [path for path in present if dependency in {name.split(".")[0] for name in imported(path, PACKAGE)}]
        assert users, f"nothing imports {dependency}: is its row still right?"


@pytest.mark.parametrize(
    ("place", "line", "reported"),
    [
        ("checkpoint/reader.py", "from kvq.quantize.gptq import solve_gptq", "checkpoint may not import quantize"),
        ("checkpoint/reader.py", "from ..quantize import gptq", "checkpoint may not import quantize"),
        (
            "verify/structure.py",
            "def late() -> None:\n    import kvq.publish.manifest",
            "verify may not import publish",
        ),
        ("quantize/gptq.py", "from kvq import cli", "quantize may not import cli"),
        ("quantize/gptq.py", "def late() -> None:\n    from llmcompressor import x", "imports llmcompressor.x, whose"),
        ("quantize/gptq.py", "import importlib\nimportlib.import_module('transformers.x')", "imports transformers.x"),
        ("quantize/gptq.py", "import importlib\nimportlib.import_module(name)", "imports something-computed"),
        ("quantize/gptq.py", "import transformers.models as m", "imports transformers.models"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, place: str, line: str, reported: str) -> None:
    path = tmp_path / "kvq" / place
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    (found,) = violations(tmp_path / "kvq")
    assert found.startswith(place) and reported in found
