"""How a checkpoint is spread over GPUs: which sizes fit and why others do not, and the weights that each GPU holds.

The rules are SGLang's. `tp` GPUs hold one copy of the model. Experts are spread over `ep` groups of them, and each
expert is cut into tp / ep slices; with data-parallel attention each of `dp` groups holds all of the attention.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvq.checkpoint.architecture import ModelFacts
from kvq.recipes.plan import QuantPlan
from kvq.recipes.tally import Kind

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8, 16)
GROUP_SIZES = (32, 64, 128)
# Cut along heads; the rest of attention (q_a_proj, kv_a_proj_with_mqa, norms, indexer) is held whole by each GPU.
HEAD_MODULES = ("self_attn.q_b_proj.", "self_attn.kv_b_proj.", "self_attn.o_proj.", "self_attn.q_proj.")
KV_HEAD_MODULES = ("self_attn.k_proj.", "self_attn.v_proj.")
CUT_CLASSES = ("shared experts", "dense MLP", "embeddings", "lm_head")
SHARED_WITH_TARGET = ("embed_tokens.", "shared_head.head.")  # engines take the main model's instead


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes that are valid together: dp and ep divide tp."""

    tp: int
    ep: int = 1
    dp: int = 1

    @property
    def attention_tp(self) -> int:
        return self.tp // self.dp

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a checkpoint may be cut: `expert_step` columns of an expert stay together (a group of INT4, a block of FP8,
    1 for BF16); matrices outside the experts are cut between FP8 blocks of `rest_block`, where they have blocks."""

    facts: ModelFacts
    expert_step: int
    step_name: str
    rest_block: int | None

    @classmethod
    def of(cls, plan: QuantPlan, group_size: int | None = None) -> "Cut":
        """Of the plan's output."""
        block = plan.source.block[0] if plan.source.block is not None and plan.recipe.rest == "keep" else None
        return cls(plan.facts, group_size or group_size_of(plan), "groups", block)


def group_size_of(plan: QuantPlan) -> int:
    """Group size of the experts' scales in the output."""
    return plan.source.group_size or plan.recipe.group_size


def problems(plan: QuantPlan, parallel: Parallel, group_size: int | None = None) -> list[str]:
    """Why these sizes cannot be served; empty when they can. SGLang checks few of them and misplaces scales."""
    return cut_problems(Cut.of(plan, group_size), parallel)


def cut_problems(cut: Cut, parallel: Parallel) -> list[str]:
    """As `problems`, of any checkpoint."""
    if parallel.tp % parallel.ep or parallel.tp % parallel.dp:
        return [f"EP {parallel.ep} and DP {parallel.dp} must divide TP {parallel.tp}"]
    facts, found = cut.facts, []
    if facts.num_experts % parallel.ep:
        found.append(f"{facts.num_experts} experts do not divide by EP {parallel.ep}")
    width = facts.moe_intermediate_size
    if width % (parallel.moe_tp * cut.expert_step):
        found.append(
            f"an expert's slice is {width}/{parallel.moe_tp} = {width / parallel.moe_tp:g} columns: no whole "
            f"{cut.step_name} of {cut.expert_step}"
        )
    return found + _attention_problems(facts, parallel) + _block_problems(cut, parallel)


def _attention_problems(facts: ModelFacts, parallel: Parallel) -> list[str]:
    size, text = parallel.attention_tp, facts.text_config
    heads, kv_heads = int(text["num_attention_heads"]), int(text.get("num_key_value_heads") or 0)
    if heads % size:
        return [f"{heads} attention heads do not divide by {size}"]
    if facts.arch.attention == "gqa" and kv_heads % size and size % kv_heads:
        return [f"{kv_heads} key/value heads and {size} GPUs do not divide"]
    return []


def _block_problems(cut: Cut, parallel: Parallel) -> list[str]:
    """Matrices kept in FP8 blocks must be cut between blocks."""
    block, facts, text = cut.rest_block, cut.facts, cut.facts.text_config
    if block is None:
        return []
    widths = {"shared experts": (int(text.get("n_shared_experts") or 1) * facts.moe_intermediate_size, parallel.tp)}
    if facts.first_moe_layer and text.get("intermediate_size"):
        widths["dense MLP"] = (int(text["intermediate_size"]), parallel.tp)
    heads = int(text["num_attention_heads"])
    for title, width in _head_widths(facts).items():
        widths[title] = (heads * width, parallel.attention_tp)
    return [
        f"{title}: {width}/{parts} = {width / parts:g} columns are no whole FP8 blocks of {block}"
        for title, (width, parts) in widths.items()
        if parts > 1 and width % (parts * block)
    ]


def _head_widths(facts: ModelFacts) -> dict[str, int]:
    """Rows (or columns) of the matrices that are cut along heads, for one head."""
    text = facts.text_config
    if facts.arch.attention == "gqa":
        return {"q_proj": int(text["head_dim"])}
    nope, rope, value = (int(text[key]) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {"q_b_proj": nope + rope, "kv_b_proj": nope + value, "o_proj": value}


def valid_tensor_parallel_sizes(plan: QuantPlan, group_size: int | None = None) -> list[int]:
    """Sizes without expert parallelism at which nothing is cut within a group, a block or a head."""
    return [size for size in TENSOR_PARALLEL_SIZES if not problems(plan, Parallel(size), group_size)]


def _copies(kind: Kind, kv_heads: int, parallel: Parallel) -> float:
    """Share of a kind's bytes that one GPU holds."""
    if kind.tensor_class == "routed experts" or kind.tensor_class in CUT_CLASSES:
        return 1 / parallel.tp
    if kind.below.startswith(HEAD_MODULES) and not kind.below.endswith("norm.weight"):
        return 1 / parallel.attention_tp
    if kind.below.startswith(KV_HEAD_MODULES):
        return 1 / min(parallel.attention_tp, max(1, kv_heads))
    return 1.0


def weights_per_gpu(kinds: Iterable[Kind], plan: QuantPlan, parallel: Parallel, mtp: bool = True) -> int:
    """Bytes of weights on each GPU, with the multi-token-prediction layer or without."""
    return held_bytes(kinds, plan.facts, parallel, mtp)


def held_bytes(kinds: Iterable[Kind], facts: ModelFacts, parallel: Parallel, mtp: bool = True) -> int:
    """As `weights_per_gpu`, of any checkpoint."""
    kv_heads = int(facts.text_config.get("num_key_value_heads") or 1)
    total = 0.0
    for kind in kinds:
        if kind.mtp and (not mtp or kind.below.startswith(SHARED_WITH_TARGET)):
            continue
        total += kind.nbytes * _copies(kind, kv_heads, parallel)
    return round(total)
