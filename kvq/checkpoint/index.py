"""CheckpointIndex: every tensor of a checkpoint folder, from the index and the shard headers alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.checkpoint.header import TensorInfo, read_header
from kvq.checkpoint.untrusted import check_links, check_regular, parse_json
from kvq.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
MAX_JSON_BYTES = 100_000_000  # the index of 118,629 tensors has 12 MB
REPORTS = "kvq-reports"  # the folder of measurements beside them
MANIFEST_NAME = "kvq-manifest.json"  # what kvq leaves beside the weights it writes


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """Names, dtypes, shapes and places of all tensors. `warnings` are sentences for the person who runs kvq."""

    folder: Path
    tensors: Mapping[str, TensorInfo]
    shards: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> TensorInfo:
        """Raises CheckpointError, naming the folder, when there is no such tensor."""
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(
                f"{self.folder}: the checkpoint has no tensor {name}, which its config calls for. Download it again, "
                "or report the layout if it is complete."
            ) from None

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def load_json(path: Path, max_bytes: int = MAX_JSON_BYTES, remedy: str = "Download the file again.") -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError that names the file: for what is no JSON, for a name that
    stands twice (readers differ in which one counts), for numbers that are not finite, for halves of characters."""
    try:
        check_regular(path, max_bytes)
        value = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file. Give one that is there, or download it again.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}). {_made_by_kvq(path) or remedy}") from None
    if not isinstance(value, dict):
        found = type(value).__name__
        raise CheckpointError(f"{path}: expected a JSON object, found {found}. {_made_by_kvq(path) or remedy}")
    return value


def _made_by_kvq(path: Path) -> str:
    """What to do about a damaged file that nobody can download; empty for all others."""
    if path.name == MANIFEST_NAME:
        return "kvq wrote it, and it has changed since: copy the folder again, or quantize again."
    return "Measure again, or remove the file." if path.parent.name == REPORTS else ""


def expect_folder(folder: Path) -> None:
    """Raise CheckpointError for a checkpoint folder that is not there, or is a file."""
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "no such folder"
        raise CheckpointError(f"{folder}: {found}. Give the folder of a checkpoint, where its config.json lies.")


def load_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a folder that may be a stranger's: to be called before anything else is read there."""
    config = load_json(folder / "config.json")
    check_links(folder)
    return config


def load_index(folder: Path) -> CheckpointIndex:
    """Read `model.safetensors.index.json` and all shard headers, or the header of the one file without an index.

    Raises CheckpointError for a missing or truncated shard and for a tensor that the index promises and no shard holds.
    """
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    return assemble_index(folder, files, lambda shards: {shard: read_header(folder / shard) for shard in shards})


def assemble_index(
    folder: Path, files: Sequence[str], read_headers: Callable[[Sequence[str]], Mapping[str, list[TensorInfo]]]
) -> CheckpointIndex:
    """The index of shards named `files`, wherever their headers come from; `folder` holds the index file, if any."""
    if not (folder / INDEX_NAME).exists():
        if len(files) != 1:
            raise CheckpointError(
                f"{folder}: found {len(files)} *.safetensors files and no {INDEX_NAME}. kvq reads one file without an "
                "index, or shards with one."
            )
        tensors = read_headers(files)[files[0]]
        return CheckpointIndex(folder, {tensor.name: tensor for tensor in tensors}, (files[0],))
    weight_map = _weight_map(folder)
    shards = sorted(set(weight_map.values()))
    missing = sorted(set(shards).difference(files))
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing, the first is {missing[0]}. Download them "
            "and start again."
        )
    headers = {shard: {tensor.name: tensor for tensor in found} for shard, found in read_headers(files).items()}
    tensors_by_name: dict[str, TensorInfo] = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise CheckpointError(
                f"{folder / INDEX_NAME}: says that {shard} holds {name}, but it does not. Download the index and this "
                "shard again."
            )
        tensors_by_name[name] = headers[shard][name]
    warnings = _add_unindexed(headers, tensors_by_name)
    used = {tensor.shard for tensor in tensors_by_name.values()}
    return CheckpointIndex(folder, tensors_by_name, tuple(sorted(used)), tuple(warnings))


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX_NAME
    weight_map = load_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map. Download the file again.")
    good: set[str] = set()
    for name, shard in weight_map.items():
        if shard.__class__ is str and shard in good:
            continue
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path}: maps {name} to {shard!r}, which is not a file name in this folder.")
        good.add(shard)
    return weight_map


def _add_unindexed(headers: Mapping[str, Mapping[str, TensorInfo]], tensors: dict[str, TensorInfo]) -> list[str]:
    """Take in tensors that lie in the folder but not in the index (seen with mtp.safetensors): losing them is worse."""
    warnings = []
    for shard, header in headers.items():
        extra = [tensor for name, tensor in header.items() if name not in tensors]
        if extra:
            tensors.update({tensor.name: tensor for tensor in extra})
            warnings.append(
                f"{shard} holds {len(extra)} tensors that the index does not list, e.g. {extra[0].name}; taken in"
            )
    return warnings
