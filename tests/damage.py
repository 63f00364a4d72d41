"""Small source checkpoints, and one way each to damage them."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.checkpoints import (
    INDEX,
    TINY,
    Json,
    drop_tensor,
    edit_config,
    edit_tensor,
    make_checkpoint,
    read_json,
    rewrite_index,
    shard_of,
)  # fmt: skip

Damage = Callable[[Path], object]
SMALL = replace(TINY, num_hidden_layers=2, n_routed_experts=4)
SOURCES = {
    "glm-5": ("glm_moe_dsa", "fp8_block"),
    "glm-4.7": ("glm4_moe", "fp8_channel"),
    "kimi-k2.5": ("kimi_k25", "int4"),
    "bf16": ("deepseek_v3", "bf16"),
}
LAYER = "model.layers.1."
EXPERT = f"{LAYER}mlp.experts.3.up_proj.weight"
SCALE = f"{EXPERT}_scale_inv"
MTP = "model.layers.2."
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4665a5ea\nsize 5368709120\n"
TOKENIZER = "tokenizer.json"
AGAIN = "ownload"  # Download, download


@dataclass(frozen=True)
class Broken:
    """`says` are pieces of the one sentence: the file, the tensor or key, the remedy. `code` is the exit code; what is
    found only while weights are read (`late`) may leave `<out>.partial`."""

    damage: Damage
    says: tuple[str, ...]
    code: int = 3
    late: bool = False
    source: str = "glm-5"


def make_source(folder: Path, name: str) -> Path:
    """A whole checkpoint, to be damaged."""
    family, stored = SOURCES[name]
    return make_checkpoint(folder, family, stored, SMALL, block_size=(32, 32))


def set_config(**values: Any) -> Damage:
    return lambda folder: edit_config(folder, lambda config: config.update(values))


def set_quantization(**values: Any) -> Damage:
    return lambda folder: edit_config(folder, lambda config: config["quantization_config"].update(values))


def set_group(**values: Any) -> Damage:
    def change(config: Json) -> None:
        quantization = config.get("quantization_config") or config["text_config"]["quantization_config"]
        quantization["config_groups"]["group_0"]["weights"].update(values)

    return lambda folder: edit_config(folder, change)


def write(name: str, text: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def in_index(change: Callable[[Json], object]) -> Damage:
    return lambda folder: rewrite_index(folder, change)


def mapped(shard: Any) -> Damage:
    return in_index(lambda index: index["weight_map"].update({EXPERT: shard}))


def on_shard(change: Callable[[Path], object]) -> Damage:
    return lambda folder: change(shard_of(folder, EXPERT))


def in_header(change: Callable[[Json], object]) -> Damage:
    """Rewrite the header of the expert's shard, its data staying."""

    def damage(shard: Path) -> None:
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        text = change(header)
        written = text if isinstance(text, bytes) else json.dumps(header).encode()
        shard.write_bytes(len(written).to_bytes(8, "little") + written + data[8 + length :])

    return on_shard(damage)


def drop(*names: str) -> Damage:
    def damage(folder: Path) -> None:
        for name in names:
            drop_tensor(folder, name)

    return damage


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return lambda folder: edit_tensor(folder, name, change)


def first(value: float) -> Callable[[Tensor], Tensor]:
    """The first element replaced."""

    def change(old: Tensor) -> Tensor:
        new = old.float()
        new.view(-1)[0] = value
        return new.to(old.dtype)

    return change


def renamed(old: str, new: str) -> Damage:
    """A tensor under another name, in its shard and in the index."""

    def damage(folder: Path) -> None:
        shard = shard_of(folder, old)
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header[new] = header.pop(old)
        text = json.dumps(header).encode()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        rewrite_index(folder, lambda index: index["weight_map"].update({new: index["weight_map"].pop(old)}))

    return damage


def token_id(number: int) -> Damage:
    """Another id for a letter that every text has."""

    def damage(folder: Path) -> None:
        content = read_json(folder / TOKENIZER)
        content["model"]["vocab"]["e"] = number
        (folder / TOKENIZER).write_text(json.dumps(content))

    return damage


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_away(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")


def swap_offsets(header: Json) -> None:
    header[EXPERT]["data_offsets"] = [offset + 8 for offset in header[EXPERT]["data_offsets"]]


def no_mtp(folder: Path) -> None:
    """The draft layer's tensors left out, as some publishers do, with the config still promising it."""
    names = [name for name in read_json(folder / INDEX)["weight_map"] if name.startswith(MTP)]
    drop(*names)(folder)


def no_shards(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


def copy_source(source: Path, to: Path) -> Path:
    return Path(shutil.copytree(source, to, symlinks=True))
