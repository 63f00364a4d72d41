"""The same tokens through kvq, layer by layer, and through transformers' own model, in float32.

Shape suffixes: N = sequences, S = tokens per sequence, H = hidden size, V = vocabulary.
"""

import importlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from kvq.calibration.experts import RoutedExperts
from kvq.calibration.forward import ModelRunner
from kvq.checkpoint.reader import CheckpointReader
from tests import reference
from tests.checkpoints import INDEX, edit_config, read_tensors

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Outputs:
    """Hidden states after each layer, and logits."""

    hidden_NSH: list[Tensor]
    logits_NSV: Tensor


def random_tokens(num_sequences: int, length: int, vocab_size: int = 128) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, vocab_size, (num_sequences, length), generator=generator)


def open_runner(folder: Path) -> ModelRunner:
    return ModelRunner(CheckpointReader(folder), CPU)


def layer_with_experts(runner: ModelRunner, layer: int) -> Any:
    """The decoder layer as evaluation runs it."""
    experts: nn.Module = nn.Identity()
    if layer in runner.facts.moe_layers:
        everyone = range(runner.facts.num_experts)
        experts = RoutedExperts(runner.expert_gate_up(layer, everyone), runner.expert_down(layer, everyone))
    return runner.build_layer(layer, experts)


def kvq_outputs(folder: Path, tokens_NS: Tensor, batch_size: int = 2) -> Outputs:
    runner = open_runner(folder)
    store = runner.embed(tokens_NS)
    store.batch_size = batch_size
    hidden = []
    for layer in range(runner.facts.num_layers):
        runner.run(layer_with_experts(runner, layer), layer, store)
        hidden.append(store.hidden_NSH.clone())
    with torch.no_grad():
        return Outputs(hidden, F.linear(runner.final_norm()(hidden[-1]), runner.lm_head()))


def load_model(folder: Path) -> Any:
    """transformers' own model in float32."""
    # Something may have put modules there that look for torchvision as soon as they are asked for their names.
    for name in [name for name in sys.modules if name.startswith("transformers.") and "image_processing" in name]:
        if name.endswith("_fast"):
            del sys.modules[name]
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_outputs(folder: Path, tokens_NS: Tensor) -> Outputs:
    model = load_model(folder)
    hidden: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        hidden.append(output if isinstance(output, Tensor) else output[0])

    for layer in model.model.layers:
        layer.register_forward_hook(keep)
    with torch.no_grad():
        logits_NSV = model(tokens_NS, use_cache=False).logits
    return Outputs(hidden, logits_NSV)


def assert_same(found: Outputs, expected: Outputs, atol: float = 1e-4) -> None:
    assert len(found.hidden_NSH) == len(expected.hidden_NSH)
    for ours, theirs in zip(found.hidden_NSH, expected.hidden_NSH, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    torch.testing.assert_close(found.logits_NSV, expected.logits_NSV, rtol=0, atol=atol)


def as_deepseek(folder: Path, copy: Path) -> Path:
    """The same Kimi repository under a model_type that transformers knows, without its code."""
    shutil.copytree(folder, copy)

    def rename(config: dict[str, Any]) -> None:
        config["model_type"] = "deepseek_v3"
        del config["auto_map"]

    edit_config(copy, rename)
    return copy


def dequantized_copy(folder: Path, copy: Path, block: tuple[int, int]) -> Path:
    """An FP8 repository with each weight times its scale in float32, and nothing left of the quantization."""
    shutil.copytree(folder, copy)
    tensors = read_tensors(folder)
    for file in [*copy.glob("*.safetensors"), copy / INDEX]:
        file.unlink()
    plain = {}
    for name, tensor in tensors.items():
        if f"{name}_scale_inv" in tensors:
            plain[name] = reference.dequantize_blocks(tensor, tensors[f"{name}_scale_inv"], block)
        elif f"{name}_scale" in tensors:
            plain[name] = reference.dequantize_blocks(tensor, tensors[f"{name}_scale"].float(), (1, tensor.shape[1]))
        elif not name.endswith(("_scale_inv", "_scale")):
            plain[name] = tensor
    save_file(plain, copy / "model.safetensors", metadata={"format": "pt"})
    edit_config(copy, lambda config: config.pop("quantization_config"))
    return copy
