"""Kinds of data: the same rows from JSON lines, Parquet, text, folders and a Hub dataset; errors that name the row."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvq.calibration.dataset import check_rows, load_documents, load_packed, read_rows
from kvq.calibration.rows import TEXT_CHUNK, HubDataset, data_place, iter_rows
from kvq.calibration.transformers_door import load_tokenizer
from kvq.errors import CalibrationError, HubError, RecipeError
from tests.checkpoints import TINY, make_checkpoint

VOCAB = TINY.vocab_size
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
OTHER_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "get", "arguments": {"b": 2}}}],
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ROWS: list[dict[str, Any]] = [
    {"text": "The thin tree."},
    {"messages": [{"role": "user", "content": "What is 2 + 2?"}, CALL], "tools": TOOLS},
    {"input_ids": [5, 6, 7, 8]},
    {"messages": [{"role": "user", "content": "and b?"}, OTHER_CALL]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "glm", "glm4_moe", "bf16")


def json_lines(file: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def parquet(file: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    columns = sorted({key for row in rows for key in row})
    pq.write_table(pa.table({key: [row.get(key) for row in rows] for key in columns}), file)
    return file


def tokens(folder: Path, place: Any) -> tuple[list[int], str]:
    found = load_packed(folder, VOCAB, place, 1, 10**6)
    return found.tokens_NS.flatten().tolist(), found.rendered_sha256


# Kinds.


def test_parquet_gives_the_tokens_of_json_lines(folder: Path, tmp_path: Path) -> None:
    """Parquet gives every struct the fields of all others, as nulls: the template must not see those."""
    place = parquet(tmp_path / "rows.parquet")
    assert pq.read_table(place).column("messages").to_pylist()[1][1]["tool_calls"][0]["function"]["arguments"] == {
        "a": 1,
        "b": None,
    }
    assert tokens(folder, place) == tokens(folder, json_lines(tmp_path / "rows.jsonl"))


def test_parquet_columns_that_mean_nothing_are_not_read(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": f"row {n}", "id": n} for n in range(600)]  # more than a batch of rows
    assert read_rows(parquet(tmp_path / "rows.parquet", rows)) == [{"text": f"row {n}"} for n in range(600)]


@pytest.mark.parametrize("suffix", [".txt", ".md", ".py"])
def test_plain_text_is_one_document(folder: Path, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"book{suffix}"
    file.write_text("The thin tree.\n\nEnd { of it", encoding="utf-8")
    ids = load_tokenizer(folder)("The thin tree.\n\nEnd { of it", add_special_tokens=False)["input_ids"]
    assert tokens(folder, file)[0] == ids


def test_long_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    lines = [f"line {n} " + "x" * (n % 90) + "\n" for n in range(4000)]
    file.write_text("".join(lines), encoding="utf-8")
    rows = list(iter_rows(file))
    assert "".join(row.values["text"] for row in rows) == "".join(lines)
    assert len(rows) > 2 and all(TEXT_CHUNK <= len(row.values["text"]) < TEXT_CHUNK + 200 for row in rows[:-1])
    starts = [int(row.place.rsplit(":", 1)[1]) for row in rows]
    assert [row.values["text"].split("\n")[0] for row in rows] == [lines[start - 1].rstrip("\n") for start in starts]


def test_folder_gives_its_files_by_name(tmp_path: Path) -> None:
    parquet(tmp_path / "b.parquet", [{"text": "second"}])
    json_lines(tmp_path / "a.jsonl", [{"text": "first"}])
    (tmp_path / "c.txt").write_text("third")
    (tmp_path / "LICENSE").write_text("not data")
    assert [row["text"] for row in read_rows(tmp_path)] == ["first", "second", "third"]


def test_tools_may_be_json_text(folder: Path, tmp_path: Path) -> None:
    as_text = [{**row, "tools": json.dumps(row["tools"])} if "tools" in row else row for row in ROWS]
    expected = tokens(folder, json_lines(tmp_path / "a.jsonl"))
    assert tokens(folder, json_lines(tmp_path / "b.jsonl", as_text)) == expected
    assert tokens(folder, parquet(tmp_path / "c.parquet", as_text)) == expected


# The Hub. `datasets` takes a folder OWNER/NAME here before it asks the Hub, so its own code runs without a network.


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    repo = tmp_path / "owner" / "name"
    repo.mkdir(parents=True)
    return repo


@pytest.mark.parametrize(("split", "first"), [("", "train row 0"), (":test", "test row 0"), (":train", "train row 0")])
def test_hub_dataset_by_split(hub: Path, split: str, first: str) -> None:
    for name in ("train", "test"):
        json_lines(hub / f"{name}.jsonl", [{"text": f"{name} row {n}", "id": n} for n in range(3)])
    rows = list(iter_rows(data_place(f"hf://datasets/owner/name{split}")))
    assert [row.values for row in rows] == [{"text": first[:-1] + str(n)} for n in range(3)]
    assert rows[2].place == f"hf://datasets/owner/name:{first.split()[0]}, row 3"


def test_hub_dataset_gives_the_tokens_of_json_lines(folder: Path, hub: Path, tmp_path: Path) -> None:
    parquet(hub / "train.parquet")
    place = data_place("hf://datasets/owner/name")
    assert tokens(folder, place) == tokens(folder, json_lines(tmp_path / "rows.jsonl"))
    check_rows(place)
    assert load_packed(folder, VOCAB, place, 1, 8).title == "hf://datasets/owner/name:train"


def test_hub_split_that_is_not_there_is_named_with_those_that_are(hub: Path) -> None:
    json_lines(hub / "train.jsonl")
    with pytest.raises(CalibrationError, match=r"owner/name:nowhere: .*Bad split.*train"):
        check_rows(data_place("hf://datasets/owner/name:nowhere"))


def test_hub_that_does_not_answer_is_a_hub_error(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="hf://datasets/nobody/nothing: cannot be read"):
        check_rows(data_place("hf://datasets/nobody/nothing"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://datasets/a/b", HubDataset("a/b")),
        ("hf://datasets/a/b:test", HubDataset("a/b", split="test")),
        ("hf://datasets/a/b:train[:1%]", None),
        ("hf://datasets/a/b/c@v1:test", HubDataset("a/b", "c", "v1", "test")),
        ("hf://datasets/a", None),
        ("hf://models/a/b", None),
        ("s3://a/b", None),
        ("https://huggingface.co/datasets/a/b", None),
    ],
)
def test_names_of_places(text: str, expected: HubDataset | None) -> None:
    if expected is None:
        with pytest.raises(RecipeError, match="expected hf://datasets/OWNER/NAME"):
            data_place(text)
    else:
        assert data_place(text) == expected
        assert data_place(str(expected)) == expected


def test_paths_are_paths() -> None:
    assert data_place("a/b.jsonl") == Path("a/b.jsonl")


# Errors name the row.


def test_lines_are_those_of_the_file_whatever_is_blank(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n\n\n{"input_ids": [1, -1]}\n')
    for read in (lambda: load_packed(folder, VOCAB, file, 4, 8), lambda: load_documents(folder, VOCAB, file, None, 8)):
        with pytest.raises(CalibrationError, match=r"rows\.jsonl:4: token id -1"):
            read()


def test_table_rows_are_numbered(folder: Path, tmp_path: Path) -> None:
    file = parquet(tmp_path / "rows.parquet", [{"text": "a"}, {"input_ids": [VOCAB]}])
    with pytest.raises(CalibrationError, match=rf"rows\.parquet, row 2: token id {VOCAB}"):
        load_packed(folder, VOCAB, file, 4, 8)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [{"prompt": "a", "answer": "b"}],
            r"rows\.parquet: has no column text, messages, input_ids.*; it has answer, p",
        ),
        ([{"text": "a"}, {"text": None}], r"rows\.parquet, row 2: none of the columns"),
        ([{"messages": [{"role": "human", "content": "a"}]}], r"rows\.parquet, row 1: each message needs a `role`"),
        ([{"messages": [{"role": "user", "content": {"a": 1}}]}], r"row 1: the `content` of a message must be text or"),
        ([{"text": "a", "tools": "{"}], r"row 1: `tools` is text but not valid JSON"),
        ([{"text": "a", "tools": '{"a": 1}'}], r"row 1: `tools` must be a list"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(CalibrationError, match=said):
        read_rows(parquet(tmp_path / "rows.parquet", rows))


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_damaged_parquet_is_one_sentence(tmp_path: Path, damage: str) -> None:
    file = parquet(tmp_path / "rows.parquet")
    whole = file.read_bytes()
    file.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "text": b'{"text": "a"}\n'}[damage])
    with pytest.raises(CalibrationError, match=r"rows\.parquet: cannot be read as Parquet") as raised:
        read_rows(file)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": ', r"rows\.jsonl:1: not valid JSON \(.*\)\. Mend or remove this line\."),
        ("[" * 100_000, r"rows\.jsonl:1: JSON that is nested too deeply\. Mend or remove"),
        ('{"text": "a", "n": ' + "1" * 5000 + "}", r"rows\.jsonl:1: JSON with too long a number\. Mend or remove"),
        ('{"messages": [{"role": "user", "content": 5}]}', r"must be text or a list of parts; .* \(found 5\)"),
    ],
)
def test_lines_that_cannot_be_used(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(CalibrationError, match=said):
        read_rows(file)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.txt", "nothing"])
def test_places_without_rows(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if name == "rows.parquet":
        parquet(file, [{"text": "a"}])
        pq.write_table(pq.read_table(file).slice(0, 0), file)
    elif name == "rows.txt":
        file.write_text("\n \n")
    else:
        file.mkdir()
    with pytest.raises(CalibrationError, match=rf"{name}: (holds no rows|cannot be read: the folder holds no file)"):
        check_rows(file)


# The hash of what was rendered.


def test_hash_of_the_rendered_text(folder: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a b"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"input_ids": [5, 6, 7, 8, 9, 10]},
    ]
    chat = load_tokenizer(folder).apply_chat_template(rows[1]["messages"], tokenize=False)
    expected = hashlib.sha256(b"a b\0" + chat.encode() + b"\0[5,6,7,8,9,10]\0").hexdigest()
    assert tokens(folder, json_lines(tmp_path / "rows.jsonl", rows))[1] == expected


def test_hash_covers_the_rows_used_and_no_others(folder: Path, tmp_path: Path) -> None:
    first = {"input_ids": list(range(16))}
    one, two = json_lines(tmp_path / "1.jsonl", [first]), json_lines(tmp_path / "2.jsonl", [first, {"text": "more"}])
    packed = [load_packed(folder, VOCAB, file, 2, 8) for file in (one, two)]
    assert packed[0].rendered_sha256 == packed[1].rendered_sha256
    assert load_packed(folder, VOCAB, two, 3, 8).rendered_sha256 != packed[0].rendered_sha256
