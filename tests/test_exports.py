"""What `import kvq` and `kvq --help` cost, and what version this is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvq
from tests.runs import fresh_environment

ROOT = Path(kvq.__file__).parent.parent
HEAVY = ("torch", "transformers", "llmcompressor", "compressed_tensors", "accelerate", "safetensors", "numpy")
REPORT = f"\nprint('LOADED', *sorted(set({HEAVY!r}) & set(sys.modules)))\n"
CALL = "import sys\nfrom kvq.cli import main\nsys.argv = {argv!r}\ntry:\n    main()\nexcept SystemExit:\n    pass\n"


def loaded(code: str) -> tuple[str, str]:
    """What a fresh interpreter printed, and which heavy packages it had loaded in the end."""
    run = subprocess.run(
        [sys.executable, "-c", code + REPORT], env=fresh_environment(), capture_output=True, text=True, check=True
    )
    said, _, names = run.stdout.rpartition("LOADED")
    return said, names.strip()


def test_import_is_light() -> None:
    assert loaded("import sys, kvq") == ("", "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["plan", "glm-4.7", "--json"], "routed experts"), (["inspect", "examples/tiny-glm-5-fp8"], "routed experts")],
)
def test_planning_loads_no_framework(arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds and hundreds of megabytes that a plan does without."""
    monkeypatch.chdir(ROOT)
    said, names = loaded(CALL.format(argv=["kvq", *arguments]))
    assert says in said and names == ""


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--help"], "quantize"), (["quantize", "--help"], "--dry-run"), (["--version"], "kvq ")]
)
def test_help_and_version_are_light(arguments: list[str], says: str) -> None:
    said, names = loaded(CALL.format(argv=["kvq", *arguments]))
    assert says in said
    assert names == ""


def test_everything_exported_exists() -> None:
    assert all(hasattr(kvq, name) for name in kvq.__all__)


def test_changelog_tells_of_this_version() -> None:
    newest = re.search(
        r"^## \[?(\d+\.\d+\.\d+\S*?)\]?(?:\s|$)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M
    )
    assert newest is not None and newest.group(1) == kvq.__version__
