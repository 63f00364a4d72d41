"""FP8 KV scales compared on held-out tokens: saturating ones lose, equal ones tie, and 1.0 stays unless beaten."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvq.calibration.kv_calibrate import gather_statistics
from kvq.calibration.kv_stats import KvStatistics
from kvq.calibration.whole_layer import whole_layer
from kvq.publish.kv_scales import choose_scales, scale_sets
from kvq.verify.kv_choice import ONE, KvComparison, compare_scales
from tests.calibration.models import open_runner, random_tokens
from tests.checkpoints import TINY, edit_tensor, make_checkpoint

FAMILIES = ["glm4_moe", "deepseek_v3", "glm_moe_dsa"]


def documents() -> list[Tensor]:
    return [*random_tokens(3, 20), *random_tokens(2, 9)]


def same(layers: int, scale: float) -> dict[int, dict[str, float]]:
    return {layer: {"k_scale": scale, "v_scale": scale} for layer in range(layers)}


@pytest.mark.parametrize("family", FAMILIES)
def test_saturating_scales_are_seen_end_to_end_and_in_every_layer(tmp_path: Path, family: str) -> None:
    runner = open_runner(make_checkpoint(tmp_path / "source", family, "bf16"))
    layers = runner.facts.num_layers
    sets = {ONE: same(layers, 1.0), "again": same(layers, 1.0), "small": same(layers, 1e-4)}
    found = compare_scales(runner, documents(), sets, lambda _: None)
    report = found.as_dict()
    assert report["num_documents"] == 5 and report["num_positions"] == 3 * 20 + 2 * 9
    assert torch.equal(found.kl_P[ONE], found.kl_P["again"])
    assert report["mean_kl"]["small"] > 10 * report["mean_kl"][ONE] > 0
    names = {"key", "value"} if family == "glm4_moe" else {"latent", "k_pe"}
    assert [set(row) for row in report["layers"].values()] == [names] * layers
    for tensors in report["layers"].values():
        for row in tensors.values():
            assert row[ONE]["saturated_share"] == 0 < row["small"]["saturated_share"] <= 1
            assert 0.01 < row[ONE]["relative_error"] < 0.05 < row["small"]["relative_error"]


def test_each_tensor_is_stored_under_its_own_scale(tmp_path: Path) -> None:
    runner = open_runner(make_checkpoint(tmp_path / "source", "glm4_moe", "bf16"))
    only_v = {layer: {"k_scale": 1.0, "v_scale": 1e-4} for layer in range(runner.facts.num_layers)}
    sets = {ONE: same(runner.facts.num_layers, 1.0), "v": only_v}
    rows = compare_scales(runner, documents(), sets, lambda _: None).as_dict()["layers"]["1"]
    assert rows["key"]["v"]["saturated_share"] == 0 < rows["value"]["v"]["saturated_share"]


def test_the_comparison_starts_from_the_unquantized_model(tmp_path: Path) -> None:
    """Perplexity without quantization is that of a run that has no hook at all."""
    runner = open_runner(make_checkpoint(tmp_path / "source", "glm4_moe", "bf16"))
    tokens_DS = random_tokens(2, 12)
    found = compare_scales(runner, list(tokens_DS), {ONE: same(runner.facts.num_layers, 1.0)}, lambda _: None)
    store = runner.embed(tokens_DS)
    for layer in range(runner.facts.num_layers):
        runner.run(whole_layer(runner, layer), layer, store)
    with torch.no_grad():
        logits = torch.nn.functional.linear(runner.final_norm()(store.hidden_NSH), runner.lm_head())
    log_p = logits.log_softmax(-1)[:, :-1].gather(-1, tokens_DS[:, 1:, None]).squeeze(-1)
    next_P = found.next_P["bf16"]
    torch.testing.assert_close(next_P[~next_P.isnan()].float(), log_p.reshape(-1), rtol=1e-4, atol=1e-4)


def test_calibrated_scales_win_where_one_saturates(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "source", "glm4_moe", "bf16")
    for layer in range(TINY.num_hidden_layers):
        name = f"model.layers.{layer}.self_attn"
        edit_tensor(folder, f"{name}.k_norm.weight", lambda w: w * 4096)
        edit_tensor(folder, f"{name}.q_norm.weight", lambda w: w / 4096)
    runner = open_runner(folder)
    statistics = gather_statistics(runner, random_tokens(4, 20), lambda _: None)
    comparison = compare_scales(runner, documents(), scale_sets(statistics), lambda _: None)
    choice = choose_scales(statistics, comparison)
    assert choice.chosen != ONE and "better" in choice.why
    assert choose_scales(statistics, None).chosen != ONE
    errors = comparison.as_dict()["layers"]["0"]["key"]
    assert errors[ONE]["saturated_share"] > 0.1 and errors["amax"]["relative_error"] < 0.05


def test_one_stays_without_a_significant_gain() -> None:
    """Gains by document; the first mean is above zero, but not by two standard errors."""
    one = torch.rand(400, generator=torch.Generator().manual_seed(0))
    for gains, chosen in (((0.3, -0.2, 0.3, -0.3), ONE), ((0.3, 0.2, 0.3, 0.25), "amax"), ((-0.3,) * 4, ONE)):
        kl = {ONE: one, "amax": one - torch.tensor(gains).repeat_interleave(100)}
        assert KvComparison(kl, {}, {}, [100] * 4).choose()[0] == chosen


def test_one_document_decides_nothing() -> None:
    kl = {ONE: torch.rand(50), "amax": torch.zeros(50)}
    assert KvComparison(kl, {}, {}, [50]).choose()[0] == ONE


def test_errors_are_those_of_document_sums() -> None:
    """A shift shared by a document's positions counts once: four documents of equal values are four values."""
    value_P = torch.tensor([0.0, 1.0, 2.0, 5.0]).repeat_interleave(10)
    comparison = KvComparison({}, {}, {}, [10] * 4)
    expected = torch.tensor([0.0, 1.0, 2.0, 5.0]).std() / 2
    assert comparison._error(value_P) == pytest.approx(float(expected))


def test_without_held_out_data_equal_errors_leave_one() -> None:
    statistics = KvStatistics("gqa")
    x = torch.randn(1, 2, 500, 16, generator=torch.Generator().manual_seed(1))
    for name in ("key", "value"):
        statistics.observe(0, name, x)
    choice = choose_scales(statistics, None)
    assert choice.chosen == ONE and "no held-out data" in choice.why
