"""The cost of a run: memory by phase, time from a profile or none, and thin calibration."""

from dataclasses import replace

import pytest

from kvq.publish import run_cost as module
from kvq.publish.run_cost import coverage, estimated_time, load_profiles, memory_terms, peak_bytes, run_cost
from kvq.quantize.chunks import CHUNK_BYTES, chunk_bytes_per_expert, experts_per_chunk
from kvq.recipes.plan import QuantPlan
from kvq.recipes.schema import override
from tests.publish.test_sizing import kinds_of, plan_of


def with_settings(plan: QuantPlan, *settings: str) -> QuantPlan:
    return replace(plan, recipe=override(plan.recipe, settings))


@pytest.mark.parametrize(("model", "experts", "hidden"), [("glm-5.2", 256, 6144), ("kimi-k2", 384, 7168)])
def test_memory_is_the_largest_of_the_phases(model: str, experts: int, hidden: int) -> None:
    plan = plan_of(model)
    terms = memory_terms(plan, list(kinds_of(model)), "cuda")
    on_device = [term for term in terms if term.where == "device"]
    sums = {
        phase: sum(term.nbytes for term in on_device if term.phase in ("always", phase))
        for phase in ("forward", "solving", "output")
    }
    assert peak_bytes(terms, ("device",)) == max(sums.values())
    tokens = 512 * 2048
    of_expert = 3 * 2048 * hidden * (128 + 4) // 256  # half a byte, and 2 for each group of 128
    assert sums["output"] == tokens * hidden * (2 + 4) + experts * of_expert
    chunk = experts_per_chunk("cuda", 4096, hidden) * chunk_bytes_per_expert(4096, hidden)
    downs = 3 * experts * 2048 * 2048 * 4
    assert sums["solving"] == tokens * hidden * 2 + experts * of_expert * 2 // 3 + downs + chunk


def test_weights_that_are_no_codes_are_held_whole() -> None:
    plan, kinds = plan_of("glm-5.2"), list(kinds_of("glm-5.2"))
    codes, whole = (
        {term.what: term.nbytes for term in memory_terms(with_settings(plan, f"propagate_error={on}"), kinds, "cuda")}
        for on in ("true", "false")
    )
    for what in ("solved gate and up of all experts", "solved down of all experts"):
        assert whole[what] == codes[what] * 2 * 256 // (128 + 4)


def test_terms_of_a_run() -> None:
    plan = plan_of("glm-5.2")
    listed = memory_terms(plan, list(kinds_of("glm-5.2")), "cuda")
    terms = {term.what: term for term in listed}
    tokens, hidden = 512 * 2048, 6144
    assert terms["inputs of the experts"].nbytes == tokens * hidden * 2
    assert terms["output of the experts, float32"].nbytes == tokens * hidden * 4
    assert terms["solved gate and up of all experts"].nbytes == 256 * 2 * 2048 * hidden * 132 // 256
    assert terms["solved down of all experts"].nbytes == 256 * 2048 * hidden * 132 // 256
    assert terms["attention of a batch"].nbytes == 8 * 64 * 2048 * 2048 * 6
    cost = run_cost(plan, list(kinds_of("glm-5.2")), "cuda", 400, 700)
    assert (cost["device_bytes"], cost["disk_bytes"]) == (peak_bytes(listed, ("device",)), 1100)


def test_a_cpu_has_one_memory() -> None:
    plan, kinds = plan_of("glm-5.2"), list(kinds_of("glm-5.2"))
    cost = run_cost(plan, kinds, "cpu", 400, None)
    assert cost["device_bytes"] is None and cost["disk_bytes"] == 400
    terms = memory_terms(plan, kinds, "cpu")
    assert cost["host_bytes"] == peak_bytes(terms, ("host", "device"))
    assert {term.what: term.nbytes for term in terms}["inputs of down that are kept"] == 2**28
    shared = memory_terms(replace(plan, num_ranks=2), kinds, "cpu")
    assert {term.what: term.nbytes for term in shared}["inputs of down that are kept"] == 2**28  # of each rank
    assert "inputs of down that are kept" not in {term.what for term in memory_terms(plan, kinds, "cuda")}


def test_no_data_no_activations() -> None:
    terms = memory_terms(plan_of("glm-5.2", "int4-rtn"), list(kinds_of("glm-5.2", "int4-rtn")), "cuda")
    assert [term.what for term in terms if term.where == "device"] == [
        f"{experts_per_chunk('cuda', 4096, 6144)} experts being solved"
    ]
    assert coverage(plan_of("glm-5.2", "int4-rtn")) is None


@pytest.mark.parametrize("device", CHUNK_BYTES)
def test_a_chunk_fits_its_budget(device: str) -> None:
    count = experts_per_chunk(device, 4096, 6144)
    each = chunk_bytes_per_expert(4096, 6144)
    assert count == 1 or count * each <= CHUNK_BYTES[device] < (count + 1) * each
    assert experts_per_chunk(device, 10**6, 10**6) == 1


def test_thin_calibration_is_said() -> None:
    enough = coverage(plan_of("glm-5.2"))
    assert enough == {"tokens": 1_048_576, "mean_tokens_per_expert": 32768.0, "warning": None}
    thin = coverage(with_settings(plan_of("glm-5.2"), "num_calibration_samples=64"))
    assert thin is not None and thin["mean_tokens_per_expert"] == 4096
    assert "fewer than the 6144 columns" in thin["warning"]


def test_no_profile_no_time() -> None:
    time = estimated_time(plan_of("glm-4.7"), "cuda")
    assert time["seconds"] is None
    assert time["note"] == "no profile for this size: nobody has timed gptq on cuda with experts of 1536x5120"
    assert estimated_time(plan_of("kimi-k2.6"), "cuda")["seconds"] is None


def test_a_profile_is_scaled_by_matrices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = {
        "profile": "made-up", "date": "2026-01-01", "hardware": "a GPU", "device": "cuda", "solver": "gptq",
        "hidden_size": 6144, "moe_intermediate_size": 2048, "num_modules": 768, "tokens": 4096, "seconds": 10.0,
    }  # fmt: skip
    monkeypatch.setattr(module, "load_profiles", lambda: [profile])
    time = estimated_time(plan_of("glm-5.2"), "cuda")
    assert (time["seconds"], time["profile"]) == (760.0, "made-up")  # 76 MoE layers of 768 matrices
    assert "measured 2026-01-01 on a GPU" in time["note"] and "not by the 1048576 tokens" in time["note"]
    assert estimated_time(plan_of("glm-5.2"), "cpu")["seconds"] is None


def test_profiles_are_dated_and_sourced() -> None:
    profiles = load_profiles()
    assert profiles
    for profile in profiles:
        assert profile["profile"].startswith(profile["date"]) and profile["source"] and profile["hardware"]
        assert profile["seconds"] > 0 and profile["num_modules"] > 0 and profile["tokens"] > 0


def test_ranks_share_what_grows_with_experts_and_tokens() -> None:
    plan, kinds = plan_of("glm-5.2"), list(kinds_of("glm-5.2"))
    whole, part = (
        {term.what: term.nbytes for term in memory_terms(replace(plan, num_ranks=ranks), kinds, "cuda")}
        for ranks in (1, 3)
    )
    shared = ("inputs of the experts", "solved gate and up of all experts", "packed experts of a layer")
    for what in shared:  # the rank with most: 86 of 256 experts, 171 of 512 sequences
        assert part[what] == pytest.approx(whole[what] * (171 / 512 if what == shared[0] else 86 / 256), abs=1), what
    assert part["attention of a batch"] == whole["attention of a batch"]
    assert estimated_time(replace(plan, num_ranks=3), "cuda")["seconds"] is None
