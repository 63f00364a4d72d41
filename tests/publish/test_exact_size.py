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


@pytest.mark.parametrize(
    ("name", "rest"), [(name, rest) for name in CASES for rest in REST if name != PASS_THROUGH or rest == "kept"]
)
def test_planned_bytes_are_written_bytes(shared: Shared, name: str, rest: str) -> None:
    metadata = read_metadata(str(shared.source(name)))
    recipe = override(load_recipe("int4"), [*SETTINGS, *REST[rest]])
    planned = output_files(metadata, resolve_plan(recipe, metadata.config, metadata.index))
    out = shared.output(name, *REST[rest])
    files = list(Path(out).glob("*.safetensors"))
    assert planned["tensor_bytes"] == read_json(out / INDEX_NAME)["metadata"]["total_size"]
    assert planned["file_bytes"] == sum(file.stat().st_size for file in files)
    assert planned["shards"] == len(files)
    assert planned["largest_shard_bytes"] == max(file.stat().st_size for file in files)
