"""`kvq serve-config`: sizes that break groups are refused, memory adds up, and a pair of roles fits together."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvq.checkpoint.facts import known_checkpoint, published_index
from kvq.errors import RecipeError
from kvq.publish import sglang_config
from kvq.publish.gpus import find_gpu
from kvq.publish.parallel import Parallel
from kvq.publish.plan_report import output_kinds
from kvq.publish.serve import ServeRequest, Serving, default_serving, make_serving
from kvq.publish.served import Served, served_from_folder, served_from_plan, served_name
from kvq.publish.serving_memory import FLOOR, GIB, MIB, reserve_bytes
from kvq.recipes.plan import resolve_plan
from kvq.recipes.schema import load_recipe
from tests.conftest import Kvq
from tests.runs import Shared

GLM47_TEMPLATE = "{{- '<tool_call>' + tc.name -}}<think>"


@cache
def planned(alias: str) -> Served:
    known = known_checkpoint(alias)
    plan = resolve_plan(load_recipe("int4"), known.config, published_index(known))
    return served_from_plan(plan, output_kinds(plan), Path("nowhere"), known.config, f"{alias}-int4")


def served(alias: str, recipe: str = "int4") -> Served:
    """With the recipe's groups; a plan of a hundred thousand tensors takes seconds, so there is one for each model."""
    base = planned(alias)
    return replace(base, cut=replace(base.cut, expert_step=load_recipe(recipe).group_size))


def serving(alias: str, recipe: str = "int4", **fields: object) -> Serving:
    return make_serving(served(alias, recipe), ServeRequest(**{"integrity": "none", **fields}))  # type: ignore[arg-type]


def settings(alias: str, recipe: str = "int4", **fields: object) -> sglang_config.Settings:
    return serving(alias, recipe, **fields).configs[0].settings


def test_golden_settings_of_glm_5_2() -> None:
    assert settings("glm-5.2", kv_dtype="fp8_e4m3") == {
        "model-path": ".", "served-model-name": "glm-5.2-int4", "tp-size": 8, "ep-size": 1,
        "mem-fraction-static": 0.887, "max-total-tokens": 1344384, "chunked-prefill-size": 8192,
        "max-running-requests": 128, "kv-cache-dtype": "fp8_e4m3", "page-size": 64,
        "dsa-prefill-backend": "flashmla_kv", "dsa-decode-backend": "flashmla_kv",
        "quantization": "compressed-tensors", "moe-runner-backend": "marlin", "moe-a2a-backend": "none",
        "disable-shared-experts-fusion": True, "tool-call-parser": "glm47", "reasoning-parser": "glm45",
        "speculative-algorithm": "EAGLE", "speculative-num-steps": 3, "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": 4, "enable-metrics": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("alias", "recipe", "gpus", "tp", "ep", "chosen"),
    [
        ("glm-5.2", "int4", 8, None, None, Parallel(8, 1)),
        ("glm-4.7", "int4-g64", 8, None, None, Parallel(8, 1)),
        ("glm-4.7", "int4", 8, None, None, Parallel(8, 2)),  # 1536/8 = 192 is no multiple of 128, 1536/4 is
        ("glm-4.7", "int4", 8, 4, None, Parallel(4, 1)),
        ("kimi-k2", "int4", 16, None, None, Parallel(16, 1)),
        ("kimi-k2", "int4", 16, None, 16, Parallel(16, 16)),
    ],
)
def test_sizes(alias: str, recipe: str, gpus: int, tp: int | None, ep: int | None, chosen: Parallel) -> None:
    assert serving(alias, recipe, gpus=gpus, tp=tp, ep=ep).configs[0].deployment.parallel == chosen


def test_a_size_that_cuts_groups_is_refused_with_those_that_work() -> None:
    with pytest.raises(RecipeError, match=r"1536/8 = 192 columns: no whole groups of 128.*8 x 2") as refused:
        serving("glm-4.7", "int4", ep=1)
    assert "8 x 1" not in str(refused.value).partition("work with")[2]


def test_blocks_of_the_shared_experts_count() -> None:
    """GLM-5.2 at 32 GPUs: 2048/32 = 64 columns of a shared expert are half a block, whatever EP does."""
    with pytest.raises(RecipeError, match="shared experts: 2048/32 = 64 columns"):
        serving("glm-5.2", "int4-g32", gpus=32, ep=32)


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("version", ["0.5.17", "0.5.20", "0.5.23"])
def test_a_pair_agrees_on_the_cache(dtype: str, version: str) -> None:
    both = serving("glm-5.2", roles=("prefill", "decode"), kv_dtype=dtype, version=version).configs
    keys = ("kv-cache-dtype", "page-size", "disaggregation-transfer-backend", "disaggregation-enable-kv-checksum")
    backends = [key for key in both[0].settings if key.endswith(("-prefill-backend", "-decode-backend"))]
    assert len(backends) == 2 and backends[0].startswith("nsa" if version == "0.5.17" else "dsa")
    for key in (*keys, *backends):
        assert both[0].settings.get(key) == both[1].settings.get(key)
    assert both[0].settings.get("disaggregation-enable-kv-checksum", False) is (version == "0.5.23")
    assert [config.settings["disaggregation-mode"] for config in both] == ["prefill", "decode"]
    assert "disaggregation-bootstrap-port" in both[0].settings
    assert "disaggregation-bootstrap-port" not in both[1].settings


def test_auto_is_a_literal_name() -> None:
    """SGLang compares the names of two roles as text, and its own `auto` depends on version, model and GPU."""
    assert settings("glm-5.2")["kv-cache-dtype"] == settings("kimi-k2")["kv-cache-dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("gpu", "version", "recipe", "runner", "decode"),
    [
        ("h200", "0.5.23", "int4", "marlin", "fa3"),
        ("b200", "0.5.23", "int4", "triton", "trtllm"),
        ("b200", "0.5.23", "int4-g64", "marlin", "trtllm"),
        ("b200", "0.5.17", "int4", "marlin", "trtllm"),
    ],
)
def test_kernels_by_gpu_and_version(gpu: str, version: str, recipe: str, runner: str, decode: str) -> None:
    found = settings("glm-5.2", recipe, gpu=gpu, version=version)
    assert found["moe-runner-backend"] == runner
    assert found["nsa-decode-backend" if version == "0.5.17" else "dsa-decode-backend"] == decode


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpu": "mi300x"}, "for h100, h200, b200, b200-192 only"),
        ({"version": "0.5.24"}, "0.5.17, 0.5.18"),
        ({"context": 2**21}, "the model's config allows 1048576"),
        ({"gpus": 2}, "less than one prefill step"),
        ({"integrity": "kv-canary"}, "knows no DSA pool"),
    ],
)
def test_what_would_not_start_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)):
        serving("glm-5.2", **fields)


@pytest.mark.parametrize(("alias", "installed", "chosen"), [
    ("glm-4.7", False, "kv-canary"), ("glm-5.2", False, "none"), ("kimi-k2", False, "none"),
    ("glm-4.7", True, "kvq page tags"), ("kimi-k2", True, "kvq page tags"),
])  # fmt: skip
def test_the_strongest_check_that_starts(
    monkeypatch: pytest.MonkeyPatch, alias: str, installed: bool, chosen: str
) -> None:
    monkeypatch.setattr(sglang_config, "page_tags_installed", lambda: installed)
    (config,) = serving(alias, "int4-g64", integrity="auto").configs
    assert config.integrity.name == chosen and config.integrity.reason
    assert ("kv-canary" in config.settings) == (chosen == "kv-canary")
    tags = {"KVQ_KV_TAGS": "abort", "KVQ_KV_TAGS_SWEEP_SECONDS": "60"} if installed else {}
    assert dict(config.environment) == tags


def test_memory_adds_up() -> None:
    """Weights, cache and reserve fill the GPU: the reserve's terms as SGLang states them."""
    memory = serving("glm-5.2").configs[0].memory
    assert reserve_bytes(Parallel(8), "single") == 512 * MIB + 8192 * 3 * MIB // 2 + GIB + 256 * MIB + GIB
    assert reserve_bytes(Parallel(1), "decode") == FLOOR + GIB
    used = memory.weights + memory.max_total_tokens * memory.kv_bytes_per_token
    static = memory.gpu_bytes * memory.mem_fraction
    assert 0 <= static - used < 64 * memory.kv_bytes_per_token + 1
    assert memory.gpu_bytes - memory.reserve - static < memory.gpu_bytes / 1000
    layers = served("glm-5.2").facts.num_layers
    assert (
        memory.kv_bytes_per_token == (78 * 576 * 2 + 21 * 132) * (layers + 1) // layers
    )  # one more for the draft layer


def test_a_decode_gpu_has_more_room() -> None:
    one, other = serving("glm-5.2", roles=("single", "decode")).configs
    assert other.memory.max_total_tokens > one.memory.max_total_tokens


@pytest.mark.parametrize(
    ("alias", "template", "tool_call", "reasoning"),
    [
        ("glm-4.7", "{{ '<tool_call>' + tc.name }}\n<think>", "glm47", "glm45"),
        ("glm-4.7", "<tool_call>{{ c.name }}\n", "glm45", None),
        ("glm-5.2", GLM47_TEMPLATE, "glm47", "glm45"),
        ("kimi-k2", "<|im_user|>", "kimi_k2", None),
        ("kimi-k2", "<think>", "kimi_k2", "kimi_k2"),
    ],
)
def test_parsers_by_template(alias: str, template: str, tool_call: str, reasoning: str | None) -> None:
    parsers = replace(served(alias, "int4-g64"), template=template).parsers
    assert (parsers.tool_call, parsers.reasoning) == (tool_call, reasoning)


@pytest.mark.parametrize(("alias", "template", "start"), [
    ("glm-4.7", "<tool_call>{{ c.name }}\n", "env VLLM_ENFORCE_STRICT_TOOL_CALLING=0 vllm serve"),
    ("glm-4.7", GLM47_TEMPLATE, "vllm serve"), ("kimi-k2", "", "vllm serve"),
])  # fmt: skip
def test_vllm_does_not_force_the_newer_format_of_calls_on_older_models(alias: str, template: str, start: str) -> None:
    model = replace(served(alias, "int4-g64"), template=template)
    assert make_serving(model, ServeRequest(integrity="none")).as_dict()["vllm"].startswith(f"{start} . ")


def test_the_yaml_is_flat_and_reads_back_as_it_was_meant() -> None:
    import yaml

    made = serving("glm-5.2", roles=("single", "prefill", "decode"))
    for config in made.configs:
        text = made.texts[f"sglang-{config.deployment.role}.yaml"]
        assert yaml.safe_load(text) == config.settings
        assert not [key for key in config.settings if "_" in key]
    assert "launch_router --pd-disaggregation" in made.texts["NOTES.md"]


def test_an_fp8_source_is_served_for_prefill(shared: Shared) -> None:
    found = served_from_folder(shared.source("kimi-k2"))
    assert found.experts == "FP8" and found.cut.expert_step == 32 and found.cut.rest_block == 32
    (config,) = make_serving(found, ServeRequest(gpus=1, roles=("prefill",))).configs
    assert "quantization" not in config.settings and config.settings["moe-runner-backend"] == "auto"


def test_an_output_is_what_its_plan_said(shared: Shared) -> None:
    """Sizes from the written folder equal those from the plan, which the run used before it was written."""
    folder = shared.output("glm-5")
    written = served_from_folder(folder)
    assert written.experts == "INT4" and written.cut.expert_step == 32 and written.has_mtp
    text = (folder / "serving" / "sglang-single.yaml").read_text()
    assert f"served-model-name: {json.dumps(written.name)}" in text
    (config,) = make_serving(written, ServeRequest(gpus=1)).configs
    assert f"max-total-tokens: {config.memory.max_total_tokens}" in text


@pytest.mark.parametrize(
    ("alias", "hidden", "used"),
    [
        ("glm-5.2", 6144, True), ("glm-5.2", 8192, True), ("glm-5.2", 256, False), ("glm-5.2", 8448, False),
        ("glm-5.2", 6272, False), ("glm-4.7", 256, True), ("kimi-k2", 7168, False),
    ],
)  # fmt: skip
def test_a_draft_layer_is_used_where_sglang_s_kernel_takes_its_width(alias: str, hidden: int, used: bool) -> None:
    """Kimi K2 has none; GLM-4.7's runs without that kernel."""
    model = served(alias)
    facts = replace(model.facts, hidden_size=hidden)
    found = replace(model, cut=replace(model.cut, facts=facts))
    assert (found.draft_problem is None) == used
    assert found.has_mtp == (alias != "kimi-k2")


def test_a_run_leaves_serving_files_that_its_manifest_does_not_hash(shared: Shared, kvq_main: Kvq) -> None:
    folder = shared.output("glm-4.7")
    names = {path.name for path in (folder / "serving").iterdir()}
    assert {"sglang-single.yaml", "sglang-prefill.yaml", "sglang-decode.sh", "vllm.sh", "NOTES.md"} <= names
    assert not [name for name in json.loads((folder / "kvq-manifest.json").read_text())["files"] if "serving" in name]
    assert kvq_main("verify", folder).code == 0


def test_nothing_that_fits_is_a_note_and_no_failure() -> None:
    odd = replace(served("kimi-k2").cut, expert_step=3000)
    texts = default_serving(replace(served("kimi-k2"), cut=odd))
    assert list(texts) == ["NOTES.md"] and "no whole groups of 3000" in texts["NOTES.md"]


def test_the_command_writes_and_prints(shared: Shared, kvq_main: Kvq, tmp_path: Path) -> None:
    folder, out = shared.output("kimi-k2"), tmp_path / "settings"
    said = kvq_main("serve-config", folder, "--gpus", 1, "--out", out, "--json")
    report = json.loads(said.out)
    assert said.code == 0 and report["workable"] == [[1, 1]] and report["tp"] == 1
    assert json.dumps(str(folder.resolve())) in (out / "sglang-single.yaml").read_text()
    assert (out / "sglang-single.sh").stat().st_mode & 0o100
    text = kvq_main("serve-config", folder, "--gpus", 1, "--out", out, "--engine", "vllm").out
    assert text.startswith("vllm serve ") and "--tensor-parallel-size 1" in text
    refused = kvq_main("serve-config", folder, "--gpus", 8, "--out", out)
    assert refused.code == 2 and "no whole groups of 32" in refused.err
    assert kvq_main("serve-config", folder, "--engine", "vllm", "--role", "decode").code == 2


def test_names_for_clients() -> None:
    assert served_name("zai-org/GLM-5.2-FP8", "int4") == "GLM-5.2-FP8-int4"
    assert served_name("a b\\c/", "int4") == "a_b_c-int4"
    assert find_gpu("h200").name in sglang_config.ARCHITECTURES
