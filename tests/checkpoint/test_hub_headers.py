"""Headers of a Hub repository by range requests: the unmodified client, in its own process, against a local Hub."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvq.checkpoint.index import INDEX_NAME, load_index
from tests.checkpoints import make_checkpoint
from tests.hub.server import Hub, serve
from tests.runs import fresh_environment

Ask = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "repository", "kimi_k2")


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """`kvq` with an empty Hub cache, pointed at a Hub."""

    def call(hub: Hub, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = fresh_environment() | {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "", "NO_PROXY": "*",
        }  # fmt: skip
        command = [sys.executable, "-m", "kvq", *arguments]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    return call


def holding(source: Path, ranges: bool = True) -> Hub:
    """A Hub with this folder as owner/name."""
    hub = Hub(ranges=ranges)
    hub.store.create("owner/name", private=False)
    hub.put_folder("owner/name", source)
    return hub


def header_sizes(source: Path) -> dict[str, int]:
    return {path.name: 8 + int.from_bytes(path.read_bytes()[:8], "little") for path in source.glob("*.safetensors")}


SETTINGS = ("--set=group_size=32", "--json")


def test_a_plan_reads_headers_and_nothing_else(source: Path, ask: Ask) -> None:
    with serve(holding(source)) as hub:
        done = ask(hub, "plan", "owner/name", *SETTINGS, "--gpus=1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["origin"], report["revision"]) == ("hub", hub.store.repos["owner/name"].branches["main"])
    index = load_index(source)
    assert report["source"]["tensors"] == len(index.tensors)
    assert report["source"]["tensor_bytes"] == index.total_bytes
    assert report["run"]["disk_source_bytes"] == index.total_bytes
    whole = {name: (source / name).stat().st_size for name in ("config.json", INDEX_NAME)}
    assert hub.sent == {**header_sizes(source), **whole}


def test_the_plan_is_that_of_the_folder(source: Path, ask: Ask) -> None:
    with serve(holding(source)) as hub:
        remote = json.loads(ask(hub, "plan", "owner/name", *SETTINGS, "--gpus=1").stdout)
        local = json.loads(ask(hub, "plan", str(source), *SETTINGS, "--gpus=1").stdout)
    for key in ("classes", "source", "output", "serving", "recipe_sha256", "warnings"):
        assert remote[key] == local[key], key


def test_a_dry_run_downloads_no_weights(source: Path, ask: Ask, tmp_path: Path) -> None:
    with serve(holding(source)) as hub:
        done = ask(hub, "quantize", "owner/name", *SETTINGS, "--dry-run")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["out"] == "name-int4-modified" and plan["source_bytes"] == load_index(source).total_bytes
    shards = header_sizes(source)
    assert {name: hub.sent[name] for name in shards} == shards
    assert not (tmp_path / "name-int4-modified").exists()


def test_a_server_without_ranges_is_left_at_once(source: Path, ask: Ask) -> None:
    with serve(holding(source, ranges=False)) as hub:
        done = ask(hub, "plan", "owner/name", *SETTINGS)
    assert done.returncode == 8
    assert "does not answer range requests" in done.stderr and "Traceback" not in done.stderr


def test_a_header_longer_than_its_file_is_not_asked_for(source: Path, ask: Ask) -> None:
    shard = min(source.glob("*.safetensors"))
    shard.write_bytes((2**40).to_bytes(8, "little") + shard.read_bytes()[8:])
    with serve(holding(source)) as hub:
        done = ask(hub, "plan", "owner/name", *SETTINGS)
    assert done.returncode == 3 and f"{shard.name}: not a whole safetensors file" in done.stderr
    assert hub.sent[shard.name] == 8


@pytest.mark.parametrize(
    ("remove", "code", "says"),
    [("config.json", 8, "has no config.json"), ("model-00002-of-000003.safetensors", 3, "1 of 3 shards are missing")],
)
def test_what_the_repository_lacks_is_named(source: Path, ask: Ask, remove: str, code: int, says: str) -> None:
    (source / remove).unlink()
    with serve(holding(source)) as hub:
        done = ask(hub, "plan", "owner/name", *SETTINGS)
    assert done.returncode == code and says in done.stderr


def test_an_unknown_repository_is_the_hubs_error(source: Path, ask: Ask) -> None:
    with serve(holding(source)) as hub:
        done = ask(hub, "plan", "owner/other", *SETTINGS)
    assert done.returncode == 8 and done.stderr.startswith("kvq: owner/other: the Hub did not deliver")
