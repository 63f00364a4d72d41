"""A SGLang server (engine.py) with kvq's plugin in reach. Only the standard library.

SGLang finds plugins by the metadata of installed distributions. Where kvq is not installed, `entry_point` writes just
that metadata from pyproject.toml, and puts it and the repository on the server's path.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine import serving

ROOT = Path(__file__).resolve().parents[2]
START_S = 400


def entry_point(folder: Path) -> str:
    """PYTHONPATH with kvq's entry points and its code on it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = folder / "kvq-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvq\nVersion: 0\n", encoding="utf-8")
    points = project["entry-points"]["sglang.srt.plugins"]
    lines = ["[sglang.srt.plugins]", *(f"{name} = {target}" for name, target in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])


@contextmanager
def serving_tagged(settings: Mapping[str, Any], log: Path, tags: Mapping[str, str], port: int) -> Iterator[None]:
    """A server that answers on this port. `tags` is added to its environment."""
    environment = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0", **os.environ, "PYTHONPATH": entry_point(log.parent / "plugin")}
    with serving(settings, log, {**environment, **tags}, wait_s=START_S, port=port):
        yield
