"""What each parameter of SGLang's model should hold, worked out from the checkpoint's tensors without SGLang.

Shape suffixes: E = experts of this GPU, K = input columns, N = output rows, G = groups.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

GATE_UP = ("gate_proj", "up_proj")
MERGED = {
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "wk_weights_proj": ("wk", "weights_proj"),
}
BY_ROWS = ("q_b_proj", "kv_b_proj")
VOCABULARY, PADDING = ("embed_tokens", "lm_head"), 64
BY_COLUMNS = ("o_proj", "down_proj")
# Made by the engine for activation order, which kvq's checkpoints do not have.
OF_THE_ENGINE = ("weight_g_idx", "g_idx_sort_indices")
SHARED_WITH_TARGET = ("embed_tokens", "shared_head.head", "lm_head")


def part(tensor: Tensor, dim: int, count: int, index: int) -> Tensor:
    """One of `count` equal slices."""
    assert tensor.shape[dim] % count == 0, f"{tuple(tensor.shape)} into {count}"
    return tensor.chunk(count, dim)[index]


@dataclass
class Expected:
    """`used` are the tensors that some parameter was expected to come from; those called `weight_packed` are codes."""

    tensors: Mapping[str, Tensor]
    text_config: Mapping[str, Any]
    rank: int
    tp: int
    ep: int = 1
    draft_layer: str | None = None
    used: set[str] = field(default_factory=set)

    def get(self, name: str) -> Tensor:
        self.used.add(name)
        return self.tensors[name]

    def of(self, parameter: str) -> Tensor | None:
        """None where the engine makes the parameter itself or shares it with the target."""
        if parameter.endswith(OF_THE_ENGINE) or self._is_idle_indexer(parameter):
            return None
        name = parameter
        if self.draft_layer is not None:
            if any(shared in name for shared in SHARED_WITH_TARGET):
                return None
            name = re.sub(r"^model\.(decoder\.)?", self.draft_layer, name)
        if ".mlp.experts." in name:
            start, _, rest = name.partition(".mlp.experts.")
            return self._experts(f"{start}.mlp.experts.", rest)
        module, _, suffix = name.rpartition(".")
        start, _, last = module.rpartition(".")
        return self._dense(f"{start}." if start else "", last, suffix)

    def _is_idle_indexer(self, parameter: str) -> bool:
        """SGLang 0.5.17 makes an indexer in layers that share another's, and never asks it (`skip_topk`)."""
        layer = re.search(r"\.layers\.(\d+)\.self_attn\.indexer\.", parameter)
        kinds = self.text_config.get("indexer_types") or []
        return layer is not None and self.draft_layer is None and kinds[int(layer[1])] == "shared"

    def local_experts(self) -> range:
        """Expert parallelism gives each group of GPUs neighbouring experts."""
        count = int(self.text_config["n_routed_experts"]) // self.ep
        first = self.rank // (self.tp // self.ep) * count
        return range(first, first + count)

    def _dense(self, start: str, last: str, suffix: str) -> Tensor:
        if last in MERGED:
            return torch.cat([self.get(f"{start}{name}.{suffix}") for name in MERGED[last]])
        if last == "gate_up_proj":
            whole_pair = [self.get(f"{start}{name}.{suffix}") for name in GATE_UP]
            return torch.cat([part(whole, 0, self.tp, self.rank) for whole in whole_pair])
        if last == "qkv_proj":
            return self._qkv(start, suffix)
        if last in VOCABULARY:
            whole = self.get(f"{start}{last}.{suffix}")
            return part(nn.functional.pad(whole, (0, 0, 0, -len(whole) % PADDING)), 0, self.tp, self.rank)
        if last in BY_ROWS:
            return part(self.get(f"{start}{last}.{suffix}"), 0, self.tp, self.rank)
        whole = self.get(f"{start}{last}.{suffix}")
        if last in BY_COLUMNS and whole.dim() == 2 and whole.shape[1] > 1:
            return part(whole, 1, self.tp, self.rank)
        return whole

    def _qkv(self, start: str, suffix: str) -> Tensor:
        kv_heads = int(self.text_config["num_key_value_heads"])
        count = min(self.tp, kv_heads)
        index = self.rank * count // self.tp
        query = part(self.get(f"{start}q_proj.{suffix}"), 0, self.tp, self.rank)
        return torch.cat([query, *(part(self.get(f"{start}{n}_proj.{suffix}"), 0, count, index) for n in "kv")])

    def _experts(self, start: str, rest: str) -> Tensor:
        """SGLang holds all experts of a GPU in one tensor, transposed: [E, K, N]. Of packed words these are
        the codes."""
        which, _, suffix = rest.partition("_")
        moe_tp = self.tp // self.ep
        slice_index = self.rank % moe_tp
        held = []
        for expert in self.local_experts():
            if which == "w13":
                parts = [self._expert(f"{start}{expert}.{name}.{suffix}", 0, moe_tp, slice_index) for name in GATE_UP]
                held.append(parts[-1] if suffix == "weight_shape" else torch.cat(parts).T)
            else:
                matrix = self._expert(f"{start}{expert}.down_proj.{suffix}", 1, moe_tp, slice_index)
                held.append(matrix if suffix == "weight_shape" else matrix.T)
        return torch.stack(held)

    def _expert(self, name: str, dim: int, count: int, index: int) -> Tensor:
        tensor = self.get(name)
        if name.endswith("weight_shape"):
            return tensor
        return part(tensor, dim, count, index)
