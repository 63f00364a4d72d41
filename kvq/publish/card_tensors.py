"""What a card says of the tensors, from the manifest: a row for each class and type, and the first paragraph."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.checkpoint.header import tensor_bytes
from kvq.errors import VerificationError
from kvq.recipes.tally import SCALES

TYPES = {"F8_E4M3": "FP8", "F8_E5M2": "FP8", "I32": "INT4"}
HOW = {"keep": "as in the source", "dequantize": "converted to BF16", "kv_scale": "scale of the KV cache"}


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Tensors of one class that are stored alike, their scales counted with them."""

    title: str
    stored: str
    how: str
    tensors: int
    nbytes: int


def tensor_rows(manifest: Mapping[str, Any], path: Path) -> list[TensorRow]:
    """Largest class first. Raises VerificationError for a manifest that is damaged."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    types = _types(manifest, path)
    for name, tensor in manifest["tensors"].items():
        try:
            nbytes = tensor_bytes(tensor["dtype"], tuple(tensor["shape"]))
            module = name.rsplit(".", 1)[0]
            key = (str(tensor["class"]), types.get(module, _stored(name, tensor["dtype"])), str(tensor["action"]))
        except (KeyError, TypeError, ValueError) as error:
            raise VerificationError(f"{path}: its entry of {str(name)[:80]} is damaged ({error!r}).") from None
        counts[key] += 1
        sizes[key] += nbytes
    packed = packed_text(manifest)
    rows = [
        TensorRow(title, stored, packed if action == "pack" else HOW.get(action, action), counts[key], sizes[key])
        for key in counts
        for title, stored, action in [key]
    ]
    total = Counter[str]()
    for row in rows:
        total[row.title] += row.nbytes
    return sorted(rows, key=lambda row: (-total[row.title], row.title, -row.nbytes, row.stored))


def _types(manifest: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Module -> the type of its weight, so that a scale is counted with what it scales."""
    tensors = manifest.get("tensors")
    if not isinstance(tensors, Mapping) or not tensors:
        raise VerificationError(f"{path}: lists no tensors; is it a manifest of kvq?")
    types = {}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        if end in ("weight", "weight_packed") and isinstance(tensor, Mapping):
            types[module] = _stored(name, str(tensor.get("dtype")))
    return types


def _stored(name: str, dtype: str) -> str:
    return TYPES.get(dtype, dtype) if not name.endswith(SCALES) else dtype


def packed_text(manifest: Mapping[str, Any]) -> str:
    """For example `INT4, groups of 128, GPTQ`."""
    recipe = manifest["recipe"]
    solver = {"gptq": "GPTQ", "rtn": "round-to-nearest", "awq": "AWQ"}.get(recipe["solver"], str(recipe["solver"]))
    return f"INT{recipe['num_bits']}, groups of {recipe['group_size']}, {solver}"


def classes_by_type(rows: list[TensorRow]) -> dict[str, list[str]]:
    """Type -> classes of which most bytes are stored so; the types of most bytes first."""
    largest: dict[str, TensorRow] = {}
    for row in rows:  # the largest of each class first
        largest.setdefault(row.title, row)
    grouped: dict[str, list[str]] = {}
    for row in largest.values():
        grouped.setdefault(row.stored, []).append(row.title)
    order = ["INT4", "FP8", "BF16"]
    return dict(sorted(grouped.items(), key=lambda item: (order.index(item[0]) if item[0] in order else 9, item[0])))


def words(items: list[str]) -> str:
    """`a, b and c`"""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
