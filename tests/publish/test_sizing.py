"""Serving arithmetic: what each GPU holds, what fits beside it, and which sizes cannot be cut."""

from dataclasses import replace
from functools import cache

import pytest

from kvq.checkpoint.facts import known_checkpoint, published_index
from kvq.errors import RecipeError
from kvq.publish.gpus import GPUS, find_gpu
from kvq.publish.kv_cache import kv_layouts, num_indexer_layers
from kvq.publish.parallel import Parallel, problems, valid_tensor_parallel_sizes, weights_per_gpu
from kvq.publish.plan_report import output_kinds
from kvq.publish.sizing import RESERVED, combinations, kv_fits, make_deployment, serving_sizes
from kvq.recipes.plan import QuantPlan, resolve_plan
from kvq.recipes.schema import load_recipe
from kvq.recipes.tally import Kind


@cache
def plan_of(alias: str, recipe: str = "int4") -> QuantPlan:
    known = known_checkpoint(alias)
    return resolve_plan(load_recipe(recipe), known.config, published_index(known))


@cache
def kinds_of(alias: str, recipe: str = "int4") -> tuple[Kind, ...]:
    return tuple(output_kinds(plan_of(alias, recipe)))


def held(alias: str, parallel: Parallel, recipe: str = "int4", **fields: str) -> int:
    """Bytes of one GPU of the kinds with these fields."""
    chosen = [kind for kind in kinds_of(alias, recipe) if all(getattr(kind, k) == v for k, v in fields.items())]
    return weights_per_gpu(chosen, plan_of(alias, recipe), parallel)


def total(alias: str, **fields: str) -> int:
    return sum(kind.nbytes for kind in kinds_of(alias) if all(getattr(kind, k) == v for k, v in fields.items()))


def test_one_gpu_holds_everything() -> None:
    assert weights_per_gpu(kinds_of("glm-5.2"), plan_of("glm-5.2"), Parallel(1)) == plan_of("glm-5.2").output_bytes


@pytest.mark.parametrize("tensor_class", ["routed experts", "shared experts", "dense MLP", "embeddings", "lm_head"])
@pytest.mark.parametrize("parallel", [Parallel(8), Parallel(8, ep=8), Parallel(8, dp=8), Parallel(8, ep=4, dp=2)])
def test_experts_and_vocabulary_are_cut_by_all_gpus(tensor_class: str, parallel: Parallel) -> None:
    assert held("glm-5.2", parallel, tensor_class=tensor_class) == round(
        total("glm-5.2", tensor_class=tensor_class) / 8
    )


@pytest.mark.parametrize("tensor_class", ["router", "norms", "indexer"])
def test_small_parts_are_held_whole(tensor_class: str) -> None:
    assert held("glm-5.2", Parallel(8), tensor_class=tensor_class) == total("glm-5.2", tensor_class=tensor_class)


@pytest.mark.parametrize(
    ("below", "share"), [("q_a_proj", 1), ("kv_a_proj_with_mqa", 1), ("q_b_proj", 8), ("o_proj", 8)]
)
def test_mla_is_cut_where_there_are_heads(below: str, share: int) -> None:
    name = f"self_attn.{below}.weight"
    assert held("glm-5.2", Parallel(8), below=name) == round(total("glm-5.2", below=name) / share)
    assert held("glm-5.2", Parallel(8, dp=8), below=name) == total("glm-5.2", below=name)


def test_key_value_heads_are_repeated_when_there_are_too_few() -> None:
    name, whole = "self_attn.k_proj.weight", total("glm-4.7", below="self_attn.k_proj.weight")
    assert held("glm-4.7", Parallel(8), below=name) == whole // 8
    assert held("glm-4.7", Parallel(16), below=name) == whole // 8


def test_mtp_copies_of_the_vocabulary_are_not_loaded() -> None:
    kinds = [kind for kind in kinds_of("glm-4.5", "int4-g64") if kind.below == "shared_head.head.weight"]
    plan = plan_of("glm-4.5", "int4-g64")
    assert kinds and weights_per_gpu(kinds, plan, Parallel(1)) == 0
    everything = kinds_of("glm-4.5", "int4-g64")
    assert weights_per_gpu(everything, plan, Parallel(1), mtp=False) < weights_per_gpu(everything, plan, Parallel(1))


@pytest.mark.parametrize(
    ("alias", "attention_tp", "expected"),
    [
        ("glm-4.7", 1, [(2 * 8 * 128 * 2 * 92, 2 * 8 * 128 * 2 * 92), (188416, 188416)]),
        ("glm-4.7", 8, [(376832, 376832 // 8), (188416, 188416 // 8)]),
        ("glm-4.7", 16, [(376832, 376832 // 8), (188416, 188416 // 8)]),
        ("kimi-k2", 8, [(70272, 70272), (35136, 35136)]),
    ],
)
def test_kv_bytes_of_a_token(alias: str, attention_tp: int, expected: list[tuple[int, int]]) -> None:
    layouts = kv_layouts(plan_of(alias, "int4-g64").facts, 0, attention_tp)
    assert [(layout.bytes_per_token, layout.on_each_gpu) for layout in layouts] == expected


def test_layers_that_share_an_indexer_keep_no_key() -> None:
    """GLM-5 has an indexer in each of 78 layers, GLM-5.2 in 21; the MTP layer's is not counted."""
    assert num_indexer_layers(kinds_of("glm-5")) == 78 and num_indexer_layers(kinds_of("glm-5.2")) == 21
    more, fewer = (kv_layouts(plan_of(alias).facts, count)[0] for alias, count in (("glm-5", 78), ("glm-5.2", 21)))
    assert more.bytes_per_token - fewer.bytes_per_token == 57 * 132


@pytest.mark.parametrize(
    ("alias", "recipe", "parallel", "group", "reason"),
    [
        ("glm-4.7", "int4", Parallel(8), 128, "1536/8 = 192 columns: no whole groups of 128"),
        ("glm-4.7", "int4", Parallel(8), 64, None),
        ("glm-4.7", "int4", Parallel(8, ep=2), 128, None),
        ("glm-4.7", "int4", Parallel(4), 128, None),
        ("glm-5.2", "int4", Parallel(8), 128, None),
        ("glm-5.2", "int4", Parallel(32), 128, "2048/32 = 64 columns: no whole groups of 128"),
        ("glm-5.2", "int4", Parallel(32, ep=2), 128, "shared experts: 2048/32 = 64 columns are no whole FP8 blocks"),
        ("glm-5.2", "int4", Parallel(3), 128, "64 attention heads do not divide by 3"),
        ("glm-5.2", "int4", Parallel(8, ep=3), 128, "EP 3 and DP 1 must divide TP 8"),
        ("kimi-k2", "int4", Parallel(256, ep=256), 128, "384 experts do not divide by EP 256"),
        ("kimi-k2.6", "int4", Parallel(16), None, None),
    ],
)  # fmt: skip
def test_why_sizes_do_not_fit(
    alias: str, recipe: str, parallel: Parallel, group: int | None, reason: str | None
) -> None:
    found = problems(plan_of(alias, recipe), parallel, group)
    assert found == [] if reason is None else any(reason in problem for problem in found), found


def test_glm_4_at_eight_gpus_needs_groups_of_64() -> None:
    """peers.md 3.8: 1536 columns over 8 are 192, whole groups of 64 and 32 only."""
    assert [valid_tensor_parallel_sizes(plan_of("glm-4.7"), size) for size in (128, 64, 32)] == [
        [1, 2, 4], [1, 2, 4, 8], [1, 2, 4, 8, 16],
    ]  # fmt: skip
    rows = {(row["tp"], row["ep"], row["group_size"]): row for row in combinations(plan_of("glm-4.7"))}
    assert rows[8, 1, 64]["valid"] and not rows[8, 1, 128]["valid"] and rows[8, 1, 128]["problems"]
    assert {row["group_size"] for row in combinations(plan_of("kimi-k2.6"))} == {32}


def test_tokens_and_requests() -> None:
    deployment = make_deployment(find_gpu("H200"), 16, Parallel(8, dp=2), 1000, "fp8_e4m3", 10_000)
    layouts = kv_layouts(plan_of("kimi-k2").facts, 0)
    (fit,) = kv_fits(layouts, 35_136 * 2_999, deployment)
    # Two copies of two groups, each with room for 2,999 tokens, which is two requests.
    assert (fit.dtype, fit.tokens, fit.requests) == ("fp8_e4m3", 4 * 2_999, 4 * 2)
    assert kv_fits(layouts, -5, deployment)[0].tokens == 0


def test_before_and_after_on_eight_gpus() -> None:
    plan, after = plan_of("glm-5.2"), kinds_of("glm-5.2")
    twice = [replace(kind, nbytes=2 * kind.nbytes) for kind in after]
    sizes = serving_sizes(plan, twice, after, make_deployment(find_gpu("h100"), 8, Parallel(8), None, None, 10**6))
    usable = round(80e9 * (1 - RESERVED))
    assert sizes["after"]["pool_per_gpu"] == usable - sizes["after"]["weights_per_gpu"] > 0
    assert not sizes["before"]["fits"] and sizes["before"]["kv"][0]["tokens"] == 0
    assert sizes["after"]["kv"][0]["tokens"] == sizes["after"]["pool_per_gpu"] // 92_628
    assert (sizes["context"], sizes["replicas"], sizes["problems"]) == (32768, 1, [])


@pytest.mark.parametrize(
    ("gpus", "parallel", "context", "says"),
    [
        (8, Parallel(3), None, "--gpus 8 is no multiple of --tp 3"),
        (8, Parallel(16), None, "--gpus 8 is no multiple of --tp 16"),
        (8, Parallel(8, dp=3), None, "--ep 1 and --dp 3 must divide --tp 8"),
        (8, Parallel(8), 10**6, "--context 1000000: the model's config allows 4096"),
    ],
)
def test_senseless_deployments_are_refused(gpus: int, parallel: Parallel, context: int | None, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        make_deployment(find_gpu("h200"), gpus, parallel, context, None, 4096)


def test_gpu_table() -> None:
    assert {name: gpu.gigabytes for name, gpu in GPUS.items()} == {
        "h100": 80, "h200": 141, "b200": 180, "b200-192": 192, "mi300x": 192,
    }  # fmt: skip
    assert all(gpu.source for gpu in GPUS.values())
    with pytest.raises(RecipeError, match="--gpu a100: not in kvq's table"):
        find_gpu("a100")
