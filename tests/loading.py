"""transformers' own loading of a kvq output, on the CPU in float32."""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvq.calibration.forward import ModelRunner
from kvq.checkpoint.reader import CheckpointReader


def load_pretrained(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model, ready to compare, and transformers' report on the loading.

    Two things that transformers does and kvq's evaluation does not are undone: it rounds unpacked experts to BF16
    (their products are made in float32 here), and it emulates the FP8 layers' dynamic activation quantization.
    """
    # Left half imported by llmcompressor where torchvision is absent; AutoModel then fails on them.
    for name in [name for name in sys.modules if name.startswith("transformers.") and name.endswith("_fast")]:
        if "image_processing" in name:
            del sys.modules[name]
    from compressed_tensors.quantization import disable_quantization

    transformers: Any = importlib.import_module("transformers")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(folder, dtype=torch.float32, output_loading_info=True)
    model.eval()
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.data = parameter.data.float()
    with torch.no_grad():
        model(torch.tensor([[1, 2]]))  # the first call decompresses the FP8 layers
    model.apply(disable_quantization)
    return model, report


class RoundedExperts(ModelRunner):
    """kvq's runner with the routed experts' weights rounded to BF16, as transformers unpacks them."""

    def weight(self, name: str) -> Tensor:
        value = super().weight(name)
        return value.bfloat16().to(value.dtype) if ".mlp.experts." in name else value


def rounded_runner(folder: Path) -> ModelRunner:
    return RoundedExperts(CheckpointReader(folder), torch.device("cpu"))
