"""Architecture facts as rows: a new model is a row here and a test.

Sources: the `config.json` and tensor names of the published checkpoints and transformers 5.17's modules.
An unlisted `model_type` stops at plan time.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvq.errors import CheckpointError

Attention = Literal["gqa", "mla", "dsa"]
Projection = Literal["gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = ("gate_proj", "up_proj", "down_proj")

EXPERTS = "mlp.experts."  # below a layer; the expert's number follows
MTP_NORMS = ("enorm", "hnorm", "shared_head.norm")  # below a multi-token-prediction layer

MOE_KEYS = (
    "hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "num_hidden_layers",
    "first_k_dense_replace", "vocab_size", "num_attention_heads", "rms_norm_eps", "routed_scaling_factor",
)  # fmt: skip
REAL_KEYS = ("rms_norm_eps", "routed_scaling_factor")  # all others are counts
OPTIONAL_COUNTS = (
    "num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings", "n_shared_experts", "n_group",
    "topk_group",
)  # fmt: skip
MAX_COUNT = 2**31 - 1
MAX_LOOPED = 100_000  # layers or experts: what kvq counts through
MLA_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row. `transformers_type` names the transformers modules that run the decoder layers."""

    model_type: str
    title: str
    transformers_type: str
    attention: Attention
    class_prefix: str = ""
    text_config: str | None = None
    prefix: str = ""
    required: tuple[str, ...] = MOE_KEYS
    float32: tuple[str, ...] = ("e_score_correction_bias",)


ARCHITECTURES: Mapping[str, Architecture] = {
    row.model_type: row
    for row in (
        Architecture(
            "glm_moe_dsa", "GLM-5", "glm_moe_dsa", "dsa", "GlmMoeDsa",
            required=(*MOE_KEYS, *MLA_KEYS, "index_topk", "index_head_dim", "index_n_heads"),
            float32=("e_score_correction_bias", "indexer.weights_proj.weight"),
        ),
        Architecture(
            "glm4_moe", "GLM-4.5/4.6/4.7", "glm4_moe", "gqa", "Glm4Moe", 
            required=(*MOE_KEYS, "num_key_value_heads", "head_dim"),
        ),
        Architecture("deepseek_v3", "DeepSeek-V3", "deepseek_v3", "mla", "DeepseekV3", required=(*MOE_KEYS, *MLA_KEYS)),
        # Kimi K2 is DeepSeek-V3 under another name; reading it so needs no remote code.
        Architecture("kimi_k2", "Kimi K2", "deepseek_v3", "mla", "DeepseekV3", required=(*MOE_KEYS, *MLA_KEYS)),
        Architecture(
            "kimi_k25", "Kimi K2.5/K2.6", "deepseek_v3", "mla", "DeepseekV3", text_config="text_config",
            prefix="language_model.", required=(*MOE_KEYS, *MLA_KEYS),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a config says about the decoder: counts, sizes, and how its tensors are named."""

    arch: Architecture
    text_config: Mapping[str, Any]
    num_layers: int
    num_mtp_layers: int
    first_moe_layer: int
    num_experts: int
    hidden_size: int
    moe_intermediate_size: int

    @property
    def mtp_layers(self) -> range:
        """Indices of the multi-token-prediction layers, which follow the decoder layers."""
        return range(self.num_layers, self.num_layers + self.num_mtp_layers)

    @property
    def moe_layers(self) -> range:
        """Indices of all layers with routed experts, the MTP layers included."""
        return range(self.first_moe_layer, self.num_layers + self.num_mtp_layers)

    @property
    def max_positions(self) -> int:
        """Tokens of prompt and answer together that the config allows; no limit where it names none."""
        return int(self.text_config.get("max_position_embeddings") or MAX_COUNT)

    def layer_prefix(self, layer: int) -> str:
        """For example `model.layers.3.`"""
        return f"{self.arch.prefix}model.layers.{layer}."

    def expert_module(self, layer: int, expert: int, projection: str) -> str:
        """For example `model.layers.3.mlp.experts.17.down_proj`"""
        return f"{self.layer_prefix(layer)}mlp.experts.{expert}.{projection}"

    def place_of(self, name: str) -> tuple[int, str] | None:
        """Layer of a tensor and its name below that layer; None outside the layers."""
        start = self.arch.prefix + "model.layers."
        if not name.startswith(start):
            return None
        number, dot, below = name[len(start) :].partition(".")
        return (int(number), below) if dot and number.isdecimal() else None

    def places(self, names: Iterable[str]) -> Iterator[tuple[str, int | None, str]]:
        """Each name, its layer, and what it is called below the layer, any expert called 0: the same few dozen names.

        Outside the layers the last is the name below the model's prefix. Fast for a hundred thousand names of which
        neighbours share an expert.
        """
        prefix, layer, below = "\0", None, ""
        for name in names:
            if not name.startswith(prefix) or (not below and name.startswith(EXPERTS, len(prefix))):
                place = self.place_of(name)
                if place is None:
                    yield name, None, name.removeprefix(self.arch.prefix)
                    continue
                layer, rest = place
                number = rest.removeprefix(EXPERTS).partition(".")[0] if rest.startswith(EXPERTS) else ""
                below = f"{EXPERTS}0." if number.isdecimal() else ""
                prefix = name[: len(name) - len(rest)] + (f"{EXPERTS}{number}." if below else "")
            yield name, layer, below + name[len(prefix) :]

    def layer_of(self, name: str) -> int | None:
        """Index of the layer that a tensor belongs to; None outside the layers."""
        place = self.place_of(name)
        return None if place is None else place[0]

    def expert_shape(self, projection: str) -> tuple[int, int]:
        """Rows and columns of a routed expert's projection."""
        inner, outer = self.moe_intermediate_size, self.hidden_size
        return (outer, inner) if projection == "down_proj" else (inner, outer)


def model_facts(config: Mapping[str, Any], folder: Path) -> ModelFacts:
    """Facts from a `config.json`. Raises CheckpointError for an unlisted model_type or a missing or senseless key."""
    place = folder / "config.json"
    model_type = config.get("model_type")
    arch = ARCHITECTURES.get(str(model_type))
    if arch is None:
        raise CheckpointError(
            f"{place}: model_type {model_type!r} is not supported; kvq reads {', '.join(ARCHITECTURES)}. "
            "`kvq models` lists the known models."
        )
    text: Any = config if arch.text_config is None else config.get(arch.text_config)
    if not isinstance(text, dict):
        raise CheckpointError(f"{place}: has no {arch.text_config!r} object, which {arch.title} needs.")
    _check_numbers(text, arch, place)
    facts = ModelFacts(
        arch=arch,
        text_config=text,
        num_layers=_count(text, "num_hidden_layers", place),
        num_mtp_layers=_count(text, "num_nextn_predict_layers", place),
        first_moe_layer=_count(text, "first_k_dense_replace", place),
        num_experts=_count(text, "n_routed_experts", place),
        hidden_size=_count(text, "hidden_size", place),
        moe_intermediate_size=_count(text, "moe_intermediate_size", place),
    )
    _check_counts(facts, place)
    return facts


def _check_numbers(text: Mapping[str, Any], arch: Architecture, place: Path) -> None:
    """What the model needs is there, and every count is a whole number."""
    missing = [key for key in arch.required if text.get(key) is None]
    if missing:
        raise CheckpointError(f"{place}: needs the number {missing[0]!r}, which is absent. Download config.json again.")
    for key in (*arch.required, *OPTIONAL_COUNTS):
        if key not in REAL_KEYS:
            if _count(text, key, place) == 0 and key in arch.required and key != "first_k_dense_replace":
                raise CheckpointError(f"{place}: {key} is 0, which no model has. Download config.json again.")
        elif not isinstance(text[key], int | float) or isinstance(text[key], bool):
            raise CheckpointError(f"{place}: {key} is {text[key]!r}, expected a number. Download config.json again.")


def _check_counts(facts: ModelFacts, place: Path) -> None:
    """The counts make sense together."""
    text = facts.text_config
    if max(facts.num_layers, facts.num_mtp_layers, facts.num_experts) > MAX_LOOPED:
        raise CheckpointError(
            f"{place}: num_hidden_layers {facts.num_layers}, num_nextn_predict_layers {facts.num_mtp_layers}, "
            f"n_routed_experts {facts.num_experts}: no model has so many. Download config.json again."
        )
    if (
        facts.first_moe_layer >= facts.num_layers
        or min(facts.num_experts, facts.hidden_size, facts.moe_intermediate_size) < 1
        or text.get("moe_layer_freq", 1) != 1
    ):
        raise CheckpointError(
            f"{place}: first_k_dense_replace {facts.first_moe_layer}, num_hidden_layers {facts.num_layers}, "
            f"n_routed_experts {facts.num_experts}, moe_layer_freq {text.get('moe_layer_freq', 1)}: "
            "kvq expects routed experts in every layer after the first dense ones."
        )
    top_k = _count(text, "num_experts_per_tok", place)
    if not 1 <= top_k <= facts.num_experts:
        raise CheckpointError(
            f"{place}: num_experts_per_tok is {top_k} of {facts.num_experts} experts. Download config.json again."
        )


def _count(text: Mapping[str, Any], key: str, place: Path) -> int:
    """A whole number; 0 where the key is absent or null."""
    value = 0 if text.get(key) is None else text[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
        raise CheckpointError(f"{place}: {key} is {value!r}, expected a whole number. Download config.json again.")
    return value
