"""FP8 KV caches without an engine: what attention reads after its keys, values or latents were stored in e4m3.

`fp8_e4m3` is stored = e4m3(x / scale), read = stored * scale, with one static scale for each tensor of a layer:
SGLang's MHATokenToKVPool.set_kv_buffer, and the 576-byte MLA and DSA layout, where latent and k_pe share one.
`fp8_ds_mla` is the 656-byte DSA layout (SGLang's flashmla_kv, vLLM's name): a float32 scale for each token and 128
channels of the latent, amax / 448; k_pe in BF16. With either, DSA's indexer keys have a power of two for each token,
amax / 448 rounded up, after a Hadamard rotation, as in SGLang's `dsa_indexer.py` (`rotate_activation`, `act_quant` with
ue8m0 scales).

Values beyond 448 * scale are clamped and counted.

Shape suffixes: X = any leading dimensions, D = width.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvq.calibration.e4m3 import E4M3_MAX, through_e4m3
from kvq.checkpoint.architecture import ModelFacts
from kvq.checkpoint.index import load_json
from kvq.errors import RecipeError

SimulatedDtype = Literal["fp8_e4m3", "fp8_ds_mla"]
DSA_GROUP = 128  # channels that share a scale in fp8_ds_mla
INDEX_AMAX_FLOOR = 1e-4  # act_quant's, against division by zero

Scales = Mapping[int, tuple[float, float]]
"""Layer -> scales of key and value; for latents the first is that of latent and k_pe, and the second equals it."""


def quantize_latent_groups(latent_XD: Tensor) -> Tensor:
    """fp8_ds_mla's latent: an own scale for each token and group of channels."""
    groups = latent_XD.float().reshape(*latent_XD.shape[:-1], -1, math.gcd(DSA_GROUP, latent_XD.shape[-1]))
    scale = (groups.abs().amax(dim=-1, keepdim=True) / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return through_e4m3(groups, scale).flatten(-2)


def quantize_index_key(key_XD: Tensor) -> Tensor:
    """An indexer key as SGLang caches it. Scores do not change when key and query are rotated alike, so the rotation is
    undone here and the query stays as it is. Raises RecipeError for a width that is no power of two."""
    rotation_DD = hadamard(key_XD.shape[-1]).to(key_XD.device)
    rotated = key_XD.float() @ rotation_DD
    amax = rotated.abs().amax(dim=-1, keepdim=True).clamp(min=INDEX_AMAX_FLOOR)
    scale = torch.exp2(torch.ceil(torch.log2(amax / E4M3_MAX)))
    return through_e4m3(rotated, scale) @ rotation_DD


def hadamard(width: int) -> Tensor:
    """The normalized Walsh-Hadamard matrix [D, D], which is its own inverse."""
    if width & (width - 1):
        raise RecipeError(f"index_head_dim {width} is no power of two; SGLang's FP8 indexer keys need one.")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(width)


@dataclass(slots=True)
class StoredTensor:
    """What storing one kind of tensor of one layer did, over all tokens."""

    values: int = 0
    saturated: int = 0
    to_zero: int = 0
    amax: float = 0.0
    error_energy: float = 0.0
    energy: float = 0.0

    def add(self, x_XD: Tensor, read_XD: Tensor, limit: float | None) -> None:
        """Values as they were and as they are read back; above `limit` (None: scaled dynamically) they were clamped."""
        magnitude = x_XD.abs()
        self.values += x_XD.numel()
        self.saturated += 0 if limit is None else int((magnitude > limit).sum())
        self.to_zero += int(((read_XD == 0) & (x_XD != 0)).sum())
        self.amax = max(self.amax, float(magnitude.max()))
        self.error_energy += float((read_XD.double() - x_XD.double()).square().sum())
        self.energy += float(x_XD.double().square().sum())

    @property
    def relative_error(self) -> float:
        return math.sqrt(self.error_energy / self.energy) if self.energy else 0.0

    def shares(self) -> dict[str, float]:
        """The error, and which shares of the values went beyond the range or became zero, as reports have them."""
        return {
            "relative_error": self.relative_error,
            "saturated_share": self.saturated / self.values,
            "underflow_share": self.to_zero / self.values,
        }


@dataclass(eq=False)
class KvSimulation:
    """A KvHook (`kvq.calibration.kv_hook`) that stores and reads, and keeps account while `counting`."""

    dtype: SimulatedDtype
    scales: Scales = field(default_factory=dict)
    counting: bool = True
    stored: dict[tuple[int, str], StoredTensor] = field(default_factory=lambda: defaultdict(StoredTensor))

    def __call__(self, layer: int, name: str, tensor: Tensor) -> Tensor:
        scale = self.scale(layer, name)
        if name == "index_key":
            read, limit = quantize_index_key(tensor), None
        elif self.dtype == "fp8_e4m3":
            read, limit = through_e4m3(tensor, scale), E4M3_MAX * scale
        elif name == "latent":
            read, limit = quantize_latent_groups(tensor), None
        else:
            read, limit = tensor.to(torch.bfloat16).float(), None
        if self.counting:
            self.stored[layer, name].add(tensor.float(), read, limit)
        return read.to(tensor.dtype)

    def scale(self, layer: int, name: str) -> float:
        """The static scale of a tensor; 1.0 where none is given, as engines take it."""
        pair = self.scales.get(layer, (1.0, 1.0))
        return pair[1] if name == "value" else pair[0]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each layer and tensor, as plain data."""
        static = self.dtype == "fp8_e4m3"
        return [
            {
                "layer": layer, "tensor": name,
                "scale": self.scale(layer, name) if static and name != "index_key" else None,
                "amax": kept.amax, **kept.shares(),
            }
            for (layer, name), kept in sorted(self.stored.items())
        ]  # fmt: skip


def make_simulation(dtype: SimulatedDtype, scales: Path | None, facts: ModelFacts) -> KvSimulation:
    """Raises RecipeError for a layout that the attention does not have, or scales that do not fit the model."""
    if dtype == "fp8_ds_mla":
        if facts.arch.attention != "dsa":
            raise RecipeError(f"--kv-dtype fp8_ds_mla is a layout of DSA; {facts.arch.title} takes fp8_e4m3.")
        if scales is not None:
            raise RecipeError("--kv-dtype fp8_ds_mla has a scale for each token; --kv-scales belongs to fp8_e4m3.")
    return KvSimulation(dtype, {} if scales is None else load_kv_scales(scales, facts))


def load_kv_scales(file: Path, facts: ModelFacts) -> Scales:
    """Scales of every decoder layer, from `{"layers": {"0": {"k_scale": 0.02, "v_scale": 0.01}, ...}}` or from the file
    of SGLang's --quantization-param-path (rank 0 of it). Raises RecipeError where a layer is absent or holds nonsense.
    """
    content = load_json(file, remedy="Give the file that `kvq calibrate-kv` writes, or SGLang's.")
    rows = content.get("layers")
    if rows is None and isinstance(content.get("kv_cache"), dict):
        ranks = content["kv_cache"].get("scaling_factor")
        rows = ranks.get("0") if isinstance(ranks, dict) else None
    if not isinstance(rows, dict):
        raise RecipeError(f"{file}: holds neither `layers` nor SGLang's `kv_cache.scaling_factor`.")
    return {layer: _pair(rows.get(str(layer)), layer, file, facts) for layer in range(facts.num_layers)}


def _pair(row: Any, layer: int, file: Path, facts: ModelFacts) -> tuple[float, float]:
    """Key's and value's scale of one layer."""
    given = (row.get("k_scale"), row.get("v_scale")) if isinstance(row, dict) else (row, row)
    key, value = (float(x) if isinstance(x, int | float) and not isinstance(x, bool) else 0.0 for x in given)
    if not (0 < key < math.inf and 0 < value < math.inf):
        raise RecipeError(
            f"{file}: layer {layer} has the scales {given}; every decoder layer (0 to {facts.num_layers - 1}) needs "
            "positive numbers `k_scale` and `v_scale`."
        )
    if facts.arch.attention != "gqa" and key != value:
        raise RecipeError(
            f"{file}: layer {layer} has k_scale {key} and v_scale {value}; {facts.arch.title} stores one latent, which "
            "has one scale."
        )
    return key, value
