"""Every row of the table of broken checkpoints: one sentence that names file, tensor and remedy, and no output."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broken import TABLE
from tests.conftest import Kvq
from tests.damage import SOURCES, copy_source, make_source
from tests.runs import SETTINGS, write_calibration

SET = [f"--set={setting}" for setting in SETTINGS]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("whole")

    def give(name: str) -> Path:
        folder = root / name
        return folder if folder.exists() else make_source(folder, name)

    return give


def test_the_table_is_large() -> None:
    assert len(TABLE) >= 60


@pytest.mark.parametrize("name", SOURCES)
def test_undamaged_they_are_quantized(whole: Callable[[str], Path], kvq_main: Kvq, tmp_path: Path, name: str) -> None:
    data = write_calibration(tmp_path / "data.jsonl")
    said = kvq_main("quantize", whole(name), *SET, "--calibration", data, "--out", tmp_path / "out", "--json")
    assert said.code == 0, said.err


@pytest.mark.parametrize("name", TABLE)
def test_a_broken_checkpoint(whole: Callable[[str], Path], kvq_main: Kvq, tmp_path: Path, name: str) -> None:
    broken = TABLE[name]
    folder = copy_source(whole(broken.source), tmp_path / "source")
    broken.damage(folder)
    data, out = write_calibration(tmp_path / "data.jsonl"), tmp_path / "out"
    if name.startswith("text: "):
        data.write_text('{"text": "the tree stands in the rain"}\n' * 40)
    said = kvq_main("quantize", folder, *SET, "--calibration", data, "--out", out, "--json")
    assert said.code == broken.code and said.out == "", said
    assert said.err.startswith("kvq: ") and said.err.count("\n") == 1 and len(said.err) < 2500, said.err
    assert str(tmp_path) in said.err and all(word in said.err for word in broken.says), said.err
    left = {path.name for path in tmp_path.iterdir() if path.name.startswith("out")}
    assert left <= ({"out.partial"} if broken.late else set())
