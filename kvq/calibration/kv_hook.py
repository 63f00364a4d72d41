"""What an engine writes into its KV cache, intercepted in transformers' attention modules: to be measured or replaced.

    gqa    `key` after norm and rope, `value`: [B, heads, S, D]
    mla    `latent`, normed [B, 1, S, kv_lora_rank], and `k_pe`, rotated [B, 1, S, rope width]
    dsa    the same two, and `index_key` of layers with an indexer that has a choice: [B, S, index width]

These are the tensors that SGLang's MHATokenToKVPool, MLATokenToKVPool and DSATokenToKVPool keep. transformers hands
GQA's and MLA's to its cache, so an object in the cache's place sees them; DSA's latents go through `expand_kv` only.

Shape suffixes: B = sequences, S = tokens, D = width of a head.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from kvq.checkpoint.architecture import Attention

KvHook = Callable[[int, str, Tensor], Tensor]
"""(layer, name, tensor) -> what attention reads in its place, of the same shape and dtype."""

KV_NAMES: Mapping[Attention, tuple[str, ...]] = {
    "gqa": ("key", "value"),
    "mla": ("latent", "k_pe"),
    "dsa": ("latent", "k_pe", "index_key"),
}


def install_kv_hook(self_attn: nn.Module, attention: Attention, layer: int, hook: KvHook) -> None:
    """Let `hook` see and replace what this module (a decoder layer's `self_attn`) would cache, in every later forward.

    `index_key` is not seen where kvq has replaced the indexer, which it does for sequences of up to `index_topk`
    tokens: every position is selected there, whatever the keys.
    """
    cache = _HookedCache(attention, layer, hook)

    def pass_cache(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "past_key_values": cache}

    self_attn.register_forward_pre_hook(pass_cache, with_kwargs=True)
    if attention == "dsa":
        module: Any = self_attn
        expand = module.expand_kv
        module.expand_kv = lambda latent, k_pe: expand(hook(layer, "latent", latent), hook(layer, "k_pe", k_pe))


class _HookedCache:
    """Stands where transformers' cache would: keeps nothing, and gives back what the hook makes of each tensor."""

    def __init__(self, attention: Attention, layer: int, hook: KvHook) -> None:
        self._names = KV_NAMES[attention][:2]
        self._expanded = attention == "dsa"
        self._layer = layer
        self._hook = hook

    def update(self, first: Tensor, second: Tensor, _layer: int, *_: object) -> tuple[Tensor, Tensor]:
        if self._expanded:  # keys and values of all heads, which no engine stores
            return first, second
        left, right = self._names
        return self._hook(self._layer, left, first), self._hook(self._layer, right, second)

    def update_indexer(self, key: Tensor, _layer: int, *_: object) -> Tensor:
        return self._hook(self._layer, "index_key", key)
