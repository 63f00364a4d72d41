"""Tiny random-weight checkpoints on disk, in the layouts that real GLM and Kimi repositories use.

Values depend only on the seed, the shape and the name without `language_model.`, so two sources of one seed store the
same BF16 model and a test can compare them. Traps that real repositories set are kept on purpose: skip lists naming
modules that do not exist, scales in another shard than their weight, partial last blocks, `temperature` without
`do_sample`, odd digits in shard names, code that must be copied but never run.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Unpack

from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tests.checkpoint_tensors import (
    FAMILIES,
    GLM,
    INT4_GROUP,
    KIMI,
    PRESETS,
    SOURCES,
    TINY,
    VT_HIDDEN,
    VT_INTER,
    Json,
    Options,
    Shapes,
    Tensors,
    Tiny,
    indexer_types,
    language_model,
    mtp_layers,
    plain_tensors,
    preset,
    starved_expert,
    stored,
)  # fmt: skip

# The names that tests use, wherever they are defined.
__all__ = [
    "FAMILIES", "GLM", "INDEX", "INT4_GROUP", "KIMI", "PRESETS", "SOURCES", "TINY", "Json", "Options", "Shapes",
    "Tensors", "Tiny", "drop_tensor", "edit_config", "edit_tensor", "indexer_types", "make_checkpoint", "mtp_layers",
    "preset", "read_json", "read_tensors", "rewrite_index", "shard_of", "starved_expert", "truncate_shard",
    "write_json",
]  # fmt: skip

INDEX = "model.safetensors.index.json"
GLM_SPECIAL = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
KIMI_SPECIAL = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>")

# config.json.


def _kept_bf16(family: str, dims: Tiny) -> list[str]:
    linears = ("lm_head", "mlp.gate", "eh_proj", "shared_head.head", "indexer.weights_proj")
    modules = [name.removesuffix(".weight") for name in language_model(family, dims)]
    prefix = "language_model." if family == "kimi_k25" else ""
    return [prefix + module for module in modules if module.endswith(linears)]


def _fp8_block_config(family: str, dims: Tiny, block_size: tuple[int, int]) -> Json:
    config: Json = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    config["weight_block_size"] = list(block_size)
    if family in GLM:
        # GLM-5.2 ships this wrong name for indexer.weights_proj. DeepSeek-V3 and Kimi-K2 ship no list at all.
        real = [name for name in _kept_bf16(family, dims) if not name.endswith("weights_proj")]
        config["modules_to_not_convert"] = ["model.embed_tokens", "model.layers.0.self_attn.indexers_proj", *real]
    return config


def _compressed_config(form: str, weights: Json, activations: Json | None, ignore: list[str]) -> Json:
    weights = {**weights, "symmetric": True, "dynamic": False, "observer": "minmax", "actorder": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    config: Json = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return config | {"kv_cache_scheme": None, "config_groups": {"group_0": group}, "ignore": ignore}


def _quantization_config(family: str, source: str, dims: Tiny, block_size: tuple[int, int]) -> Json:
    if source == "fp8_block":
        return _fp8_block_config(family, dims, block_size)
    if source == "fp8_channel":
        weights: Json = {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
        activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
        return _compressed_config("float-quantized", weights, activations, _kept_bf16(family, dims))
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": INT4_GROUP}
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    ignore += ["re:.*eh_proj", "re:.*shared_head.*"] if mtp_layers(family, dims) else []
    return _compressed_config("pack-quantized", weights, None, ignore)


def _attention_config(family: str, dims: Tiny) -> Json:
    if family == "glm4_moe":
        rope: Json = {"rope_theta": 1000000, "rope_scaling": None, "partial_rotary_factor": 0.5}
        return {"attention_bias": True, "use_qk_norm": True, "rms_norm_eps": 1e-05, **rope}
    mla: Json = {"attention_bias": False, "num_key_value_heads": dims.num_attention_heads}
    if family == "glm_moe_dsa":
        mla |= {"head_dim": dims.qk_nope_head_dim, "qk_head_dim": dims.qk_nope_head_dim + dims.qk_rope_head_dim}
        mla |= {"indexer_types": indexer_types(dims), "index_topk_freq": 2, "index_skip_topk_offset": 2}
        mla |= {"rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "indexer_rope_interleave": True}
        return mla | {"rms_norm_eps": 1e-05}
    yarn = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
    yarn |= {"mscale_all_dim": 1.0, "beta_fast": 32.0 if family == "deepseek_v3" else 1.0, "beta_slow": 1.0}
    return {**mla, "rms_norm_eps": 1e-06, "rope_theta": 50000.0, "rope_scaling": yarn, "num_nextn_predict_layers": 0}


def _text_config(family: str, dims: Tiny) -> Json:
    unused = {"glm_moe_dsa": (), "glm4_moe": ("q_lora", "kv_lora", "qk_", "v_head", "index")}
    drop = unused.get(family, ("head_dim", "index"))
    fields: Json = {name: value for name, value in asdict(dims).items() if not name.startswith(drop)}
    fields |= {"hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}
    fields |= {"moe_layer_freq": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    fields |= {"routed_scaling_factor": 2.5, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    fields |= {"max_position_embeddings": 131072, **_special_ids(family, dims), **_attention_config(family, dims)}
    return fields


def _config(family: str, source: str, dims: Tiny, block_size: tuple[int, int]) -> Json:
    names = {"glm_moe_dsa": "GlmMoeDsaForCausalLM", "glm4_moe": "Glm4MoeForCausalLM"}
    config: Json = {"architectures": [names.get(family, "DeepseekV3ForCausalLM")], **_text_config(family, dims)}
    config["model_type"] = "kimi_k2" if family in KIMI else family
    if family in KIMI:
        config["auto_map"] = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    if source != "bf16":
        config["quantization_config"] = _quantization_config(family, source, dims, block_size)
    if family != "kimi_k25":
        return config
    vision: Json = {"patch_size": 14, "merge_kernel_size": [2, 2], "vt_num_attention_heads": 2}
    vision |= {"vt_hidden_size": VT_HIDDEN, "vt_intermediate_size": VT_INTER, "text_hidden_size": dims.hidden_size}
    vision |= {"init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4, "vt_num_hidden_layers": 1}
    top: Json = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")}
    top |= {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16"}
    top |= {"auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}, "media_placeholder_token_id": 1}
    return top | {"text_config": config, "vision_config": vision}


# Side files.

TEMPLATE = """{%- set open = OPEN -%}
{{ PREFIX }}{% if tools %}{{ open.system }}# Tools
{% for tool in tools %}{{ (tool.function or tool) | tojson }}
{% endfor %}CLOSE{% endif %}{% for m in messages %}{{ open[m.role] }}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}</tool_call>
{%- endfor %}CLOSE{% endfor %}{% if add_generation_prompt %}{{ open.assistant }}{% endif %}"""
REMOTE_CODE = 'raise RuntimeError("code that came with a checkpoint was run")\n'
# Four blanks, no newline at the end, an order of its own: only a byte for byte copy leaves it as it is.
GENERATION = '{\n    "temperature": 0.6,\n    "eos_token_id": EOS,\n    "top_p": 0.95,\n    "pad_token_id": PAD\n}'


def _vocabulary(family: str, dims: Tiny) -> tuple[list[str], list[tuple[str, str]]]:
    """Byte-level tokens for ASCII text, special ones last, and as many merges as there is room for."""
    # The byte-level alphabet shows tab, newline and space as these letters.
    letters = [chr(code) for code in (*range(33, 127), 0x109, 0x10A, 0x120)]
    special = [*(KIMI_SPECIAL if family in KIMI else GLM_SPECIAL), "<tool_call>", "</tool_call>", "[PAD]", "<unk>"]
    room = dims.vocab_size - len(letters) - len(special)
    if room < 0:
        raise ValueError(f"vocab_size {dims.vocab_size} is too small for ASCII and the special tokens")
    pairs = [(first, second) for first, second in zip("tieoarasnh", "hnrnteslde", strict=True)][:room]
    return [*letters, *(first + second for first, second in pairs), *special], pairs


def _special_ids(family: str, dims: Tiny) -> Json:
    place = _vocabulary(family, dims)[0].index
    if family in KIMI:
        return {"bos_token_id": place("[BOS]"), "eos_token_id": place("[EOS]"), "pad_token_id": place("[PAD]")}
    eos = [place(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    return {"eos_token_id": eos, "pad_token_id": eos[0]}


def _write_tokenizer(folder: Path, family: str, dims: Tiny) -> None:
    tokens, merges = _vocabulary(family, dims)
    vocabulary = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token in tokens if len(token) > 2]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    end, pad = ("[EOS]", "[PAD]") if family in KIMI else ("<|endoftext|>", "<|endoftext|>")
    config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": pad}
    config |= {"unk_token": "<unk>", "model_max_length": 131072, "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", config)


def _write_side_files(folder: Path, family: str, dims: Tiny) -> None:
    _write_tokenizer(folder, family, dims)
    if family in KIMI:
        opening = {role: f"<|im_{role}|>{role}<|im_middle|>" for role in ("system", "user", "assistant")}
        opening["tool"], prefix, close = "<|im_system|>tool<|im_middle|>", "''", "<|im_end|>"
    else:
        opening = {role: f"<|{role}|>\n" for role in ("system", "user", "assistant")}
        opening["tool"], prefix, close = "<|observation|>\n", "'[gMASK]<sop>'", ""
    template = TEMPLATE.replace("OPEN", json.dumps(opening)).replace("PREFIX", prefix).replace("CLOSE", close)
    ids = _special_ids(family, dims)
    generation = GENERATION.replace("EOS", json.dumps(ids["eos_token_id"])).replace("PAD", str(ids["pad_token_id"]))
    files = {"chat_template.jinja": template, "generation_config.json": generation, "LICENSE": "MIT License\n"}
    files["README.md"] = "---\nlicense: mit\nlibrary_name: transformers\n---\n# A tiny model\n"
    if family in KIMI:
        modules = ["configuration_deepseek.py", "modeling_deepseek.py", "tokenization_kimi.py"]
        modules += ["configuration_kimi_k25.py", "modeling_kimi_k25.py"] if family == "kimi_k25" else []
        files |= dict.fromkeys(modules, REMOTE_CODE) | {"tiktoken.model": "IQ== 0\nIg== 1\n"}
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())


# The whole repository.


def write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Json:
    value: Json = json.loads(path.read_text())
    return value


def _write_weights(folder: Path, groups: list[Tensors], shards: int, pattern: str, together: bool) -> None:
    parts: list[Tensors] = [{} for _ in range(shards)]
    for position, group in enumerate(groups):
        home = position * shards // len(groups)
        for order, (name, tensor) in enumerate(group.items()):
            # Modules come in threes (gate, up, down), so every fourth one meets each kind of them.
            away = order > 0 and position % 4 == 0 and not together
            parts[(home + away) % shards][name] = tensor
    files = [pattern.format(number + 1, shards) for number in range(shards)]
    for file, part in zip(files, parts, strict=True):
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for part in parts for tensor in part.values())
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def make_checkpoint(
    folder: Path,
    family: str,
    source: str = "fp8_block",
    dims: Tiny = TINY,
    seed: int = 0,
    shards: int = 3,
    **options: Unpack[Options],
) -> Path:
    """Write a whole repository into `folder`, which is made if need be, and return `folder`."""
    if family not in FAMILIES or source not in SOURCES:
        raise ValueError(f"unknown family or source: {family}, {source}")
    folder.mkdir(parents=True, exist_ok=True)
    block_size = options.get("block_size", (128, 128))
    plain = plain_tensors(family, dims, seed, options.get("starved_expert", False))
    groups = [stored(name, tensor, family, source, block_size) for name, tensor in plain.items()]
    if options.get("single_file", False):
        whole = {name: tensor for group in groups for name, tensor in group.items()}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        pattern = "model-{:05d}-of-{:06d}.safetensors" if family in KIMI else "model-{:05d}-of-{:05d}.safetensors"
        _write_weights(folder, groups, shards, pattern, options.get("pairs_together", False))
    write_json(folder / "config.json", _config(family, source, dims, block_size))
    _write_side_files(folder, family, dims)
    return folder


# Reading back, and damage.


def read_tensors(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def shard_of(folder: Path, name: str) -> Path:
    """The file that the index, or the lack of one, says holds this tensor."""
    index = folder / INDEX
    return folder / (read_json(index)["weight_map"][name] if index.exists() else "model.safetensors")


def edit_tensor(folder: Path, name: str, fn: Callable[[Tensor], Tensor]) -> None:
    """Replace a tensor by what `fn` returns, which may have another dtype or shape."""
    shard = shard_of(folder, name)
    tensors = load_file(shard)
    tensors[name] = fn(tensors[name]).contiguous()
    save_file(tensors, shard, metadata={"format": "pt"})


def drop_tensor(folder: Path, name: str, keep_in_index: bool = False) -> None:
    shard = shard_of(folder, name)
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
    if (folder / INDEX).exists() and not keep_in_index:
        rewrite_index(folder, lambda index: index["weight_map"].pop(name))


def truncate_shard(folder: Path, name: str, missing: int = 64) -> None:
    """Cut the last bytes off a shard, given by its file name or that of a tensor in it."""
    path = folder / name if name.endswith(".safetensors") else shard_of(folder, name)
    path.write_bytes(path.read_bytes()[:-missing])


def _edit_json(path: Path, fn: Callable[[Json], object]) -> None:
    value = read_json(path)
    fn(value)
    write_json(path, value)


def rewrite_index(folder: Path, fn: Callable[[Json], object]) -> None:
    """`fn` changes the index in place."""
    _edit_json(folder / INDEX, fn)


def edit_config(folder: Path, fn: Callable[[Json], object]) -> None:
    """`fn` changes config.json in place."""
    _edit_json(folder / "config.json", fn)
