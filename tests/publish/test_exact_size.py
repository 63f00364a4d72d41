"""The plan's sizes are what the writer writes, to the byte: tensors, shard files with their headers, shards."""

from pathlib import Path

import pytest

from kvq.checkpoint.index import INDEX_NAME
from kvq.checkpoint.metadata import read_metadata
from kvq.publish.plan_report import output_files
from kvq.recipes.plan import resolve_plan
from kvq.recipes.schema import load_recipe, override
from tests.checkpoints import read_json
from tests.runs import CASES, PASS_THROUGH, SETTINGS, Shared

REST = {"kept": (), "in BF16": ("rest=bf16", "solver=rtn")}


@pytest.mark.parametrize("rest", REST)
@pytest.mark.parametrize("name", CASES)
def test_planned_bytes_are_written_bytes(shared: Shared, name: str, rest: str) -> None:
    if name == PASS_THROUGH and rest != "kept":
        pytest.skip("passes through whatever the recipe says")
    metadata = read_metadata(str(shared.source(name)))
    recipe = override(load_recipe("int4"), [*SETTINGS, *REST[rest]])
    planned = output_files(metadata, resolve_plan(recipe, metadata.config, metadata.index))
    out = shared.output(name, *REST[rest])
    files = list(Path(out).glob("*.safetensors"))
    assert planned["tensor_bytes"] == read_json(out / INDEX_NAME)["metadata"]["total_size"]
    assert planned["file_bytes"] == sum(file.stat().st_size for file in files)
    assert planned["shards"] == len(files)
    assert planned["largest_shard_bytes"] == max(file.stat().st_size for file in files)
