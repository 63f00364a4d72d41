"""Uploads through a Hub of the tests that fails a given share of all requests: what it takes to arrive whole.

    python -m benchmarks.upload_under_faults --rate 0.35 --seeds 20

Each seed is a new repository. An upload that ends in an error is started again, as a person would; after every call the
script checks that no state of the branch had a config or an index without all weights, and in the end every byte.
"""

import argparse
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import pytest

from kvq.checkpoint.index import INDEX_NAME
from kvq.errors import HubError
from kvq.publish.bundle import LOADABLE, Bundle, make_bundle
from kvq.publish.upload import Target, upload
from tests.hub.client import point_client
from tests.hub.faults import Faults
from tests.hub.server import Hub, serve

REPO = "owner/model"


class Lines:
    """Progress, counted and if wanted shown."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self.retries = 0

    def note(self, text: str) -> None:
        self.retries += text.startswith("attempt ")
        if self.shown:
            sys.stdout.write(f"    {text}\n")

    def sent(self, file: str, done_bytes: int, total_bytes: int) -> None:
        self.note(f"{file} sent, {done_bytes} of {total_bytes} bytes")


def make_folder(folder: Path, shards: int) -> Path:
    """Files of random bytes under a checkpoint's names: one to twenty parts each."""
    draw = random.Random(5)
    for number in range(1, shards + 1):
        (folder / f"model-{number:05d}-of-{shards:05d}.safetensors").write_bytes(draw.randbytes(draw.randrange(60_000)))
    for name in ("config.json", INDEX_NAME, "README.md", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(b"{" + b" " * draw.randrange(3000) + b"}")
    return folder


def check_states(hub: Hub, bundle: Bundle) -> None:
    for _, _, tree in hub.store.repos[REPO].history:
        if any(name in tree for name in LOADABLE):
            assert all(file.path in tree for file in bundle.early), "a half that can be loaded"


def one(bundle: Bundle, faults: Faults, home: Path, shown: bool) -> tuple[int, int, Hub]:
    """Calls that it took, retries inside them, and the Hub as it was left."""
    lines, patch, calls = Lines(shown), pytest.MonkeyPatch(), 0
    with serve(Hub(faults=faults)) as hub:
        point_client(hub, patch, home)
        while True:
            calls += 1
            try:
                upload(bundle, Target(repo=REPO), lines)
                break
            except HubError as error:
                lines.note(f"ended with: {error}")
                if REPO in hub.store.repos:
                    check_states(hub, bundle)
        patch.undo()
    check_states(hub, bundle)
    tree = hub.store.repos[REPO].history[-1][2]
    for path, file in bundle.files.items():
        assert isinstance(file.content, Path) and tree[path].data == file.content.read_bytes(), path
    return calls, lines.retries, hub


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=0.35)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--log", action="store_true", help="show every step and every retry")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)
    met, requests = Counter[str](), 0
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "folder").mkdir()
        bundle = make_bundle(make_folder(Path(place) / "folder", asked.shards))
        size = sum(file.size for file in bundle.files.values())
        sys.stdout.write(f"{len(bundle.files)} files, {size} bytes; {asked.rate:.0%} of requests fail\n")
        for seed in range(asked.seeds):
            faults = Faults(rate=asked.rate, seed=seed)
            calls, retries, hub = one(bundle, faults, Path(place) / "home", asked.log)
            met.update(faults.met)
            requests += faults.requests
            stored = sum(map(len, hub.store.contents.values()))
            sys.stdout.write(
                f"seed {seed}: {faults.met.total()} of {faults.requests} requests failed, {calls} calls, {retries} "
                f"retries of kvq's, {len(hub.store.repos[REPO].history) - 1} commits, "
                f"{hub.store.received_bytes / stored:.2f} x the content taken in: whole\n"
            )
    sys.stdout.write(f"in all {met.total()} of {requests} requests failed: {dict(met.most_common())}\n")


if __name__ == "__main__":
    main()
