"""Load quantized checkpoints with transformers and compare its logits with kvq's own evaluation path, in float32.

    python benchmarks/loads_in_transformers.py --data EVAL.jsonl CHECKPOINT ...

transformers rounds dequantized experts to BF16 and multiplies in BF16; for the comparison both sides use the rounded
values in float32. FP8 linears quantize their inputs on the fly there as in the engines; kvq's evaluation does not, for
the source and the quantized model alike. So that is switched off for the comparison, and its effect printed beside it.
Fails if a weight is missing (a layout that transformers does not know loads with random weights and only a warning).
`kimi_k2` is unknown to transformers without remote code, so it is read as deepseek_v3.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from compressed_tensors.quantization import disable_quantization
from transformers import AutoModelForCausalLM

from kvq.calibration.dataset import load_documents
from kvq.calibration.forward import ModelRunner
from kvq.checkpoint.reader import CheckpointReader
from kvq.verify.streaming import final_hidden

NUM_DOCUMENTS, NUM_TOKENS = 4, 256


def readable_copy(folder: Path, scratch: str) -> Path:
    """The folder itself, or a copy under a model_type that transformers knows."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "kimi_k2":
        return folder
    copy = Path(scratch) / folder.name
    shutil.copytree(folder, copy)
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v3"}), encoding="utf-8")
    return copy


def drop_image_aliases() -> None:
    """transformers' lazy image modules need torchvision as soon as something lists its modules."""
    for name in [name for name in sys.modules if name.startswith("transformers.") and name.endswith("_fast")]:
        if "image_processing" in name:
            del sys.modules[name]


class Bf16Experts(ModelRunner):
    """kvq's path with dequantized experts rounded to BF16, as transformers keeps them whatever dtype is asked for."""

    def expert_gate_up(self, layer: int, experts: range) -> torch.Tensor:
        return super().expert_gate_up(layer, experts).bfloat16().float()

    def expert_down(self, layer: int, experts: range) -> torch.Tensor:
        return super().expert_down(layer, experts).bfloat16().float()


@torch.no_grad()
def check(folder: Path, data: Path) -> None:
    runner = Bf16Experts(CheckpointReader(folder), torch.device("cpu"))
    documents = load_documents(folder, int(runner.facts.text_config["vocab_size"]), data, None, NUM_TOKENS)
    tokens = torch.stack([document for document in documents if len(document) == NUM_TOKENS][:NUM_DOCUMENTS])
    ours = final_hidden(runner, [tokens], lambda text: None)[0] @ runner.lm_head().T
    with tempfile.TemporaryDirectory() as scratch:
        drop_image_aliases()
        model, info = AutoModelForCausalLM.from_pretrained(
            readable_copy(folder, scratch), dtype=torch.float32, output_loading_info=True
        )
        with_fp8_inputs = model(tokens).logits
        model.apply(disable_quantization)
        for parameter in model.parameters():
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()
        theirs = model(tokens).logits
    difference = float((ours - theirs).abs().max())
    same = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    missing, mismatched = len(info["missing_keys"]), len(info["mismatched_keys"])
    effect = float((with_fp8_inputs - theirs).abs().max())
    sys.stdout.write(
        f"{folder}: missing keys {missing}, mismatched {mismatched}, largest logit difference {difference:.2e} of "
        f"{float(theirs.abs().max()):.1f}, same top token {same:.2%}; FP8 inputs change logits by up to {effect:.2f}\n"
    )
    if missing or mismatched or difference > 1e-3:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--data", required=True, type=Path)
    arguments = parser.parse_args()
    for folder in arguments.checkpoints:
        check(folder, arguments.data)


if __name__ == "__main__":
    main()
