"""What vLLM's own loader does with each name under which FP8 KV scales are shipped, beside kvq's table.

    PYTHONPATH=. python benchmarks/vllm/kv_names.py      (where vLLM can be imported; a CPU build will do)

Run are vLLM's compressed-tensors config, which gives attention its scales or does not; `AutoWeightsLoader` with that
config's names for GLM-4.x, over a model of one attention layer; and for MLA and DSA, which load by hand,
`get_cache_scale_mapper` and `maybe_remap_kv_scale_name` over the names that such a layer has. A row is `loaded` (and
into what), `ignored`, or `refused`: the server does not start. Ends with 1 where the table says otherwise.
"""

import sys
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from kvq.checkpoint.architecture import Attention
from kvq.verify.kv_delivery import KV_CACHE_SCHEME, conditions_of, deliveries

LAYER = "model.layers.1."
NAMES = tuple(
    f"self_attn.{name}"
    for name in (
        "k_scale", "v_scale", "attn.k_scale", "attn.v_scale", "k_proj.k_scale", "v_proj.v_scale", "qkv_proj.k_scale",
        "kv_scale", "k_cache.scale", "attn_mqa.k_scale", "mla_attn.k_scale", "kv_a_proj_with_mqa.k_scale",
        "kv_b_proj.k_scale", "k_proj.output_scale",
    )
)  # fmt: skip
MODELS: dict[Attention, str] = {"gqa": "GLM-4.x", "mla": "Kimi K2", "dsa": "GLM-5.x"}


def quantization(scheme: bool) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128,
               "dynamic": False}  # fmt: skip
    group = {"targets": [r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"], "format": "pack-quantized",
             "weights": weights, "input_activations": None}  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
        "kv_cache_scheme": dict(KV_CACHE_SCHEME) if scheme else None,
    }  # fmt: skip


def attention_layer(attention: Attention, config: Any) -> nn.Module:
    """vLLM's attention with the parameters that its config makes for it."""
    from vllm.model_executor.layers.attention import Attention as HeadAttention
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    cls = HeadAttention if attention == "gqa" else MLAAttention
    layer: nn.Module = cls.__new__(cls)
    nn.Module.__init__(layer)
    method = config.get_quant_method(layer, f"{LAYER}self_attn.attn")
    if method is not None:
        method.create_weights(layer)
    return layer


def model_of(attention: Attention, config: Any) -> nn.Module:
    """Module names as vLLM's models have them: GLM-4.x `attn`, MLA `mla_attn.mla_attn`."""
    layer = attention_layer(attention, config)
    inner = {"attn": layer} if attention == "gqa" else {"mla_attn": nn.ModuleDict({"mla_attn": layer})}
    inner |= {"o_proj": nn.Linear(2, 2, bias=False)}
    block = nn.ModuleDict({"self_attn": nn.ModuleDict(inner)})
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleDict({"1": block})})})
    model.quant_config = config  # type: ignore[assignment]
    return model


def verdict_by_loader(model: nn.Module, name: str) -> str:
    """GLM-4.x: `Glm4MoeModel.load_weights` hands everything to `AutoWeightsLoader`."""
    from vllm.model_executor.models.utils import AutoWeightsLoader

    parameters = dict(model.named_parameters())
    before = {key: value.detach().clone() for key, value in parameters.items()}
    try:
        AutoWeightsLoader(model).load_weights([(name, torch.tensor(0.5))])
    except ValueError as error:
        return "refused" if "no module or parameter" in str(error) else f"refused: {error}"
    changed = [key for key, value in parameters.items() if not torch.equal(value, before[key])]
    return f"loaded into {changed[0]}" if changed else "ignored"


def verdict_by_names(model: nn.Module, config: Any, name: str) -> str:
    """MLA and DSA: `DeepseekV2Model.load_weights`, and `models/deepseek_v32` alike."""
    from vllm.model_executor.model_loader.weight_utils import maybe_remap_kv_scale_name

    parameters = dict(model.named_parameters())
    ((mapped, _),) = config.get_cache_scale_mapper().apply([(name, torch.tensor(0.5))])
    found = maybe_remap_kv_scale_name(mapped, parameters)
    if found is None:
        return "ignored"
    return f"loaded into {found}" if found in parameters else "refused"  # params_dict[name]: KeyError


def verdicts(attention: Attention, scheme: bool) -> Iterable[tuple[str, str, str]]:
    """(name, vLLM's verdict, the table's)."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    described = quantization(scheme)
    config = CompressedTensorsConfig.from_config(described)
    (row,) = deliveries("vllm", attention)
    for below in NAMES:
        model, name = model_of(attention, config), LAYER + below
        found = verdict_by_loader(model, name) if attention == "gqa" else verdict_by_names(model, config, name)
        parameter = row.lands_in(below, conditions_of(described))
        if parameter is not None:
            table = f"loaded into {LAYER}{parameter}"
        else:
            table = "refused" if row.refuses(below, conditions_of(described)) else "ignored"
        yield below, found, table


def main() -> None:
    sys.stdout.write(
        f"vLLM {version('vllm')}\n\n| model | kv_cache_scheme | name | vLLM | kvq's table |\n|---|---|---|---|---|\n"
    )
    wrong = 0
    for attention, title in MODELS.items():
        for scheme in (False, True):
            for name, found, table in verdicts(attention, scheme):
                wrong += found != table
                mark = "the same" if found == table else f"**{table}**"
                sys.stdout.write(f"| {title} | {'yes' if scheme else 'no'} | `{name}` | {found} | {mark} |\n")
    sys.stdout.write(f"\n{wrong} differ\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
