"""Rows to token sequences.

Shape suffixes: N = sequences, S = tokens per sequence.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq.calibration.dataset import EMBEDDED, MIN_TOKENS, TokenSet, load_documents, load_packed, read_rows
from kvq.calibration.transformers_door import load_tokenizer
from kvq.errors import CalibrationError
from tests.checkpoints import TINY, make_checkpoint

VOCAB = TINY.vocab_size
TALK = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "glm", "glm4_moe", "bf16")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def packed(folder: Path, file: Path, num_sequences: int = 4, seq_length: int = 8) -> TokenSet:
    return load_packed(folder, VOCAB, file, num_sequences, seq_length)


def stream(folder: Path, file: Path) -> list[int]:
    """All tokens of a file, in order."""
    tokens: list[int] = packed(folder, file, 1, 10**6).tokens_NS.flatten().tolist()
    return tokens


# Packing.


def test_rows_are_joined_without_padding_and_nothing_is_used_twice(folder: Path, data: Path) -> None:
    write(data, {"input_ids": list(range(11))}, {"input_ids": list(range(11, 18))}, {"input_ids": list(range(18, 40))})
    found = packed(folder, data, num_sequences=4, seq_length=8)
    assert found.tokens_NS.dtype == torch.int64
    assert found.tokens_NS.tolist() == [list(range(start, start + 8)) for start in (0, 8, 16, 24)]
    assert (found.num_tokens, found.num_rows, found.num_asked, found.name) == (32, 3, 4, str(data))


def test_rows_after_the_last_sequence_are_not_read(folder: Path, data: Path) -> None:
    write(data, {"input_ids": list(range(16))}, {"input_ids": [1]}, {"input_ids": [VOCAB]})
    assert packed(folder, data, num_sequences=2).num_rows == 1
    with pytest.raises(CalibrationError):
        packed(folder, data, num_sequences=3)


def test_fewer_sequences_than_asked(folder: Path, data: Path) -> None:
    found = packed(folder, write(data, {"input_ids": list(range(30))}), num_sequences=512)
    assert (found.tokens_NS.shape, found.num_asked) == ((3, 8), 512)
    assert found.tokens_NS.flatten().tolist() == list(range(24))


def test_less_than_one_sequence_gives_one_shorter(folder: Path, data: Path) -> None:
    found = packed(folder, write(data, {"input_ids": list(range(30))}), num_sequences=4, seq_length=2048)
    assert found.tokens_NS.tolist() == [list(range(30))]


@pytest.mark.parametrize("count", [0, 1, MIN_TOKENS - 1])
def test_too_few_tokens_are_refused(folder: Path, data: Path, count: int) -> None:
    with pytest.raises(CalibrationError, match=f"gives {count} tokens, too few"):
        packed(folder, write(data, {"input_ids": [1] * count}))
    assert packed(folder, write(data, {"input_ids": [1] * MIN_TOKENS})).num_tokens == MIN_TOKENS


def test_hash_changes_with_any_token_and_with_the_shape(folder: Path, data: Path) -> None:
    tokens = list(range(24))
    variants = [tokens, [*tokens[:-1], 99], [99, *tokens[1:]], [1, 0, *tokens[2:]], tokens[:16]]
    hashes = [packed(folder, write(data, {"input_ids": ids})).sha256 for ids in variants]
    hashes.append(packed(folder, write(data, {"input_ids": tokens}), seq_length=12).sha256)
    assert len(set(hashes)) == len(variants) + 1
    assert all(len(digest) == 64 for digest in hashes)


def test_hash_does_not_depend_on_how_the_rows_were_cut(folder: Path, data: Path) -> None:
    whole = packed(folder, write(data, {"input_ids": list(range(24))}))
    parts = packed(folder, write(data, {"input_ids": list(range(10))}, {"input_ids": list(range(10, 24))}))
    assert whole.sha256 == parts.sha256


# Kinds of rows.


def test_text_is_tokenized_as_it_is(folder: Path, data: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = stream(folder, write(data, {"text": "The thin tree.\nEnd"}))
    assert ids == tokenizer("The thin tree.\nEnd", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "The thin tree.\nEnd"


def test_messages_go_through_the_chat_template(folder: Path, data: Path) -> None:
    ids = stream(folder, write(data, {"messages": TALK}))
    text = load_tokenizer(folder).decode(ids)
    assert text == "[gMASK]<sop><|user|>\nWhat is 2 + 2?<|assistant|>\nIt is 4."


def test_special_tokens_of_the_template_are_single_ids(folder: Path, data: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = stream(folder, write(data, {"messages": TALK}))
    assert ids[:3] == tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>", "<|user|>"])


def test_tools_reach_the_template(folder: Path, data: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    ids = stream(folder, write(data, {"messages": [*TALK, call], "tools": TOOLS}))
    text = load_tokenizer(folder).decode(ids)
    assert "# Tools" in text and '"name": "add"' in text
    assert '<tool_call>add\n{"a": 1}</tool_call>' in text


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_input_ids_come_first(folder: Path, data: Path, kind: str) -> None:
    other = {"text": "never", "messages": TALK}[kind]
    assert stream(folder, write(data, {kind: other, "input_ids": list(range(20, 30))})) == list(range(20, 30))


def test_text_of_null_leaves_the_messages(folder: Path, data: Path) -> None:
    both = stream(folder, write(data, {"text": None, "messages": TALK}))
    assert both == stream(folder, write(data, {"messages": TALK}))


def test_input_ids_need_no_tokenizer(tmp_path: Path, data: Path) -> None:
    write(data, {"input_ids": list(range(10))})
    assert packed(tmp_path, data).num_tokens == 8


def test_the_embedded_set_is_readable(folder: Path) -> None:
    rows = read_rows(None)
    assert len(rows) > 100
    found = load_packed(folder, VOCAB, None, 2, 64)
    assert (found.tokens_NS.shape, found.name) == ((2, 64), EMBEDDED)


# Lines.


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_blank_lines_are_left_out(data: Path, ending: str) -> None:
    data.write_bytes(ending.join(['{"text": "a"}', "", "  ", '{"text": "b"}', ""]).encode())
    assert [row["text"] for row in read_rows(data)] == ["a", "b"]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\x7f", "\u00e9", "\U0001f600"])
def test_characters_that_json_allows_do_not_end_a_line(data: Path, character: str) -> None:
    data.write_text(json.dumps({"text": f"a{character}b"}, ensure_ascii=False), encoding="utf-8")
    assert read_rows(data) == [{"text": f"a{character}b"}]


@pytest.mark.parametrize("line", ["{", "nonsense", '{"text": "a"', '{"text": "a"}{"text": "b"}'])
def test_malformed_json_is_named_by_its_line(data: Path, line: str) -> None:
    data.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(CalibrationError, match=r"rows\.jsonl:3: not valid JSON"):
        read_rows(data)


@pytest.mark.parametrize("row", ["[1]", "3", "null", "{}", '{"text": 3}', '{"messages": "a"}', '{"input_ids": "1 2"}'])
def test_rows_of_no_known_kind_are_named_by_their_line(data: Path, row: str) -> None:
    data.write_text(f'{{"text": "fine"}}\n{row}\n')
    with pytest.raises(CalibrationError, match=r"rows\.jsonl:2: a row needs `text`"):
        read_rows(data)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00"])
def test_files_without_rows_are_refused(data: Path, content: bytes) -> None:
    data.write_bytes(content)
    with pytest.raises(CalibrationError, match=r"rows\.jsonl: (holds no rows|cannot be read)"):
        read_rows(data)


def test_files_that_are_not_there_are_refused(data: Path) -> None:
    for place in (data, data.parent):
        with pytest.raises(CalibrationError, match="cannot be read"):
            read_rows(place)


# Ids and text that cannot be used.


@pytest.mark.parametrize("bad", [VOCAB, -1, 10**30, 1.0, True, "3", None])
def test_ids_outside_the_vocabulary_are_refused(folder: Path, data: Path, bad: object) -> None:
    write(data, {"input_ids": [1] * 9}, {"input_ids": [1, bad]})
    with pytest.raises(
        CalibrationError, match=rf"rows\.jsonl:2: token id {str(bad)[:40]} is not a whole number below .* size {VOCAB}"
    ):
        packed(folder, data)


def test_tokenizers_of_a_larger_model_are_noticed(folder: Path, data: Path) -> None:
    with pytest.raises(CalibrationError, match="another tokenizer"):
        load_packed(folder, 100, write(data, {"messages": TALK}), 4, 8)


def test_half_a_surrogate_pair_is_refused(folder: Path, data: Path) -> None:
    data.write_text('{"text": "abc \\ud800 def"}')
    with pytest.raises(CalibrationError, match=r"rows\.jsonl:1: holds half of a surrogate pair"):
        packed(folder, data)


# Documents.


def test_documents_are_cut_not_joined(folder: Path, data: Path) -> None:
    write(data, *({"input_ids": list(range(count))} for count in (5, 1, 0, 12, 2)))
    found = load_documents(folder, VOCAB, data, None, 8)
    assert [document.tolist() for document in found] == [list(range(count)) for count in (5, 8, 2)]
    assert len(load_documents(folder, VOCAB, data, 1, 8)) == 1


def test_documents_without_a_next_token_are_refused(folder: Path, data: Path) -> None:
    with pytest.raises(CalibrationError, match="no row gives two tokens"):
        load_documents(folder, VOCAB, write(data, {"input_ids": [1]}), None, 8)
