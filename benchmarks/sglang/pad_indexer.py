"""A copy of a small GLM-5 checkpoint whose indexer has 32 heads, the added ones of weight zero.

The indexer's score is a weighted sum over its heads, so heads of weight zero add nothing, and SGLang's common factor
(the inverse root of their number) leaves the order of the scores as it was. Real GLM-5 checkpoints have 32 heads.
"""

import json
import shutil
from pathlib import Path
from typing import Any

HEADS = 32


def pad_indexer(folder: Path, target: Path) -> Path:
    """`folder` itself where there is nothing to pad; else `target`, written anew."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = config["index_n_heads"]
    if heads >= HEADS:
        return folder
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    (target / "config.json").write_text(json.dumps({**config, "index_n_heads": HEADS}), encoding="utf-8")
    for shard in target.glob("*.safetensors"):
        tensors = {name: _padded(name, tensor, heads) for name, tensor in load_file(shard).items()}
        save_file(tensors, shard, {"format": "pt"})
    return target


def _padded(name: str, tensor: Any, heads: int) -> Any:
    """Rows belong to heads: of the query projection (and its block scales) and of the weights of the heads."""
    import torch

    if ".indexer.wq_b." not in name and ".indexer.weights_proj." not in name:
        return tensor
    rows = tensor.shape[0] * HEADS // heads
    fill = torch.ones if "scale" in name else torch.zeros
    added = fill(rows - tensor.shape[0], *tensor.shape[1:], dtype=torch.float32).to(tensor.dtype)
    return torch.cat([tensor.view(torch.uint8), added.view(torch.uint8)]).view(tensor.dtype)
