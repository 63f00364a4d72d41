"""Statistics of the KV cache: against plain float64 formulas, exact when merged, and no scale where there is none.

Shape suffixes: B = sequences, N = heads, S = tokens, D = width.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.calibration.e4m3 import E4M3_MAX, through_e4m3
from kvq.calibration.kv_calibrate import gather_statistics
from kvq.calibration.kv_stats import VARIANTS, KvStatistics, TensorStats
from kvq.errors import CalibrationError
from kvq.ranks import Ranks
from tests.calibration.models import open_runner, random_tokens
from tests.checkpoints import TINY, make_checkpoint, read_json, read_tensors

LENGTH = 24


def values(seed: int = 0) -> Tensor:
    """[2, 3, 40, 16] with one outlier in the last head."""
    x = torch.randn(2, 3, 40, 16, generator=torch.Generator().manual_seed(seed)) * 2
    x[1, 2, 7, 3] = -300.0
    return x


def exact_error(x: Tensor, scale: float) -> float:
    kept = (x.double() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
    return float(((kept - x.double()).square().sum() / x.double().square().sum()).sqrt())


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate_halves(x_SD: Tensor, theta: float) -> Tensor:
    """Rotary embedding of a whole row whose first half pairs with its second."""
    half = x_SD.shape[1] // 2
    angle = torch.arange(x_SD.shape[0]).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    first, second = x_SD[:, :half], x_SD[:, half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], 1)


class FirstLayer:
    """Layer 0 in float64, straight from the tensors: what it would store for one sequence."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = read_json(folder / "config.json")
        self.tensors = {name: value.double() for name, value in read_tensors(folder).items()}
        self.eps = self.config["rms_norm_eps"]
        rope = self.config.get("rope_parameters") or {}
        self.theta = float(rope.get("rope_theta", self.config.get("rope_theta", 10000.0)))

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"model.layers.0.{name}"]

    def hidden(self, tokens_S: Tensor) -> Tensor:
        embedded = self.tensors["model.embed_tokens.weight"][tokens_S]
        return rms(embedded, self.weight("input_layernorm.weight"), self.eps)

    def grouped(self, tokens_S: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [N, S, D]."""
        hidden, width = self.hidden(tokens_S), self.config["head_dim"]
        key, value = (
            (hidden @ self.weight(f"self_attn.{n}_proj.weight").T + self.weight(f"self_attn.{n}_proj.bias"))
            .view(len(tokens_S), -1, width).transpose(0, 1) for n in "kv"
        )  # fmt: skip
        key = rms(key, self.weight("self_attn.k_norm.weight"), self.eps)
        turned = int(width * self.config["partial_rotary_factor"])
        rotated = [torch.cat([rotate_halves(head[:, :turned], self.theta), head[:, turned:]], 1) for head in key]
        return torch.stack(rotated), value

    def latent(self, tokens_S: Tensor) -> tuple[Tensor, Tensor]:
        """Latent and k_pe, whose pairs are neighbours; the order within a row does not matter to a maximum."""
        joined = self.hidden(tokens_S) @ self.weight("self_attn.kv_a_proj_with_mqa.weight").T
        latent, k_pe = torch.split(joined, [self.config["kv_lora_rank"], self.config["qk_rope_head_dim"]], dim=-1)
        paired = torch.cat([k_pe[:, 0::2], k_pe[:, 1::2]], 1)
        # transformers' own norm of the latent has a fixed epsilon
        return rms(latent, self.weight("self_attn.kv_a_layernorm.weight"), 1e-6), rotate_halves(paired, self.theta)


@pytest.mark.parametrize(("family", "names"), [
    ("glm4_moe", ("key", "value")), ("deepseek_v3", ("latent", "k_pe")), ("glm_moe_dsa", ("latent", "k_pe")),
])  # fmt: skip
def test_maxima_are_those_of_a_plain_forward(tmp_path: Path, family: str, names: tuple[str, str]) -> None:
    folder = make_checkpoint(tmp_path / "source", family, "bf16")
    runner, tokens_NS = open_runner(folder), random_tokens(3, LENGTH)
    statistics = gather_statistics(runner, tokens_NS, lambda _: None)
    first = FirstLayer(folder)
    stored = [first.grouped(t) if family == "glm4_moe" else first.latent(t) for t in tokens_NS]
    for index, name in enumerate(names):
        expected = torch.stack([pair[index] for pair in stored]).abs()
        found = statistics.tensors[0][name]
        heads = expected.amax(dim=(0, 2, 3)) if family == "glm4_moe" else expected.amax().reshape(1)
        torch.testing.assert_close(found.amax_N.double(), heads, rtol=1e-5, atol=0)
        assert found.num_values == expected.numel()
    joined = max(statistics.tensors[0][name].amax for name in names)
    if family != "glm4_moe":
        assert statistics.scale(0, "k_scale", "amax") == statistics.scale(0, "v_scale", "amax")
        assert statistics.scale(0, "k_scale", "amax") == pytest.approx(joined / 448, rel=1e-6)


def test_every_layer_is_seen_the_draft_layer_and_the_indexer_too(tmp_path: Path) -> None:
    runner = open_runner(make_checkpoint(tmp_path / "source", "glm_moe_dsa", "bf16"))
    for length in (LENGTH, TINY.index_topk + 8):  # with the indexer replaced, and with it at work
        statistics = gather_statistics(runner, random_tokens(2, length), lambda _: None)
        assert statistics.layers == list(range(runner.facts.num_layers + runner.facts.num_mtp_layers))
        with_key = [layer for layer in statistics.layers if "index_key" in statistics.tensors[layer]]
        assert with_key == [i for i, kind in enumerate(runner.config.indexer_types) if kind == "full"]
        seen = statistics.tensors[0]["index_key"].num_values
        assert seen == 2 * length * TINY.index_head_dim


def test_the_indexers_key_is_the_same_whether_it_is_at_work_or_not(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "source", "glm_moe_dsa", "bf16")
    tokens_NS = random_tokens(2, LENGTH)
    at_rest, at_work = open_runner(folder), open_runner(folder)
    at_work.config.index_topk = LENGTH - 1
    found = [gather_statistics(runner, tokens_NS, lambda _: None).tensors[0] for runner in (at_rest, at_work)]
    torch.testing.assert_close(found[0]["index_key"].amax_N, found[1]["index_key"].amax_N, rtol=1e-6, atol=0)


def test_merging_gives_exactly_what_one_pass_gives() -> None:
    """Batches, ranks, a run that went on: maxima and counts are those of all tokens, not an average of them."""
    parts = [values(seed) * (seed + 1) for seed in range(3)]
    whole, ranks = KvStatistics("gqa"), [KvStatistics("gqa") for _ in parts]
    for x, rank in zip(parts, ranks, strict=True):
        for name in ("key", "value"):
            whole.observe(0, name, x)
            rank.observe(0, name, x)

    class Everybody(Ranks):
        def gather(self, value: Any) -> list[Any]:
            others = [rank.as_dict(rank.layers) for rank in ranks[1:]]
            return list(json.loads(json.dumps([value, *others])))

    merged = ranks[0].of_all(Everybody(0, len(ranks)))
    for name in ("key", "value"):
        assert torch.equal(merged.tensors[0][name].amax_N, whole.tensors[0][name].amax_N)
        assert torch.equal(merged.tensors[0][name].count_K, whole.tensors[0][name].count_K)
    everything = torch.cat(parts)
    assert whole.tensors[0]["key"].amax_N.tolist() == everything.abs().amax(dim=(0, 2, 3)).tolist()


def test_joining_leaves_the_parts_as_they_are() -> None:
    statistics = KvStatistics("mla")
    for seed, name in enumerate(("latent", "k_pe")):
        statistics.observe(0, name, values(seed))
    before = statistics.as_dict([0])
    assert statistics.part(0, "k_scale").num_values == 2 * values().numel()
    assert statistics.as_dict([0]) == before


@pytest.mark.parametrize("scale", [4.0, 1.0, 0.3, 0.01])
def test_errors_from_the_counts_are_those_of_the_values(scale: float) -> None:
    """From many values, as none of them says where in its bin it lies; 0.3 and less saturate."""
    x = 120 * torch.randn(2, 1, 4000, 16, generator=torch.Generator().manual_seed(3))
    assert TensorStats.of(x).relative_error(scale) == pytest.approx(exact_error(x, scale), rel=0.01)


def test_the_least_error_is_found() -> None:
    x = values() / 300
    found = TensorStats.of(x).min_error_scale()
    base = float(x.abs().max()) / 448
    least = min(exact_error(x, base * 2 ** (step / 32)) for step in range(-128, 33))
    assert exact_error(x, found) <= 1.05 * least
    assert exact_error(x, found) < exact_error(x, 1.0)


def test_shares_and_percentiles() -> None:
    x = torch.cat([torch.full((1, 1, 99, 1), 3.0), torch.full((1, 1, 1, 1), 449.0)], dim=2)
    stats = TensorStats.of(x)
    assert stats.share_above(448.0) == pytest.approx(0.01)
    assert stats.share_above(449.5) == 0
    assert 3.0 <= stats.percentile(90) <= 3.0 * (1 + 1 / 32)
    assert stats.percentile(100) == 449.0
    small = TensorStats.of(torch.tensor([0.0, 2.0**-11, 1.0, 1.0]).reshape(1, 1, 4, 1))
    assert small.share_lost(1.0) == pytest.approx(0.25)  # the zero was none to lose


def test_stored_values_are_clamped_and_read_in_float32() -> None:
    read = through_e4m3(torch.tensor([1e4, -1e4, 1.0], dtype=torch.bfloat16), 2.0)
    assert read.tolist() == [896.0, -896.0, 1.0] and read.dtype == torch.float32


@pytest.mark.parametrize("left_out", ["latent", "k_pe"])
def test_a_latent_without_its_rotated_key_has_no_scale(left_out: str) -> None:
    statistics = KvStatistics("mla")
    for name in {"latent", "k_pe"} - {left_out}:
        statistics.observe(0, name, values())
    with pytest.raises(CalibrationError, match=f"saw no {left_out}"):
        statistics.scale(0, "k_scale", "amax")


@pytest.mark.parametrize("larger", ["latent", "k_pe"])
def test_latent_and_rotated_key_share_the_scale_of_the_larger(larger: str) -> None:
    statistics = KvStatistics("mla")
    for name in ("latent", "k_pe"):
        statistics.observe(0, name, torch.full((1, 1, 4, 8), 896.0 if name == larger else 1.0))
    assert statistics.scale(0, "k_scale", "amax") == statistics.scale(0, "v_scale", "amax") == 2.0


def test_a_layer_without_data_has_no_scale() -> None:
    with pytest.raises(CalibrationError, match="layer 5 saw no key"):
        KvStatistics("gqa").scale(5, "k_scale", "amax")


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_scale_of_what_is_not_finite_or_all_zero(bad: float, variant: str) -> None:
    statistics = KvStatistics("gqa")
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 2, 1] = bad
    statistics.observe(0, "key", x)
    with pytest.raises(CalibrationError, match="scale cannot be made"):
        statistics.scale(0, "k_scale", variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_scales_are_positive_even_of_the_smallest_values(variant: str) -> None:
    statistics = KvStatistics("gqa")
    statistics.observe(0, "key", torch.full((1, 1, 2, 2), 1e-38))
    assert 0 < statistics.scale(0, "k_scale", variant) < 1e-37


def test_the_scale_is_the_maximum_over_448() -> None:
    statistics = KvStatistics("gqa")
    statistics.observe(0, "key", values())
    statistics.observe(0, "key", values() / 100)  # a later, smaller batch does not lower it
    assert statistics.scale(0, "k_scale", "amax") == pytest.approx(300 / E4M3_MAX, rel=1e-7)
