"""FP8 KV caches: codes against a table of e4m3 values, scales against the engines' formulas, a wrong scale named.

Shape suffixes: T = tokens, D = width.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kvq.calibration.e4m3 import through_e4m3
from kvq.checkpoint.architecture import model_facts
from kvq.checkpoint.index import load_json
from kvq.errors import RecipeError
from kvq.verify.kv_simulation import (
    KvSimulation,
    hadamard,
    load_kv_scales,
    make_simulation,
    quantize_index_key,
    quantize_latent_groups,
)
from tests.runs import Shared
from tests.verify.comparison import compare

# Every e4m3 value: 2^-9 steps below 2^-6, then eight steps for each power of two up to 448 (480 is NaN).
E4M3 = np.array(
    sorted({s * v for s in (-1, 1) for v in [k * 2.0**-9 for k in range(8)]
            + [(1 + k / 8) * 2.0**e for e in range(-6, 9) for k in range(8) if (e, k) != (8, 7)]})
)  # fmt: skip


def nearest(x: float) -> float:
    """The closest e4m3 value, the one with an even code at a tie, and the largest beyond all."""
    distance = np.abs(E4M3 - x)
    best = np.flatnonzero(distance == distance.min())
    even = [i for i in best if torch.tensor(E4M3[i]).to(torch.float8_e4m3fn).view(torch.uint8).item() % 2 == 0]
    return float(E4M3[even[0] if len(best) > 1 else best[0]])


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.013])
def test_codes_equal_the_table(scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(300, generator=draw) * 30 * scale, torch.tensor([0.0, 1e-9, -1e5, 448 * scale, 3e4])])
    expected = [nearest(float(value) / scale) * scale for value in x]
    found = through_e4m3(x.double().float(), scale)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_latent_groups_have_own_scales() -> None:
    """amax / 448 for each token and 128 channels: the largest of each group comes back as it was."""
    draw = torch.Generator().manual_seed(0)
    latent_TD = torch.randn(3, 256, generator=draw) * torch.tensor([1e-3] * 128 + [1e3] * 128)
    read_TD = quantize_latent_groups(latent_TD)
    for group in (slice(0, 128), slice(128, 256)):
        part, back = latent_TD[:, group], read_TD[:, group]
        where = part.abs().argmax(1, keepdim=True)
        torch.testing.assert_close(back.gather(1, where), part.gather(1, where), rtol=1e-6, atol=0)
        assert ((back - part).abs() <= part.abs() / 16 + part.abs().amax(1, keepdim=True) / 448 * 2**-10 * 1.01).all()
    assert torch.equal(quantize_latent_groups(torch.zeros(2, 32)), torch.zeros(2, 32))


def test_index_keys_are_rotated_and_have_a_power_of_two() -> None:
    """One key by hand: rotation, amax / 448 rounded up to a power of two, codes, and back."""
    key = torch.tensor([[4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1000.0]])
    h = hadamard(8)
    torch.testing.assert_close(h @ h, torch.eye(8))
    torch.testing.assert_close(h.abs(), torch.full((8, 8), 8**-0.5))
    rotated = (key @ h)[0].tolist()
    scale = 2.0 ** math.ceil(math.log2(max(map(abs, rotated)) / 448))
    expected = torch.tensor([[nearest(value / scale) * scale for value in rotated]]) @ h
    torch.testing.assert_close(quantize_index_key(key), expected, rtol=1e-5, atol=1e-4)
    assert abs(float(quantize_index_key(key)[0, 0]) - 4.0) > 0.01  # without rotation it would be exact
    with pytest.raises(RecipeError, match="index_head_dim 12 is no power of two"):
        hadamard(12)


def test_account_of_what_was_stored() -> None:
    simulation = KvSimulation("fp8_e4m3", {0: (1.0, 0.5)})
    simulation(0, "value", torch.tensor([[300.0, 100.0, 1e-6, 0.0]]))  # 224 is the largest that 0.5 holds
    (row,) = simulation.rows()
    assert (row["layer"], row["tensor"], row["scale"], row["amax"]) == (0, "value", 0.5, 300.0)
    assert (row["saturated_share"], row["underflow_share"]) == (0.25, 0.25)
    stored = nearest(200.0) * 0.5
    error = math.sqrt((76**2 + (stored - 100) ** 2 + 1e-12) / (300**2 + 100**2))
    assert row["relative_error"] == pytest.approx(error, rel=1e-6)
    simulation.counting = False
    simulation(0, "value", torch.full((1, 4), 1e6))
    assert simulation.rows() == [row]


@pytest.mark.parametrize("name", ["glm-5", "glm-4.7", "kimi-k2"])
def test_a_wrong_scale_is_named(shared: Shared, tmp_path: Path, name: str) -> None:
    """One layer's scale a thousand times too small: it saturates, and its layer is the worst."""
    source = shared.source(name)
    rows = {str(layer): {"k_scale": 0.02, "v_scale": 0.02} for layer in range(3)}
    rows["1"] = {"k_scale": 2e-5, "v_scale": 2e-5}
    scales = tmp_path / "scales.json"
    scales.write_text(json.dumps({"layers": rows}))
    found = compare(source, source, shared.calibration, rows=3, length=40, kv_dtype="fp8_e4m3", kv_scales=scales)
    assert found.kv is not None and found.damage is not None
    assert found.damage["worst"]["layers"][0]["layer"] == 1
    by_error = sorted(found.kv, key=lambda row: -row["relative_error"])
    assert by_error[0]["layer"] == 1 and by_error[0]["saturated_share"] > 0.9
    sound = compare(source, source, shared.calibration, rows=3, length=40, kv_dtype="fp8_e4m3")
    assert 0 < sound.figures.mean_kld.value < 0.2 * found.figures.mean_kld.value
    assert sound.kv is not None and max(row["relative_error"] for row in sound.kv) < 0.05
    expected = {"glm-5": {"latent", "k_pe", "index_key"}, "glm-4.7": {"key", "value"}, "kimi-k2": {"latent", "k_pe"}}
    assert {row["tensor"] for row in sound.kv} == expected[name]
    assert {row["layer"] for row in sound.kv} == {0, 1, 2}


def test_stored_once_whether_damage_is_measured_or_not(shared: Shared) -> None:
    """The damage report runs every layer twice; the account is of the model's own pass."""
    source = shared.source("glm-4.7")
    first, second = (
        compare(source, source, shared.calibration, rows=2, length=20, kv_dtype="fp8_e4m3", damage=damage)
        for damage in (True, False)
    )
    assert first.kv == second.kv and first.figures == second.figures


def test_ds_mla_is_finer_than_a_static_scale(shared: Shared) -> None:
    """k_pe is kept in BF16 and the latent has a scale for each token; other attention has no such layout."""
    source = shared.source("glm-5")
    static, dynamic = (
        compare(source, source, shared.calibration, rows=2, length=40, kv_dtype=dtype).kv
        for dtype in ("fp8_e4m3", "fp8_ds_mla")
    )
    assert static is not None and dynamic is not None
    for ours, theirs in zip(static, dynamic, strict=True):
        assert (ours["layer"], ours["tensor"]) == (theirs["layer"], theirs["tensor"])
        assert theirs["scale"] is None
        if ours["tensor"] == "k_pe":
            assert theirs["relative_error"] < 0.005 < ours["relative_error"]
    facts = model_facts(load_json(shared.source("kimi-k2") / "config.json"), Path("x"))
    with pytest.raises(RecipeError, match="fp8_ds_mla is a layout of DSA; Kimi K2 takes fp8_e4m3"):
        make_simulation("fp8_ds_mla", None, facts)


def test_scales_of_sglang_s_own_file(shared: Shared, tmp_path: Path) -> None:
    facts = model_facts(load_json(shared.source("kimi-k2") / "config.json"), Path("x"))
    file = tmp_path / "kv.json"
    factors = {"0": {str(layer): 0.5 + layer for layer in range(facts.num_layers)}}
    file.write_text(json.dumps({"model_type": "x", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": factors}}))
    assert load_kv_scales(file, facts) == {layer: (0.5 + layer, 0.5 + layer) for layer in range(facts.num_layers)}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "neither `layers` nor SGLang's"),
        ({"layers": {"0": {"k_scale": 1.0, "v_scale": 1.0}}}, "layer 1 has the scales"),
        ({"layers": {str(n): {"k_scale": 1.0, "v_scale": -1} for n in range(3)}}, "needs positive numbers"),
        ({"layers": {str(n): {"k_scale": True, "v_scale": 1} for n in range(3)}}, "needs positive numbers"),
        ({"layers": {str(n): {"k_scale": 1.0, "v_scale": 2.0} for n in range(3)}}, "stores one latent"),
    ],
)
def test_scales_that_do_not_fit(shared: Shared, tmp_path: Path, content: object, says: str) -> None:
    facts = model_facts(load_json(shared.source("kimi-k2") / "config.json"), Path("x"))
    file = tmp_path / "kv.json"
    file.write_text(json.dumps(content))
    with pytest.raises(RecipeError, match=says):
        load_kv_scales(file, facts)
