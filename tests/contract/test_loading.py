"""kvq's checkpoints through SGLang's own models and loaders: nothing unfilled or dropped, every value in its place.

Packed words are compared with codes that were worked out from the source's weights, packed by SGLang's own function:
two codes in each other's place are found, even where kvq packs and unpacks them alike.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.contract import engine
from tests.contract.expected import Expected

WORD = -0x5A5A5A5A  # no packed word of the checkpoints, and no shape


def checkpoints() -> list[dict[str, Any]]:
    path = engine.CASES / "checkpoints.json"
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def rank_cases() -> list[Any]:
    """Each TP that kvq calls workable, without expert parallelism and with all of it, at the last GPU."""
    return [
        pytest.param(row, tp, ep, tp - 1, id=f"{row['name']}-tp{tp}-ep{ep}-rank{tp - 1}")
        for row in checkpoints()
        for tp, ep in row["workable"]
        if ep in (1, tp)
    ]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def read_codes(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "codes.bin")


def poison(model: nn.Module) -> None:
    """Values that no checkpoint holds: what the loader leaves behind shows."""
    for parameter in model.parameters():
        if parameter.dtype == torch.float8_e4m3fn:
            parameter.data.view(torch.uint8).fill_(0x7F)
        else:
            parameter.data.fill_(float("nan") if parameter.is_floating_point() else WORD)


def is_filled(value: Tensor) -> bool:
    if value.is_floating_point():
        return not bool(value.float().isnan().any())
    return not bool((value == WORD).any())


def load_and_compare(row: dict[str, Any], tp: int, ep: int, rank: int, draft: bool) -> dict[str, Any]:
    """Runs in a child of its own."""
    folder = Path(row["folder"])
    text, tensors = row["text_config"], read_tensors(folder)
    prefix = f"{row['prefix']}model.layers.{text['num_hidden_layers']}."
    wanted = {n: t for n, t in tensors.items() if n.startswith(prefix) == draft or (draft and ".layers." not in n)}
    expected = Expected(tensors | read_codes(folder), text, rank, tp, ep, prefix if draft else None)
    model = engine.build_model(folder, rank, tp, ep, draft=draft)
    poison(model)
    engine.load(model, iter(tensors.items()))
    unfilled, different = [], []
    for name, parameter in model.named_parameters():
        value = expected.of(name)
        if value is None:
            continue
        if not is_filled(parameter.data):
            unfilled.append(name)
        else:
            wanted_value = engine.pack(value) if name.endswith("weight_packed") else value.to(parameter.dtype)
            if not torch.equal(parameter.data, wanted_value):
                different.append(name)
    shared = () if not draft else ("embed_tokens", "shared_head.head")
    mine = expected.local_experts()
    dropped = [
        name
        for name in wanted
        if name not in expected.used
        and (not draft or name.startswith(prefix))
        and not any(part in name for part in shared)
        and (".mlp.experts." not in name or int(name.split(".mlp.experts.")[1].split(".")[0]) in mine)
    ]
    return {"unfilled": unfilled, "different": different, "dropped": dropped, "used": len(expected.used)}


@pytest.mark.parametrize(("row", "tp", "ep", "rank"), rank_cases())
def test_every_tensor_lands_where_it_belongs(row: dict[str, Any], tp: int, ep: int, rank: int) -> None:
    report = engine.in_child(lambda: load_and_compare(row, tp, ep, rank, draft=False))
    assert report.pop("used") > 0
    assert report == {"unfilled": [], "different": [], "dropped": []}


@pytest.mark.parametrize("row", [row for row in checkpoints() if row["has_mtp"]], ids=lambda row: row["name"])
def test_the_draft_layer_loads_from_the_same_folder(row: dict[str, Any]) -> None:
    report = engine.in_child(lambda: load_and_compare(row, 1, 1, 0, draft=True))
    assert report.pop("used") > 0
    assert report == {"unfilled": [], "different": [], "dropped": []}
