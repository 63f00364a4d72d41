"""The files that make text into tokens. They are programs, and what transformers raises is its own to choose."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from kvq.calibration import tokenizer_process
from kvq.calibration.dataset import load_packed
from tests.checkpoints import TINY, make_checkpoint, read_json
from tests.fuzz.hostile import as_json, document, edited, edits, spoiled
from tests.fuzz.target import Target, near, writes

SMALL = replace(TINY, num_hidden_layers=2, n_routed_experts=2)
ROWS = [
    {"text": "a b c d e f g h i j k l m n o p \u00e9\u6587 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},
    {"messages": [{"role": "user", "content": "the tree"}, {"role": "assistant", "content": "in the rain"}]},
]
# Parts of a tokenizer, each with a value that its code may not expect. Some make a text longer each time they are used.
PARTS: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50},
    {"type": "Replace", "pattern": {"Regex": "(a|aa|[a-z]+)+$1"}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "b"},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "Prepend", "prepend": "x" * 1000}, {"type": "NFKD"}, {"type": "Lowercase"},
    {"type": "Strip", "strip_left": True, "strip_right": True, "content": "a", "start": 2**50, "stop": 2**50},
    {"type": "Precompiled", "precompiled_charsmap": "/////w=="}, {"type": "Precompiled", "precompiled_charsmap": ""},
    {"type": "Split", "pattern": {"Regex": "((a+)+)+b"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "((a{99}){99}){99}"}, "behavior": "MergedWithNext", "invert": True},
    {"type": "FixedLength", "length": 0}, {"type": "Digits", "individual_digits": True}, {"type": "UnicodeScripts"},
    {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    {"type": "WhitespaceSplit"}, {"type": "Fuse"}, {"type": "BPEDecoder", "suffix": "a"}, {"type": "ByteFallback"},
    {"type": "RobertaProcessing", "sep": ["a", 2**32 - 1], "cls": ["b", 0], "trim_offsets": True,
     "add_prefix_space": True},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [],
     "special_tokens": {"x": {"id": "x", "ids": [2**32 - 1] * 9, "tokens": ["a"] * 9}}},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": True},
]  # fmt: skip
MODELS: list[dict[str, Any]] = [
    {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["b", -1e308]], "byte_fallback": True},
    {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 2**60,
     "vocab": {"a": 2**32 - 2}},
    {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "b": 2**31}},
]  # fmt: skip
PLURALS = {
    "normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders",
    "post_processor": "processors",
}  # fmt: skip
PADDING = {
    "strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "a",
}  # fmt: skip
TRUNCATION = {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0}
TEMPLATE_PIECES = (
    "{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**11 }}", "{{ '%99999999999d' % 1 }}", "{{ [1] * 10**10 }}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "{{ 9 ** (9 ** 9) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends '../outside/secret' %}",
    "{{ cycler.__init__ }}",
    "{{ messages.clear() }}", "{{ messages | tojson(indent=10**10) }}", "{{ 'a' | center(10**11) }}", "{% break %}",
    "{{ raise_exception('\x1b[31m') }}", "{{ strftime_now('%' * 5000) }}", "{{ lipsum(10**6) }}", "{{ self }}",
    "{{ messages | attr('__class__') }}", "{{ 'a'.format.__globals__ }}", "{{ '{0.__class__}'.format(1) }}",
    "{% if", "{{", "%}", "{#", "{% raw %}", "{% generation %}", "{{ '\\ud800' }}", "\x00", "{{ messages[10**30] }}",
)  # fmt: skip


def _folder(folder: Path, vocab_size: int = SMALL.vocab_size) -> Callable[[], object]:
    """A checkpoint with data to read; gives what reads them."""
    make_checkpoint(folder, "kimi_k2", "bf16", SMALL)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return lambda: load_packed(folder, vocab_size, data, 100, 16)


def _small(content: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer with few merges, so that edits meet its other parts too."""
    content["model"]["merges"] = content["model"]["merges"][:2]
    return content


def tokenizer(folder: Path) -> Target:
    read, place = _folder(folder), folder / "tokenizer.json"
    base = _small(read_json(place))

    def composed(draw: Random) -> dict[str, Any]:
        content = dict(base)
        for part in draw.sample([*PLURALS], draw.randint(0, 2)):
            pieces = [draw.choice(PARTS) for _ in range(draw.choice((1, 1, 2, 40)))]
            content[part] = pieces[0] if len(pieces) == 1 else {"type": "Sequence", PLURALS[part]: pieces}
        extra = draw.choice(({}, {}, {"padding": PADDING}, {"truncation": TRUNCATION}, {"model": draw.choice(MODELS)}))
        return {**content, **extra}

    def make(draw: Random) -> bytes:
        if draw.randrange(2):
            return document(draw, base)
        content = composed(draw)
        if draw.randrange(3) == 0:
            token = draw.choice([*base["model"]["vocab"]])
            content["model"] = {**base["model"], "vocab": {**base["model"]["vocab"], token: draw.randrange(2**32)}}
        return as_json(edited(content, edits(draw)) if draw.randrange(2) else content)

    return Target("tokenizer.json", folder, make, writes(place, read), 0.004)


def tokenizer_config(folder: Path) -> Target:
    read, place = _folder(folder), folder / "tokenizer_config.json"
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    token = {"content": "[EOS]", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    base = {
        **read_json(place), "chat_template": template, "added_tokens_decoder": {"1": token, str(2**31): token},
        "additional_special_tokens": ["[EOS]"], "extra_special_tokens": {"image_token": "<image>"},
        "padding_side": "left", "truncation_side": "right", "add_bos_token": True,
        "auto_map": {"AutoTokenizer": ["x.y"]},
    }  # fmt: skip
    return Target("tokenizer_config.json", folder, near(base), writes(place, read), 0.005)


def chat_template(folder: Path) -> Target:
    read, place = _folder(folder), folder / "chat_template.jinja"
    base = place.read_text()
    cuts = [at for at in range(len(base)) if base.startswith(("{{", "{%"), at)]

    def make(draw: Random) -> bytes:
        if draw.randrange(3) == 0:
            return spoiled(draw, base.encode())
        text = base
        for _ in range(draw.randint(1, 2)):
            at = draw.choice((0, draw.choice(cuts)))
            text = text[:at] + draw.choice(TEMPLATE_PIECES) + text[at:]
        return text.encode("utf-8", "surrogatepass")

    return Target("chat template", folder, make, writes(place, read), 0.002)


def tiktoken(folder: Path) -> Target:
    read, place = _folder(folder, vocab_size=1000), folder / "tiktoken.model"
    (folder / "tokenizer.json").unlink()
    special = {"258": {"content": "[BOS]"}, "259": {"content": "[EOS]"}}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"he"]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    strange = (b"", b"==", b"dGhl", b"dGhl 4294967296", b"dGhl -1", b"dGhl 1e3", b"\xff 7", b"IQ== 0", b"dGhl 258")

    def make(draw: Random) -> bytes:
        if draw.randrange(3) == 0:
            return spoiled(draw, b"\n".join(lines))
        written = list(lines)
        for _ in range(draw.randint(0, 2)):
            written[draw.randrange(len(written))] = draw.choice((*strange, draw.choice(lines)))
        return b"\n".join([*written, draw.choice((b"", b"", draw.choice(strange)))])

    return Target("tiktoken.model", folder, make, writes(place, read), 0.005)


def limit_tokenizers() -> None:
    """Many inputs use up what they may: let that be less than kvq allows."""
    tokenizer_process.CPU_SECONDS = 1
    tokenizer_process.MEMORY_BYTES = 2**29
