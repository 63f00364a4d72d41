"""The tokenizer of a Kimi folder, built from its `tiktoken.model` without running the folder's code.

Kimi's repositories hold byte tokens with ranks and a Python class (`tokenization_kimi.TikTokenTokenizer`) instead of a
tokenizer.json. What that class adds is restated here: the split pattern, the special tokens, and the sorted keys of
tool declarations. Source: tokenization_kimi.py as copied on GitHub in troy12x/quasar-kimi (as in Kimi K2, with
256 + 2 special ids) and PabloRaka/bear (as in Kimi K3, with 256; K2.6 has 256 too).

Not restated: K2.5 and later declare tools as TypeScript text that their class computes (`tools_ts_str`); here their
template writes the tools as JSON, its own fallback. And the class cuts runs of more than 25,000 characters without
(or of nothing but) whitespace; here they stay whole.

Importing this module imports transformers.
"""

import base64
import binascii
import json
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvq.errors import CalibrationError

VOCABULARY = "tiktoken.model"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
KIMI_CLASS = "TikTokenTokenizer"

# `TikTokenTokenizer.pat_str`, the same in both. Oniguruma reads it as tiktoken's engine does, `&&` included: compared
# code point by code point, the classes differ only where one of the two knows a newer Unicode.
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# The ids after the ranks are special, named by `added_tokens_decoder` or `<|reserved_token_ID|>`. K2's class has two
# more; the model has no rows for them (163,584 ranks + 256 = 163,840), so they count only where the config names them.
NUM_RESERVED = 256
MAX_RESERVED = NUM_RESERVED + 2

ROLES = {"bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": None, "pad_token": None}
REMEDY = "Download the file again, give calibration rows with `input_ids`, or add a tokenizer.json."


class KimiTokenizer(PreTrainedTokenizerFast):
    """Renders tools as Kimi's own class does: keys sorted at every depth."""

    def apply_chat_template(self, conversation: Any, tools: Any = None, *args: Any, **kwargs: Any) -> Any:
        return super().apply_chat_template(conversation, _sorted_keys(tools), *args, **kwargs)


def load_kimi_tokenizer(folder: Path) -> KimiTokenizer:
    """Raises CalibrationError if `tiktoken.model` or `tokenizer_config.json` is missing, damaged or another model's."""
    config = _read_config(folder / CONFIG)
    ranks = read_ranks(folder / VOCABULARY)
    specials = _special_tokens(folder / CONFIG, config, len(ranks))
    backend = _byte_level_bpe(ranks)
    _add_specials(folder / CONFIG, backend, specials)
    roles = {role: _role(folder / CONFIG, config, role, specials) for role in ROLES}
    return KimiTokenizer(  # type: ignore[no-untyped-call]  # transformers gives its __init__ no types
        tokenizer_object=backend,
        chat_template=_chat_template(folder, config),
        clean_up_tokenization_spaces=False,
        **roles,
    )


def read_ranks(file: Path) -> dict[bytes, int]:
    """Token bytes -> rank, which is the token id. Checked: every byte has a token, ranks are 0 to n - 1."""
    ranks: dict[bytes, int] = {}
    lines_by_rank: dict[int, int] = {}
    for number, line in enumerate(_read(file).splitlines(), start=1):
        if not line.strip():
            continue
        token, rank = _entry(f"{file}:{number}", line)
        if token in ranks:
            _refuse(f"{file}:{number}", f"the token {token!r} has a line already, with rank {ranks[token]}")
        if rank in lines_by_rank:
            _refuse(f"{file}:{number}", f"rank {rank} is taken by line {lines_by_rank[rank]}")
        ranks[token] = rank
        lines_by_rank[rank] = number
    missing = next((rank for rank in range(len(ranks)) if rank not in lines_by_rank), None)
    if missing is not None:
        _refuse(file, f"holds {len(ranks)} tokens but none of rank {missing}")
    absent = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if absent is not None:
        _refuse(file, f"has no token for the single byte 0x{absent:02x}")
    return ranks


def _entry(place: str, line: bytes) -> tuple[bytes, int]:
    fields = line.split()
    if len(fields) != 2:
        _refuse(place, f"has {len(fields)} fields where a base64 token and a rank belong")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        _refuse(place, f"the token {fields[0][:40]!r} is not base64 ({error})")
    if not token:
        _refuse(place, "the token is empty")
    if not fields[1].isdigit():
        _refuse(place, f"the rank {fields[1][:40]!r} is not a whole number")
    return token, int(fields[1])


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every way to make each token from two others, in the order of ranks.

    tiktoken joins the neighbours whose joined bytes have the lowest rank, the leftmost of equals. Within a token's
    bytes that order of joins is always the same, unless a join crosses their ends, and then the token cannot arise.
    So only one of its splits is ever met, and the others in the list do no harm.
    """
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((left, right))
    return merges


def _byte_level_bpe(ranks: dict[bytes, int]) -> Tokenizer:
    alphabet = _byte_alphabet()

    def text(token: bytes) -> str:
        return token.decode("latin-1").translate(alphabet)

    vocabulary = {text(token): rank for token, rank in ranks.items()}
    merges = [(text(left), text(right)) for left, right in _merges(ranks)]
    # ignore_merges: a whole piece that is a token is taken as it is, as tiktoken does, even if no merges lead to it.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_alphabet() -> dict[int, int]:
    """Byte -> the printable character that stands for it in byte-level vocabularies (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {byte: 256 + place for place, byte in enumerate(others)}


def _special_tokens(file: Path, config: dict[str, Any], first: int) -> dict[str, AddedToken]:
    """Special tokens in the order of their ids, which run from `first` without gaps."""
    named = _named_tokens(file, config)
    outside = next((i for i in named if not first <= i < first + MAX_RESERVED), None)
    if outside is not None:
        _refuse(
            file,
            f"names the special token {named[outside]['content']!r} with id {outside}, but {VOCABULARY} leaves the ids "
            f"{first} to {first + MAX_RESERVED - 1} to special tokens",
        )
    count = max([NUM_RESERVED, *(i - first + 1 for i in named)])
    specials: dict[str, AddedToken] = {}
    for i in range(first, first + count):
        entry = named.get(i, {"content": f"<|reserved_token_{i}|>"})
        if entry["content"] in specials:
            _refuse(file, f"names two special tokens {entry['content']!r}")
        specials[entry["content"]] = AddedToken(
            entry["content"], special=bool(entry.get("special", True)), normalized=False
        )
    return specials


def _named_tokens(file: Path, config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict) or not entries:
        _refuse(file, "has no `added_tokens_decoder` that names the special tokens")
    named: dict[int, dict[str, Any]] = {}
    for key, entry in entries.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not (key.isascii() and key.isdigit()) or not isinstance(content, str) or not content:
            _refuse(file, f"`added_tokens_decoder` holds {key!r}: {entry!r} where an id and its `content` belong")
        named[int(key)] = entry
    return named


def _add_specials(file: Path, backend: Tokenizer, specials: dict[str, AddedToken]) -> None:
    first = backend.get_vocab_size()
    backend.add_tokens(list(specials.values()))
    for i, content in enumerate(specials, start=first):
        if backend.token_to_id(content) != i:  # the same characters are an ordinary token
            _refuse(file, f"names the special token {content!r}, which {VOCABULARY} holds as an ordinary token")


def _role(file: Path, config: dict[str, Any], role: str, specials: dict[str, AddedToken]) -> str | None:
    value = config.get(role, ROLES[role])
    content = value.get("content") if isinstance(value, dict) else value
    if content is not None and content not in specials:
        _refuse(file, f"`{role}` is {content!r}, which is not among the special tokens")
    return content


def _chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """The folder's template file, else the one in the config (one text, or a list of named ones), else None."""
    if (folder / TEMPLATE).exists():
        return _read_text(folder / TEMPLATE)
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    except (TypeError, KeyError):
        _refuse(folder / CONFIG, "`chat_template` is neither a text nor a list of `name` and `template`")


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        _refuse(file, f"is not valid JSON ({error})")
    if not isinstance(config, dict):
        _refuse(file, f"holds a JSON {type(config).__name__} where an object belongs")
    name = config.get("tokenizer_class", KIMI_CLASS)
    if name != KIMI_CLASS:  # another class has another split pattern, which no file but its code tells
        _refuse(file, f"names the tokenizer class {name!r}; kvq reads {VOCABULARY} as Kimi's {KIMI_CLASS} only")
    return config


def _read_text(file: Path) -> str:
    try:
        return _read(file).decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(file, f"is not UTF-8 ({error})")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        _refuse(file, f"cannot be read ({error.strerror}), and without it {VOCABULARY} cannot be used")


def _refuse(place: Path | str, found: str) -> NoReturn:
    raise CalibrationError(f"{place}: {found}. {REMEDY}") from None


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted_keys(item) for item in value]
    return value
