"""Any number of ranks gives what one gives. Ranks are threads here (`rank_threads.py`); test_ranks.py starts processes.

With `hessian=routed` no sum over ranks is used, so everything must be equal to the bit; other rules add up second
moments in another order.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvq.calibration.kv_stats import KvStatistics, TensorStats
from kvq.checkpoint.index import load_json
from kvq.checkpoint.journal import Journal
from kvq.checkpoint.source import resolve_source
from kvq.errors import OutputError, RecipeError
from kvq.pipeline import prepare, quantize_checkpoint
from kvq.publish.kv_run import REPORT_FILE
from kvq.publish.kv_scales import SCALES_FILE
from kvq.quantize import chunks
from kvq.ranks import Ranks
from kvq.recipes.schema import Recipe, load_recipe, override
from kvq.shares import launched
from kvq.verify.checks import verify_checkpoint
from tests.checkpoint_tensors import Tensors
from tests.checkpoints import Json, read_tensors
from tests.conftest import Kvq
from tests.rank_threads import run_ranks
from tests.runs import PASS_THROUGH, SETTINGS, Quiet, Shared, manifest_of, write_calibration

EXACT = ("hessian=routed", "kv_scales=calibrate")
SOURCE = "glm-5"  # 8 experts
EXAMPLES = Path(__file__).parent.parent / "examples"
EXAMPLE = EXAMPLES / "tiny-glm-5-fp8"


def quantize_on(
    size: int, shared: Shared, out: Path, *settings: str, recipe: str = "int4", source: str = SOURCE
) -> Path:
    """Quantize on so many ranks."""
    chosen = override(load_recipe(recipe), [*SETTINGS, *settings])
    return quantize_model(size, shared.source(source), shared.calibration, out, chosen)


def quantize_model(size: int, source: Path, calibration: Path | None, out: Path, recipe: Recipe) -> Path:
    def job(ranks: Ranks) -> None:
        place = resolve_source(str(source))
        prepared = prepare(place, recipe, out, device="cpu", calibration=calibration, ranks=ranks)
        quantize_checkpoint(prepared, Quiet())

    run_ranks(size, job)
    return out


@pytest.fixture(scope="module")
def alone(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize_on(1, shared, tmp_path_factory.mktemp("alone") / "out", *EXACT)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert at a time, two at the end of a larger share: 3 ranks then have 2 chunks each of 8 experts."""
    monkeypatch.setattr(chunks, "experts_per_chunk", lambda *_: 1)


def unequal(ours: Tensors, theirs: Tensors) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(bits(ours[name]), bits(theirs[name]))]


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


def kv_differences(ours: Path, theirs: Path) -> list[str]:
    """Statistics and scales of the KV cache that are not the same to the last digit."""
    parts = [(SCALES_FILE, "layers"), (REPORT_FILE, "stored_tensors"), (REPORT_FILE, "calibration_tokens")]
    found = []
    for file, key in parts:
        one, other = load_json(ours / file)[key], load_json(theirs / file)[key]
        assert one.keys() == other.keys() and one
        found += [f"{key} of layer {layer}" for layer in one if one[layer] != other[layer]]
    return found


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("size", "kept"), [(2, 2**28), (3, 0), (3, 100_000), (3, 2**28), (4, 0), (7, 2**28)])
def test_any_number_of_ranks_gives_the_bits_of_one(
    shared: Shared, alone: Path, tmp_path: Path, size: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the inputs of all, some (one place of three here) or no down projections are kept; ranks stay in step."""
    monkeypatch.setitem(chunks.KEPT_BYTES, "cpu", kept)
    out = quantize_on(size, shared, tmp_path / "out", *EXACT)
    assert unequal(read_tensors(out), read_tensors(alone)) == []
    assert kv_differences(out, alone) == []
    assert manifest_of(out)["summary"] == manifest_of(alone)["summary"]
    report = verify_checkpoint(out, shared.source(SOURCE), lambda done, total: None)
    assert report.passed, report.failure()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("rule", ["hessian=blend", "hessian=layer"])
def test_sums_over_uneven_shares(shared: Shared, tmp_path: Path, rule: str) -> None:
    summaries = [manifest_of(quantize_on(size, shared, tmp_path / str(size), rule))["summary"] for size in (1, 3)]
    for key in ("mean_relative_weight_error", "mean_relative_output_error"):
        assert summaries[1][key] == pytest.approx(summaries[0][key], rel=0.01)


@pytest.mark.usefixtures("small_chunks")
def test_awq_on_uneven_shares(shared: Shared, tmp_path: Path) -> None:
    outs = [quantize_on(size, shared, tmp_path / str(size), "hessian=routed", recipe="int4-awq") for size in (1, 3)]
    assert unequal(*map(read_tensors, outs)) == []


@pytest.mark.slow
def test_two_ranks_lose_no_more_than_one(kvq_main: Kvq, tmp_path: Path) -> None:
    """KL to the source of a trained model: what another order of addition changes is within the standard error."""
    recipe = override(load_recipe("int4"), ["num_calibration_samples=8", "max_seq_length=128"])
    data, figures = EXAMPLES / "held-out.jsonl", []
    for size in (1, 2):
        out = quantize_model(size, EXAMPLE, None, tmp_path / str(size), recipe)
        words = ("--source", EXAMPLE, "--data", data, "--max-rows", 12, "--max-seq-length", 128, "--no-damage")
        said = kvq_main("evaluate", out, *words, "--device=cpu", "--json")
        assert said.code == 0, said.err
        figures.append(json.loads(said.out)["distance"]["figures"]["mean_kld"])
    assert 0 < figures[0]["value"] < 0.1
    assert abs(figures[0]["value"] - figures[1]["value"]) < figures[0]["error"]


def forget_a_rank(statistics: KvStatistics, ranks: Ranks) -> KvStatistics:
    whole = KvStatistics(statistics.attention)
    for part in ranks.gather(statistics.as_dict(statistics.layers))[:-1]:
        whole.load(part)
    return whole


def keep_one_s_own(statistics: KvStatistics, ranks: Ranks) -> KvStatistics:
    ranks.gather(None)
    return statistics


def add_maxima(self: TensorStats, other: TensorStats) -> None:
    self.amax_N = self.amax_N + other.amax_N if self.amax_N.shape == other.amax_N.shape else self.amax_N.max()[None]
    self.count_K = self.count_K + other.count_K


def forget_counts(self: TensorStats, other: TensorStats) -> None:
    self.amax_N = torch.maximum(self.amax_N.max(), other.amax_N.max()).reshape(1)


@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [
        (KvStatistics, "of_all", forget_a_rank),
        (KvStatistics, "of_all", keep_one_s_own),
        (TensorStats, "add", add_maxima),
        (TensorStats, "add", forget_counts),
    ],
)
def test_planted_mistakes_in_joining_statistics_are_seen(
    shared: Shared,
    alone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    mistake: object,
) -> None:
    monkeypatch.setattr(owner, name, mistake)
    assert kv_differences(quantize_on(2, shared, tmp_path / "out", *EXACT), alone)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_copying_of_what_passes_through(shared: Shared, tmp_path: Path, size: int) -> None:
    out = quantize_on(size, shared, tmp_path / "out", source=PASS_THROUGH)
    source = shared.source(PASS_THROUGH)
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    assert sorted(path.name for path in out.glob("*.safetensors")) == shards
    assert all((out / shard).read_bytes() == (source / shard).read_bytes() for shard in shards)
    assert verify_checkpoint(out, source, lambda done, total: None).passed


def test_more_ranks_than_experts_are_refused(shared: Shared, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="9 ranks for 8 experts: each needs one"):
        quantize_on(9, shared, tmp_path / "out")


def test_a_rank_that_reads_other_data_is_named(shared: Shared, tmp_path: Path) -> None:
    other = write_calibration(tmp_path / "calibration.jsonl", vocab_size=100)

    def job(ranks: Ranks) -> None:
        data = other if ranks.rank == 1 else shared.calibration
        place, recipe = resolve_source(str(shared.source(SOURCE))), override(load_recipe("int4"), SETTINGS)
        prepared = prepare(place, recipe, tmp_path / "out", device="cpu", calibration=data, ranks=ranks)
        quantize_checkpoint(prepared, Quiet())

    with pytest.raises(RecipeError, match="rank 1 has other calibration data than rank 0"):
        run_ranks(2, job)
    assert not list(tmp_path.glob("out*"))


def test_hosts_without_a_common_file_system_are_told(tmp_path: Path) -> None:
    fingerprint: Json = {"recipe": "a"}
    first, second = Journal(tmp_path / "here" / "out.partial", 0, 2), Journal(tmp_path / "there" / "out.partial", 1, 2)
    first.begin(fingerprint)
    with pytest.raises(OutputError, match=r"is not there for rank 1 on .*a file system of all hosts"):
        second.follow(fingerprint)
    first.close()


@pytest.mark.parametrize(("size", "rank", "expected"), [(None, None, (0, 1)), ("1", "0", (0, 1)), ("4", "3", (3, 4))])
def test_the_launcher_says_how_many(
    monkeypatch: pytest.MonkeyPatch, size: str | None, rank: str | None, expected: tuple[int, int]
) -> None:
    for name, value in (("WORLD_SIZE", size), ("RANK", rank)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert launched() == expected


def test_accelerate_that_starts_one_process_for_several_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert launched() == (0, 1)  # `accelerate launch` of one process
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(RecipeError, match=r"started one.*--multi_gpu"):
        launched()
