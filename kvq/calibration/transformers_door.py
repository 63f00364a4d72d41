"""Everything from transformers: tokenizer, config, and the modules of a decoder layer, built on meta.

Besides this module only tiktoken_door, which it calls, imports transformers.
"""

import copy
import importlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvq.checkpoint.architecture import Architecture, ModelFacts
from kvq.errors import CalibrationError, CheckpointError

# Lists in a config with one entry a layer; an MTP layer comes after the last and needs its own.
PER_LAYER_LISTS = {"indexer_types": "full", "mlp_layer_types": "sparse", "layer_types": None}


def import_tokenizers() -> None:
    """Now, what `load_tokenizer` imports for most folders."""
    importlib.import_module("kvq.calibration.tiktoken_door")


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer. Raises CalibrationError; remote code is never run.

    For tokenizer_process, which bounds what the folder's files may do; nothing else should call it.
    """
    try:
        return _load_tokenizer(folder)
    except (CalibrationError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  tokenizers raises plain Exception, transformers whatever a file provokes
        raise CalibrationError(
            f"{folder}: the tokenizer cannot be loaded ({_reason(error)}); the checkpoint's own code is never run. "
            "Give calibration rows with `input_ids`, or mend tokenizer.json."
        ) from None


def _reason(error: Exception) -> str:
    """What somebody else's exception says, in a line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _load_tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    if (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    if (folder / "tiktoken.model").exists():
        from kvq.calibration.tiktoken_door import load_kimi_tokenizer

        return load_kimi_tokenizer(folder)
    from transformers import AutoTokenizer  # takes seconds

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def build_config(facts: ModelFacts, place: Path) -> Any:
    """A transformers config from the checkpoint's, with the per-layer lists continued over the MTP layers.

    The quantization config is left out: kvq fills the modules itself.
    """
    from transformers import AutoConfig

    drop = {"quantization_config", "model_type", "auto_map", "architectures", "torch_dtype", "dtype"}
    values = copy.deepcopy({key: value for key, value in facts.text_config.items() if key not in drop})
    try:
        config = AutoConfig.for_model(facts.arch.transformers_type, **values)
    except Exception as error:  # noqa: BLE001  transformers raises what a value provokes, and huggingface_hub's own
        raise CheckpointError(
            f"{place / 'config.json'}: transformers refuses it ({_reason(error)}). Download config.json again."
        ) from None
    for key, filler in PER_LAYER_LISTS.items():
        entries = getattr(config, key, None)
        if isinstance(entries, list) and entries:
            setattr(config, key, [*entries[: facts.num_layers], *[filler or entries[-1]] * facts.num_mtp_layers])
    config._attn_implementation = "sdpa"
    config.name_or_path = str(place)  # for messages
    return config


def _modeling(arch: Architecture) -> Any:
    name = arch.transformers_type
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def build_layer(arch: Architecture, config: Any, layer: int) -> Any:
    """The decoder layer without storage: parameters and persistent buffers on meta."""
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=True):
            module = getattr(_modeling(arch), f"{arch.class_prefix}DecoderLayer")(config, layer)
    except (KeyError, ValueError, TypeError, RuntimeError, IndexError, AttributeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CheckpointError(
            f"{Path(config.name_or_path) / 'config.json'}: transformers cannot build layer {layer} from it ({reason}). "
            "Download config.json again."
        ) from None
    return module.eval()


def build_norm(arch: Architecture, config: Any, weight_H: Tensor) -> nn.Module:
    """An RMS norm of the model's own kind with the given weight."""
    norm: nn.Module = getattr(_modeling(arch), f"{arch.class_prefix}RMSNorm")(
        weight_H.shape[0], eps=config.rms_norm_eps
    )
    norm.load_state_dict({"weight": weight_H}, assign=True)
    return norm.eval()


def build_rotary(arch: Architecture, config: Any, device: torch.device) -> nn.Module:
    """The model's rotary embedding; its buffers are computed, not stored. Raises CheckpointError."""
    logging.getLogger("transformers.modeling_rope_utils").setLevel(logging.ERROR)
    try:
        rotary: nn.Module = getattr(_modeling(arch), f"{arch.class_prefix}RotaryEmbedding")(config)
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{Path(config.name_or_path) / 'config.json'}: transformers makes no rotary embedding from rope_parameters "
            f"or rope_scaling ({type(error).__name__}: {_reason(error)}). Download config.json again."
        ) from None
    return rotary.to(device).eval()


def build_model(arch: Architecture, config: Any) -> Any:
    """The whole causal language model without storage, for models that fit: parameters and buffers on meta."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=True):
        model = getattr(_modeling(arch), f"{arch.class_prefix}ForCausalLM")(config)
    return model.eval()
