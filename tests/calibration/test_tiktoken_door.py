"""A Kimi folder without tokenizer.json: ids equal plain BPE by ranks, and chats render, with no remote code run."""

import base64
import importlib
import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvq.calibration.dataset import RowEncoder, read_rows
from kvq.calibration.transformers_door import load_tokenizer
from kvq.errors import CalibrationError

regex: Any = importlib.import_module("regex")  # no stubs; transformers requires it

# Kimi's pattern written anew, with set difference where the original has intersections.
UPPER = r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]--\p{Han}]"
LOWER = r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]--\p{Han}]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PIECES = regex.compile(
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    regex.V1,
)
CORPUS = (
    "The quick brown fox doesn't jump over the lazy dog; it's sleeping. We've seen that they'll be there, HE'S sure.\n"
    "def encode(self, text: str) -> list[int]:\n    return [self.ranks[token] for token in text]\n\n        # 12345\n"
    "量化模型的校准数据需要中文文本。模型的中文数据。混合English和数字2024年。\n"
    "caf\u00e9 na\u00efve \U0001f600\U0001f680 \U0001f600\U0001f680 다람쥐 다람쥐 हिन्दी हिन्दी\n"
) * 2
BITS = [
    "a", "B", "the", "don't", "I'LL", "we'Ve", "it's", "'", " ", "  ", "     ", "\t", "\n", "\r\n", "\n\n", "\u3000",
    "\x85", "\u00a0", "中文", "模型", "漢字", "々", "\u3007", "\U00020000", "\U0001f600", "\U0001f469\u200d\U0001f467",
    "7", "123", "45678", "\u0663", "\u00bd", "\u00e9", "e\u0301", "\u00df", "\u017f", "'\u017f", "\u01c5", "\u02b0",
    "हिन्दी", "한국어", "かな", "!", "...", "\u2014", "//", "CamelCase", "ABCdef", "\x00", "\ufeff", "<|", "[BOS", "_x1",
]  # fmt: skip
NAMED = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<think>"]
TOOL_TOKENS = ["section_begin", "section_end", "call_begin", "argument_begin", "call_end"]
TEMPLATE = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>"
    "{% endif %}"
    "{% for m in messages %}<|im_user|>{{ m.role }}<|im_middle|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{% for call in m.get('tool_calls') or [] %}{{ call.id + '|' }}{% endfor %}<|im_end|>{% endfor %}"
)

Ranks = dict[bytes, int]


def merged(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    done: list[bytes] = []
    place = 0
    while place < len(parts):
        step = 2 if tuple(parts[place : place + 2]) == pair else 1
        done.append(b"".join(parts[place : place + step]))
        place += step
    return done


def trained_ranks(size: int) -> Ranks:
    """Byte-pair training on CORPUS."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([byte]) for byte in piece.encode()] for piece in PIECES.findall(CORPUS)]
    while len(ranks) < size:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        pair = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.setdefault(b"".join(pair), len(ranks))
        words = [merged(word, pair) for word in words]
    return ranks


def random_ranks(seed: int) -> Ranks:
    """Tokens over three letters in random order, so that nothing about their ranks is as training would have it."""
    rng = random.Random(seed)
    tokens = {"".join(rng.choices("abc", k=rng.randint(2, 6))).encode() for _ in range(120)}
    order = [*(bytes([byte]) for byte in range(256)), *sorted(tokens)]
    rng.shuffle(order)
    return {token: rank for rank, token in enumerate(order)}


def plain_bpe(ranks: Ranks, text: str) -> list[int]:
    """tiktoken's rule as it is told: a whole piece if it is a token, else join the lowest rank, leftmost first."""
    ids: list[int] = []
    for piece in PIECES.findall(text):
        data = piece.encode()
        parts = [data] if data in ranks else [bytes([byte]) for byte in data]
        while True:
            joins = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
            if not joins:
                break
            place = min(joins)[1]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def write_folder(folder: Path, ranks: Ranks, **changes: Any) -> Path:
    """A Kimi folder; `changes` go into tokenizer_config.json, None takes a key out."""
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    names = [*NAMED, *(f"<|tool_{'calls' if 'section' in name else 'call'}_{name}|>" for name in TOOL_TOKENS)]
    ids = {len(ranks) + place: name for place, name in enumerate(names)}
    ids |= {len(ranks) + 254: "[UNK]", len(ranks) + 255: "[PAD]"}
    config: dict[str, Any] = {
        "added_tokens_decoder": {str(i): {"content": name, "special": name[0] != "<"} for i, name in ids.items()},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": {"content": "<|im_end|>"},
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "chat_template": TEMPLATE,
    }
    config = {key: value for key, value in (config | changes).items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenization_kimi.py").write_text("raise RuntimeError('remote code ran')\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return trained_ranks(440)


@pytest.fixture(scope="module")
def folder(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("kimi"), ranks)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(BITS, k=rng.randint(0, 40)))


@pytest.mark.parametrize("seed", range(8))
def test_ids_equal_plain_bpe_by_ranks_and_decode_to_the_text(tokenizer: Any, ranks: Ranks, seed: int) -> None:
    rng = random.Random(seed)
    for text in [CORPUS[seed:], *(random_text(rng) for _ in range(60))]:
        ids = encode(tokenizer, text)
        assert ids == plain_bpe(ranks, text), text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("seed", range(8))
def test_merges_from_any_order_of_ranks_equal_plain_bpe(tmp_path: Path, seed: int) -> None:
    ranks = random_ranks(seed)
    tokenizer = load_tokenizer(write_folder(tmp_path, ranks))
    rng = random.Random(seed)
    for _ in range(200):
        text = "".join(rng.choices("abc", k=rng.randint(1, 30)))
        assert encode(tokenizer, text) == plain_bpe(ranks, text), text


def test_corpus_pieces_are_longer_than_bytes(tokenizer: Any) -> None:
    assert len(encode(tokenizer, CORPUS)) < 0.6 * len(CORPUS.encode())


def test_han_runs_are_pieces_of_their_own(tokenizer: Any) -> None:
    """The intersections with [^\\p{Han}]: without them the letters would take the Han characters along."""
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("数字abc 数字 Don'ts 12345")
    assert [end - start for _, (start, end) in pieces] == [2, 3, 1, 2, 6, 1, 1, 3, 2]


def test_special_tokens_are_single_ids(tokenizer: Any, ranks: Ranks) -> None:
    first = len(ranks)
    for place, name in enumerate(NAMED):
        assert encode(tokenizer, f"a{name}b") == [ord("a"), first + place, ord("b")]
    assert encode(tokenizer, f"<|reserved_token_{first + 100}|>") == [first + 100]
    assert len(tokenizer) == first + 256
    assert len(encode(tokenizer, f"<|reserved_token_{first + 256}|>")) > 1
    text = "[BOS]<|im_user|>user<|im_middle|> hi<think>\n<|im_end|>[PAD]"
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_roles_come_from_the_config(tokenizer: Any, ranks: Ranks) -> None:
    first = len(ranks)
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
    assert ids == (first, first + 2, first + 254, first + 255)
    assert tokenizer("a")["input_ids"] == [ord("a")]


def test_config_without_roles_takes_the_defaults_of_the_class(ranks: Ranks, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        write_folder(tmp_path, ranks, bos_token=None, eos_token=None, unk_token=None, pad_token=None)
    )
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("[BOS]", "[EOS]", None)


def test_ids_named_past_the_256_are_special_too(ranks: Ranks, tmp_path: Path) -> None:
    first = len(ranks)
    named = {str(first): {"content": "[BOS]"}, str(first + 1): {"content": "[EOS]"}}
    named[str(first + 257)] = {"content": "<|last|>"}
    folder = write_folder(tmp_path, ranks, added_tokens_decoder=named, eos_token=None, unk_token=None, pad_token=None)
    assert encode(load_tokenizer(folder), f"<|last|><|reserved_token_{first + 256}|>") == [first + 257, first + 256]


def test_tokenizer_json_comes_first(ranks: Ranks, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, ranks, tokenizer_class="PreTrainedTokenizerFast", eos_token="[EOS]")
    model = {"type": "WordLevel", "vocab": {"only": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    assert encode(load_tokenizer(folder), "only") == [0]


def test_chat_template_file_goes_before_the_one_in_the_config(ranks: Ranks, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, ranks)
    (folder / "chat_template.jinja").write_text("文{{ messages[0].content }}", encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "文hi"


def test_named_chat_templates_give_the_default(ranks: Ranks, tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "D"}, {"name": "other", "template": "O"}]
    tokenizer = load_tokenizer(write_folder(tmp_path, ranks, chat_template=templates))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "D"


def test_rows_with_tools_go_through_the_encoder(tokenizer: Any, folder: Path, ranks: Ranks) -> None:
    tool = {"type": "function", "function": {"parameters": {"b": {"y": 1, "x": 2}, "a": []}, "name": "f"}}
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "functions.f:0"},
    ]
    ids = RowEncoder(folder, len(ranks) + 256).encode({"messages": messages, "tools": [tool]}, "row:1")
    assert tokenizer.decode(ids) == (
        "<|im_system|>tool_declare<|im_middle|>"
        '[{"function":{"name":"f","parameters":{"a":[],"b":{"x":2,"y":1}}},"type":"function"}]<|im_end|>'
        "<|im_user|>assistant<|im_middle|>functions.f:0|<|im_end|>"
        "<|im_user|>tool<|im_middle|>## Return of functions.f:0\n7<|im_end|>"
    )


def test_no_chat_template_is_an_error_for_messages_only(ranks: Ranks, tmp_path: Path) -> None:
    encoder = RowEncoder(write_folder(tmp_path, ranks, chat_template=None), len(ranks) + 256)
    assert encoder.encode({"text": "ab"}, "row:1") == plain_bpe(ranks, "ab")
    with pytest.raises(CalibrationError, match="row:2: the model's chat template cannot render"):
        encoder.encode({"messages": [{"role": "user", "content": "hi"}]}, "row:2")


def test_embedded_rows_number_their_tool_calls_as_kimi_does() -> None:
    num_calls = 0
    for row in read_rows(None):
        calls = [call for message in row.get("messages", []) for call in message.get("tool_calls", [])]
        answers = [message["tool_call_id"] for message in row.get("messages", []) if message["role"] == "tool"]
        expected = [f"functions.{call['function']['name']}:{index}" for index, call in enumerate(calls)]
        assert [call["id"] for call in calls] == expected == answers
        num_calls += len(calls)
    assert num_calls > 50


def test_embedded_rows_render_and_encode(tokenizer: Any, folder: Path, ranks: Ranks) -> None:
    encoder = RowEncoder(folder, len(ranks) + 256)
    rows = [row for row in read_rows(None) if "tools" in row][:10]
    for row in rows:
        text = tokenizer.decode(encoder.encode(row, "row"))
        assert "## Return of functions." in text or not any("tool_calls" in message for message in row["messages"])


def replaced(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "tiktoken.model"
        data = file.read_bytes()
        assert data.count(old) == 1
        file.write_bytes(data.replace(old, new))

    return change


A, B = base64.b64encode(b"a"), base64.b64encode(b"b")
BAD_RANKS = {
    r"tiktoken.model:98: the token b'!!!!' is not base64": (A + b" 97\n", b"!!!! 97\n"),
    r"tiktoken.model:98: the token b'YQ' is not base64": (A + b" 97\n", b"YQ 97\n"),
    r"tiktoken.model:99: rank 97 is taken by line 98": (B + b" 98\n", B + b" 97\n"),
    r"tiktoken.model:99: the token b'a' has a line already, with rank 97": (B + b" 98\n", A + b" 98\n"),
    r"tiktoken.model:98: has 3 fields where": (A + b" 97\n", A + b" 9 7\n"),
    r"tiktoken.model:98: the rank b'-97' is not a whole number": (A + b" 97\n", A + b" -97\n"),
    r"tiktoken.model: holds 439 tokens but none of rank 97": (A + b" 97\n", b""),
    r"tiktoken.model: has no token for the single byte 0x61": (A + b" 97\n", base64.b64encode(b"a" * 50) + b" 97\n"),
}


@pytest.mark.parametrize("message", BAD_RANKS)
def test_damaged_ranks_are_refused(ranks: Ranks, tmp_path: Path, message: str) -> None:
    replaced(*BAD_RANKS[message])(write_folder(tmp_path, ranks))
    with pytest.raises(CalibrationError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}") and "add a tokenizer.json" in str(caught.value)


BAD_CONFIGS: dict[str, dict[str, Any]] = {
    "has no `added_tokens_decoder`": {"added_tokens_decoder": None},
    r"`added_tokens_decoder` holds 'x': \{'content': 'A'\}": {"added_tokens_decoder": {"x": {"content": "A"}}},
    r"`added_tokens_decoder` holds '440': \{\}": {"added_tokens_decoder": {"440": {}}},
    "'A' with id 439, but tiktoken.model leaves the ids 440 to 697": {
        "added_tokens_decoder": {"439": {"content": "A"}}
    },
    "'A' with id 698, but tiktoken.model leaves the ids 440 to 697": {
        "added_tokens_decoder": {"698": {"content": "A"}}
    },
    "names two special tokens 'A'": {"added_tokens_decoder": {"440": {"content": "A"}, "441": {"content": "A"}}},
    "the special token 'A', which tiktoken.model holds": {"added_tokens_decoder": {"440": {"content": "A"}}},
    "`eos_token` is '<end>', which is not among": {"eos_token": "<end>"},
    "names the tokenizer class 'QWenTokenizer'": {"tokenizer_class": "QWenTokenizer"},
    "`chat_template` is neither a text nor a list": {"chat_template": [1]},
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_configs_that_cannot_be_meant_are_refused(ranks: Ranks, tmp_path: Path, message: str) -> None:
    write_folder(tmp_path, ranks, **BAD_CONFIGS[message])
    with pytest.raises(CalibrationError, match=rf"tokenizer_config\.json: .*{message}"):
        load_tokenizer(tmp_path)


def test_missing_or_broken_files_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    config = write_folder(tmp_path, ranks) / "tokenizer_config.json"
    broken = {b"{": "is not valid JSON", b"[]": "holds a JSON list", b"\xff": "is not UTF-8"}
    for data, message in broken.items():
        config.write_bytes(data)
        with pytest.raises(CalibrationError, match=message):
            load_tokenizer(tmp_path)
    config.unlink()
    with pytest.raises(CalibrationError, match=r"tokenizer_config\.json: cannot be read \(No such file"):
        load_tokenizer(tmp_path)
