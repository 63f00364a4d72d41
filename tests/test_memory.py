"""Twice the layers, the same memory: a run holds one layer, whatever the model has."""

import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvq.checkpoint.source import Source
from kvq.pipeline import prepare, quantize_checkpoint
from kvq.recipes.schema import Recipe
from tests.checkpoints import TINY, make_checkpoint
from tests.runs import CALIBRATION, Quiet, fresh_environment, write_calibration

# 16 experts a layer: 6.3 MB in BF16, 3.1 MB as stored. Three layers more are 9 MB at the very least, had they been
# kept in either form, of some 50 MB that a run adds.
LAYER = replace(TINY, hidden_size=256, moe_intermediate_size=256, n_routed_experts=16, first_k_dense_replace=0)
# Large blocks go back to the system when they are freed, or the allocator's reserve would be measured.
EXACT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are reset through Linux's /proc")
def test_peak_memory_does_not_grow_with_layers(tmp_path: Path) -> None:
    for name, layers in (("warm-up", 1), ("some", 3), ("twice", 6)):
        make_checkpoint(tmp_path / name, "kimi_k2", dims=replace(LAYER, num_hidden_layers=layers))
    write_calibration(tmp_path / CALIBRATION)
    command = [sys.executable, "-m", "tests.measure_memory", str(tmp_path), "warm-up", "some", "twice"]
    environment = fresh_environment()
    done = subprocess.run(
        command, cwd=environment["PYTHONPATH"], env=environment | EXACT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    added = json.loads(done.stdout)
    assert 10e6 < added["some"] < 200e6  # something was measured
    assert added["twice"] < 1.06 * added["some"], added  # a tenth is what is promised; it varies by two percent


class LiveTensors(Quiet):
    """Bytes of all tensors that Python can reach when a layer is done."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []

    def layer_done(self, layer: int, num_layers: int) -> None:
        gc.collect()
        storages = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) is torch.Tensor]
        self.nbytes.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))


def test_no_tensor_outlives_its_layer(tmp_path: Path) -> None:
    """Exact where the test above is not: small things are lost in what the allocator holds back."""
    name, live = "six", LiveTensors()
    make_checkpoint(tmp_path / name, "kimi_k2", dims=replace(TINY, num_hidden_layers=6))
    data = write_calibration(tmp_path / CALIBRATION)
    recipe = Recipe(name="r", group_size=32, num_calibration_samples=8, max_seq_length=64)
    prepared = prepare(Source(tmp_path / name, name), recipe, tmp_path / "out", device="cpu", calibration=data)
    quantize_checkpoint(prepared, live)
    assert len(live.nbytes) == 6 and live.nbytes[-1] > 8 * 64 * 64 * 4  # the activations, at least
    assert live.nbytes[1:] == [live.nbytes[1]] * 5
