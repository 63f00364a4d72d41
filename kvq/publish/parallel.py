"""How a checkpoint is spread over GPUs: which sizes fit and why others do not, and the weights that each GPU holds.

The rules are SGLang's. `tp` GPUs hold one copy of the model. Experts are spread over `ep` groups of them, and each
expert is cut into tp / ep slices; with data-parallel attention each of `dp` groups holds all of the attention.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvq.checkpoint.architecture import ModelFacts
from kvq.recipes.plan import QuantPlan
from kvq.recipes.tally import Kind

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8, 16)
GROUP_SIZES = (32, 64, 128)
GROUPS = "groups"  # the step of INT4 experts
# INT4 kernels of SGLang 0.5.17 to 0.5.23.
MARLIN_ROWS, MARLIN_COLUMNS = 128, 64
TRITON_INT4_GROUPS = (32, 128)
SPARSE_HEADS = 64  # layers/attention/dsa_backend.py, FlashMLA on a Hopper GPU
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
        return cls(plan.facts, group_size or group_size_of(plan), GROUPS, block)


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
    found = _expert_problems(cut, parallel)
    return found + _attention_problems(cut.facts, parallel) + _block_problems(cut, parallel)


def _expert_problems(cut: Cut, parallel: Parallel) -> list[str]:
    facts, found = cut.facts, []
    if facts.num_experts % parallel.ep:
        found.append(f"{facts.num_experts} experts do not divide by EP {parallel.ep}")
    width = facts.moe_intermediate_size
    if width % (parallel.moe_tp * cut.expert_step):
        found.append(
            f"an expert's slice is {width}/{parallel.moe_tp} = {width / parallel.moe_tp:g} columns: no whole "
            f"{cut.step_name} of {cut.expert_step}"
        )
    elif cut.step_name == GROUPS and not (marlin_takes(cut, parallel) or cut.expert_step in TRITON_INT4_GROUPS):
        found.append(
            f"experts of {facts.hidden_size} x {width // parallel.moe_tp} on a GPU: Marlin takes multiples of "
            f"{MARLIN_ROWS} x {MARLIN_COLUMNS}, and Triton groups of {' or '.join(map(str, TRITON_INT4_GROUPS))} only"
        )
    return found


def marlin_takes(cut: Cut, parallel: Parallel) -> bool:
    """Whether Marlin's tiles fit the slices. SGLang has this rule (`layers/quantization/marlin_utils.py:
    check_moe_marlin_supports_layer`), but does not ask it for compressed-tensors: the first request would fail
    (`kernels/jit/csrc/gemm/marlin_moe/moe_wna16_marlin.cuh: is_valid_config`)."""
    columns = cut.facts.moe_intermediate_size // parallel.moe_tp
    return cut.facts.hidden_size % MARLIN_ROWS == 0 and columns % MARLIN_COLUMNS == 0


def _attention_problems(facts: ModelFacts, parallel: Parallel) -> list[str]:
    size, text = parallel.attention_tp, facts.text_config
    heads, kv_heads = int(text["num_attention_heads"]), int(text.get("num_key_value_heads") or 0)
    if heads % size:
        return [f"{heads} attention heads do not divide by {size}"]
    if facts.arch.attention == "gqa" and kv_heads % size and size % kv_heads:
        return [f"{kv_heads} key/value heads and {size} GPUs do not divide"]
    mine = heads // size
    if facts.arch.attention == "dsa" and mine % SPARSE_HEADS and SPARSE_HEADS % mine:
        return [f"{mine} heads on a GPU: sparse attention pads to {SPARSE_HEADS} heads, which {mine} do not divide"]
    return []


def _block_problems(cut: Cut, parallel: Parallel) -> list[str]:
    """Linears kept in FP8 blocks must be cut between blocks, and what goes into one must be whole blocks.

    SGLang checks what it cuts (`layers/quantization/fp8_utils.py:validate_fp8_block_shape`) when it makes the layer,
    and a layer's input at the first request (`kernels/ops/quantization/fp8_kernel.py: per_token_group_quant_fp8`).
    Nothing checks `q_a_proj`, whose scales are joined with those of `kv_a_proj_with_mqa`: they would be misplaced.
    """
    block = cut.rest_block
    if block is None:
        return []
    return [
        f"{title}: {width}/{parts} = {width / parts:g} columns are no whole FP8 blocks of {block}"
        for title, width, parts in _whole_widths(cut.facts, parallel)
        if width % (parts * block)
    ]


def _whole_widths(facts: ModelFacts, parallel: Parallel) -> Iterator[tuple[str, int, int]]:
    """What it is, its width, and into how many parts it is cut."""
    text, tp = facts.text_config, parallel.tp
    yield "hidden size", facts.hidden_size, 1
    shared = int(text.get("n_shared_experts") or 0)
    if shared:
        yield "shared experts", shared * facts.moe_intermediate_size, tp
    if facts.first_moe_layer and text.get("intermediate_size"):
        yield "dense MLP", int(text["intermediate_size"]), tp
    heads, size = int(text["num_attention_heads"]), parallel.attention_tp
    if facts.arch.attention == "gqa":
        width, kv_heads = int(text["head_dim"]), int(text.get("num_key_value_heads") or heads)
        yield "q_proj and o_proj", heads * width, size
        yield "k_proj and v_proj", kv_heads * width, min(size, kv_heads)  # more GPUs hold copies of a head
        return
    nope, rope, value = (int(text[key]) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    yield "q_lora_rank", int(text["q_lora_rank"]), 1
    yield "kv_lora_rank", int(text["kv_lora_rank"]), 1
    yield "o_proj", heads * value, size
    if size > 1:  # rows: a last block may be partial where nothing is cut
        yield "q_b_proj", heads * (nope + rope), size
        yield "kv_b_proj", heads * (nope + value), size


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
