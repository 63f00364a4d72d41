"""What a hostile tokenizer or chat template can do: it ends in one sentence, and this process goes on."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvq.calibration import tokenizer_process
from kvq.calibration.tokenizer_process import TokenizerProcess
from kvq.errors import CalibrationError
from tests.checkpoints import Json, make_checkpoint, read_json

HELLO = [{"role": "user", "content": "hello hello"}]
BACKTRACKS = {"type": "Split", "pattern": {"Regex": "((a+)+)+b"}, "behavior": "Isolated", "invert": False}
LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tokenizer_process, "CPU_SECONDS", 2)
    monkeypatch.setattr(tokenizer_process, "MEMORY_BYTES", 2**30)
    return make_checkpoint(tmp_path / "source", "glm4_moe", "bf16")


def spoil(folder: Path, change: Callable[[Json], object]) -> None:
    file = folder / "tokenizer.json"
    content = read_json(file)
    change(content)
    file.write_text(json.dumps(content))


def sequence(key: str, *parts: Json) -> Json:
    return {"type": "Sequence", key: list(parts)}


def test_it_renders_encodes_and_decodes(folder: Path) -> None:
    tokenizer = TokenizerProcess(folder)
    text = tokenizer.render(HELLO, None, "row", add_generation_prompt=True)
    assert text == "[gMASK]<sop><|user|>\nhello hello<|assistant|>\n"
    assert tokenizer.decode(tokenizer.encode(text, "row")) == text
    long = "tree in the rain. " * 20_000  # more than a pipe holds, both ways
    assert tokenizer.decode(tokenizer.encode(long, "row")) == long


HOSTILE: dict[str, Callable[[Json], object]] = {
    "an id near 2**32": lambda file: file["model"]["vocab"].update({"a": 2**32 - 2}),
    "a charsmap of gigabytes": lambda file: file.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    ),
    "a charsmap of nothing": lambda file: file.update(normalizer={"type": "Precompiled", "precompiled_charsmap": ""}),
    "a prefix longer than a token": lambda file: file["model"].update(continuing_subword_prefix="#" * 10**6),
    "texts that grow": lambda file: file.update(normalizer=sequence("normalizers", *[LONGER] * 30)),
    "bytes of bytes": lambda file: file.update(normalizer=sequence("normalizers", *[{"type": "ByteLevel"}] * 60)),
    "a pattern that backtracks": lambda file: file.update(pre_tokenizer=BACKTRACKS),
    "pieces of no length": lambda file: file.update(pre_tokenizer={"type": "FixedLength", "length": 0}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_is_refused_in_a_sentence(folder: Path, name: str) -> None:
    spoil(folder, HOSTILE[name])
    with pytest.raises(CalibrationError, match=r"tokenizer.*(Download|mend) tokenizer\.json") as raised:
        tokenizer = TokenizerProcess(folder)
        tokenizer.encode("a" * 60 + "\u00e9" * 9, "row")
    assert str(folder) in str(raised.value)


TEMPLATES = {
    "{% for i in range(10**9) %}x{% endfor %}": "OverflowError",
    "{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}": "computed for more than 2 seconds",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}": "1 GiB",
    "{{ 'x' * 10**11 }}": "1 GiB",
    "{{ '%99999999999d' % 1 }}": "MemoryError|OverflowError|ValueError|1 GiB",
    "{{ 9 ** (9 ** (9 ** 9)) }}": "computed for more than|1 GiB|OverflowError",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ messages.append(1) }}": "SecurityError",
    "{% include '/etc/passwd' %}": "TypeError|loader",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "RecursionError",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_hostile_template_is_refused_in_a_sentence(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = TokenizerProcess(folder)
    with pytest.raises(CalibrationError, match=rf"row: the model's chat template cannot .*({TEMPLATES[template]})"):
        tokenizer.render(HELLO, None, "row")


def test_what_is_long_but_no_bomb_is_bounded_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "ANSWER_BYTES", 2**20)
    (folder / "chat_template.jinja").write_text("{{ 'x' * 2**20 }}")
    with pytest.raises(CalibrationError, match=r"row: .*it gives more than 1 MiB"):
        TokenizerProcess(folder).render(HELLO, None, "row")


def test_after_the_end_every_question_fails(folder: Path) -> None:
    tokenizer = TokenizerProcess(folder)
    os.kill(tokenizer._pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(CalibrationError, match=r"row: .*its process ended with 9"):
            tokenizer.encode("a" * 2**20, "row")


def test_the_limit_of_time_is_for_each_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "CPU_SECONDS", 1)
    loop = "{% for i in range(99999) %}{% for j in range(15) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loop)
    tokenizer, before = TokenizerProcess(folder), time.monotonic()
    while time.monotonic() < before + 3:
        tokenizer.render(HELLO, None, "row")


def test_the_child_holds_nothing_of_its_parent(folder: Path, tmp_path: Path) -> None:
    with (tmp_path / "locked").open("w") as file:
        tokenizer = TokenizerProcess(folder)
        there = Path(f"/proc/{tokenizer._pid}/fd")
        assert file.name not in {os.readlink(entry) for entry in there.iterdir()}
        assert len(list(there.iterdir())) == 5  # its log thrice, a pipe each way


def test_a_long_text_is_to_be_split_and_a_bad_row_to_be_mended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are not at fault for what a row asks of them."""
    monkeypatch.setattr(tokenizer_process, "ANSWER_BYTES", 1 << 20)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    tokenizer = TokenizerProcess(folder)
    with pytest.raises(CalibrationError, match=r"Split this text of 2,000,000 characters; where short ones fail"):
        tokenizer.encode("a " * 1_000_000, "row")
    with pytest.raises(CalibrationError, match=r"Mend this row; where all rows fail, the template: download tokenizer"):
        tokenizer.render(HELLO, None, "row")


def test_it_ends_with_its_last_user(folder: Path) -> None:
    tokenizer = TokenizerProcess(folder)
    pid = tokenizer._pid
    del tokenizer
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_dates_of_a_table_reach_the_template(folder: Path) -> None:
    from datetime import date

    messages: list[Any] = [{"role": "user", "content": date(2026, 1, 2)}]
    assert "2026-01-02" in TokenizerProcess(folder).render(messages, None, "row")


def test_rows_too_deep_to_be_handed_over_are_named(folder: Path) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CalibrationError, match=r"row: .*RecursionError"):
        TokenizerProcess(folder).render([{"role": "user", "content": deep}], None, "row")
