"""A vLLM plugin for its CPU build, which has no kernel for INT4 experts: they are dequantized to BF16 at load.

vLLM's own reading of the config, its matching of targets, its loading of names and shapes and its unpacking of INT4
stay; what runs then are its BF16 kernels. So it is evidence about commands, configs and loaders, not about INT4
kernels. RoPE is computed by vLLM's plain code: its CPU operator gives other numbers for MLA. `install.sh` registers it
as `vllm.general_plugins`, which vLLM loads in every process.
"""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.oracle.int_wna16 as kernels
from torch import Tensor
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as experts,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import PlatformEnum

BLOCK = 128
FP8_PROCESS = CompressedTensorsW8A8Fp8.process_weights_after_loading
FP8_APPLY = CompressedTensorsW8A8Fp8.apply_weights


class DequantizedBlockLinear(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 blocks, for processors whose matrix instructions vLLM's own kernel cannot use."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: Any = None) -> tuple[bool, None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        held = self._get_layer_params(layer)
        scale = held.weight_scale if held.weight_scale_inv is None else held.weight_scale_inv
        rows, columns = held.weight.shape
        whole = scale.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        layer._bf16 = (held.weight.float() * whole).bfloat16()

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        return torch.nn.functional.linear(x.bfloat16(), layer._bf16, bias).to(x.dtype)

    def apply_block_scaled_mm(self, *_: Any) -> Tensor:
        raise NotImplementedError


def process_linear(self: Any, layer: Any) -> None:
    """FP8 by channel: its own product is very slow on a CPU."""
    if layer.weight.dim() == 2 and layer.weight_scale.numel() == layer.weight.shape[0]:
        layer._bf16 = (layer.weight.float() * layer.weight_scale.float().reshape(-1, 1)).bfloat16()
    else:
        FP8_PROCESS(self, layer)


def apply_linear(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
    if not hasattr(layer, "_bf16") or self.strategy == "block":
        return FP8_APPLY(self, layer, x, bias)
    return torch.nn.functional.linear(x.bfloat16(), layer._bf16, bias).to(x.dtype)


def process_experts(self: Any, layer: Any) -> None:
    """vLLM's own unpacking (its emulation backend), then the method of unquantized experts."""
    w13, w2 = kernels.convert_to_wna16_moe_kernel_format(
        backend=kernels.WNA16MoEBackend.EMULATION, layer=layer, quant_config=self.weight_quant,
        input_dtype=self.input_dtype, w13=layer.w13_weight_packed, w2=layer.w2_weight_packed,
        w13_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale,
    )[:2]  # fmt: skip
    for name, weight in (("w13_weight", w13), ("w2_weight", w2)):
        if hasattr(layer, name):
            delattr(layer, name)
        value = torch.nn.Parameter(weight.bfloat16().contiguous(), requires_grad=False)
        layer.register_parameter(name, value)
    inner = UnquantizedFusedMoEMethod(self.moe)
    inner.process_weights_after_loading(layer)
    self.moe_quant_config, self.moe_kernel, self.inner = inner.moe_quant_config, inner.moe_kernel, inner


def apply_experts(self: Any, layer: Any, x: Tensor, *routing: Any, **named: Any) -> Any:
    return self.inner.forward_native(layer, x, *routing, **named)


def load() -> None:
    """Called by vLLM, more than once."""
    known = linear._POSSIBLE_FP8_BLOCK_KERNELS.setdefault(PlatformEnum.CPU, [])
    if DequantizedBlockLinear not in known:
        known.append(DequantizedBlockLinear)
    experts.select_wna16_moe_backend = lambda **_: (kernels.WNA16MoEBackend.EMULATION, CPUUnquantizedExperts)
    experts.CompressedTensorsWNA16MoEMethod.process_weights_after_loading = process_experts
    experts.CompressedTensorsWNA16MoEMethod.apply = apply_experts
    CompressedTensorsW8A8Fp8.process_weights_after_loading = process_linear
    CompressedTensorsW8A8Fp8.apply_weights = apply_linear
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
