"""What a plan needs to know of a checkpoint, from wherever it can be had without reading weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvq.checkpoint.facts import known_checkpoint, published_index
from kvq.checkpoint.index import CheckpointIndex, load_config, load_index
from kvq.checkpoint.source import check_hub_id, local_folder, quiet
from kvq.errors import CheckpointError

Origin = Literal["folder", "facts", "hub"]


@dataclass(frozen=True, slots=True)
class Metadata:
    """`revision` is the Hub commit whose headers were read; `sources` say where shipped facts come from."""

    id: str
    origin: Origin
    config: Mapping[str, Any]
    index: CheckpointIndex
    revision: str | None = None
    sources: tuple[str, ...] = ()


def read_metadata(
    model: str, revision: str | None = None, alias: bool = False, note: Callable[[str], None] = quiet
) -> Metadata:
    """Of a folder, of an alias (`alias`) from shipped facts, or of a Hub id by range requests, in this order."""
    folder = local_folder(model)
    if folder is not None:
        if revision is not None:
            raise CheckpointError(f"{model} is a folder; --revision {revision} needs a Hub id. Leave one of them out.")
        return Metadata(model, "folder", load_config(folder), load_index(folder))
    if alias:
        if revision is not None:
            raise CheckpointError(f"{model}: --revision needs a Hub id; an alias is planned from shipped facts.")
        known = known_checkpoint(model)
        return Metadata(model, "facts", known.config, published_index(known), sources=known.sources)
    check_hub_id(model)
    from kvq.checkpoint.hub_headers import hub_metadata

    config, index, commit = hub_metadata(model, revision, note)
    return Metadata(model, "hub", config, index, commit)
