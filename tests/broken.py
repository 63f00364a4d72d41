"""Ways in which a checkpoint can be broken, with what `kvq quantize` must say about each."""

import json
import os

import torch

from kvq.checkpoint.side_files import JSON_OBJECTS
from tests.checkpoints import (
    INDEX,
    drop_tensor,
    edit_config,
    truncate_shard,
)  # fmt: skip
from tests.damage import (
    AGAIN,
    EXPERT,
    LAYER,
    LFS_POINTER,
    MTP,
    SCALE,
    TOKENIZER,
    Broken,
    drop,
    first,
    in_header,
    in_index,
    link_away,
    make_folder,
    make_pipe,
    mapped,
    no_mtp,
    no_shards,
    on_shard,
    renamed,
    set_config,
    set_group,
    set_quantization,
    swap_offsets,
    tensor,
    token_id,
    write,
)

SHARD = "model-0000"
SHARDS: dict[str, Broken] = {
    "missing shard": Broken(on_shard(os.remove), ("shards are missing", SHARD, AGAIN)),
    "no shards": Broken(no_shards, ("shards are missing", SHARD, AGAIN)),
    "truncated": Broken(lambda folder: truncate_shard(folder, EXPERT), (SHARD, "truncated", AGAIN)),
    "four bytes": Broken(on_shard(lambda path: path.write_bytes(b"abcd")), (SHARD, "not a whole safetensors", AGAIN)),
    "empty": Broken(on_shard(lambda path: path.write_bytes(b"")), (SHARD, "not a whole safetensors", AGAIN)),
    "bytes at the end": Broken(
        on_shard(lambda path: path.write_bytes(path.read_bytes() + b"\0" * 8)), (SHARD, "truncated or damaged", AGAIN)
    ),
    "pointer of git lfs": Broken(on_shard(lambda path: path.write_text(LFS_POINTER)), (SHARD, "not a whole", AGAIN)),
    "error page": Broken(on_shard(lambda path: path.write_text("<html>404</html>")), (SHARD, "not a whole", AGAIN)),
    "header length": Broken(
        on_shard(lambda path: path.write_bytes(b"\xff" * 7 + b"\x7f" + path.read_bytes()[8:])), (SHARD, "header", AGAIN)
    ),
    "header is no JSON": Broken(in_header(lambda header: b'{"a": '), (SHARD, "header is damaged", AGAIN)),
    "header is a list": Broken(in_header(lambda header: b"[1]"), (SHARD, "not a JSON object", AGAIN)),
    "header of deep lists": Broken(in_header(lambda header: b"[" * 99_999), (SHARD, "header is damaged", AGAIN)),
    "header in UTF-16": Broken(in_header(lambda header: '{"a": 1}'.encode("utf-16")), (SHARD, "damaged", AGAIN)),
    "name twice in header": Broken(
        in_header(lambda header: json.dumps(header).encode()[:-1] + b', "' + EXPERT.encode() + b'": {}}'),
        (SHARD, EXPERT, "stands twice", AGAIN),
    ),
    "overlap": Broken(in_header(swap_offsets), (SHARD, "overlap or leave a gap", AGAIN)),
    "negative offset": Broken(
        in_header(lambda header: header[EXPERT].update(data_offsets=[-4096, 0])), (SHARD, EXPERT, "data_offsets", AGAIN)
    ),
    "shape is too large": Broken(
        in_header(lambda header: header[EXPERT].update(shape=[2**62, 2**62])), (SHARD, EXPERT, "shape", AGAIN)
    ),
    "shape is another": Broken(
        in_header(lambda header: header[EXPERT].update(shape=[64, 32])), (SHARD, EXPERT, "needs 2048 bytes", AGAIN)
    ),
    "endless name": Broken(
        in_header(lambda header: header.update({"x" * 5000: header.pop(EXPERT)})), (SHARD, "5000 characters", AGAIN)
    ),
    "unknown dtype": Broken(
        in_header(lambda header: header[EXPERT].update(dtype="F8_E3M4")), (SHARD, EXPERT, "F8_E3M4")
    ),
    "shard is a folder": Broken(on_shard(make_folder), (SHARD, "not a regular file", "Put the file itself")),
    "shard is a pipe": Broken(on_shard(make_pipe), (SHARD, "not a regular file", "Put the file itself")),
    "shard is elsewhere": Broken(on_shard(link_away), (SHARD, "leads out of the folder", "Put the file itself")),
}  # fmt: skip
INDEXES: dict[str, Broken] = {
    "no JSON": Broken(write(INDEX, "{"), (INDEX, "not valid JSON", AGAIN)),
    "pointer of git lfs": Broken(write(INDEX, LFS_POINTER), (INDEX, "not valid JSON", AGAIN)),
    "a list": Broken(write(INDEX, "[]"), (INDEX, "expected a JSON object", AGAIN)),
    "no weight_map": Broken(in_index(lambda index: index.pop("weight_map")), (INDEX, "no weight_map", AGAIN)),
    "weight_map is a list": Broken(
        in_index(lambda index: index.update(weight_map=["a"])), (INDEX, "no weight_map", AGAIN)
    ),
    "NaN": Broken(write(INDEX, '{"weight_map": NaN}'), (INDEX, "not valid JSON", AGAIN)),
    "name twice": Broken(write(INDEX, '{"weight_map": {"a": "x", "a": "y"}}'), (INDEX, "'a' stands twice", AGAIN)),
    "out of the folder": Broken(mapped("../x.safetensors"), (INDEX, EXPERT, "'../x.safetensors'")),
    "absolute path": Broken(mapped("/etc/passwd"), (INDEX, EXPERT, "'/etc/passwd'")),
    "shard is no name": Broken(mapped(7), (INDEX, EXPERT, "7, which is not a file name")),
    "pickled shard": Broken(mapped("pytorch_model.bin"), (INDEX, EXPERT, "'pytorch_model.bin'")),
    "shard that is not there": Broken(mapped("model-00009.safetensors"), ("shards are missing", "model-00009", AGAIN)),
    "wrong shard": Broken(mapped("model-00003-of-00003.safetensors"), (INDEX, EXPERT, "does not", AGAIN)),
    "tensor that is not there": Broken(
        lambda folder: drop_tensor(folder, EXPERT, keep_in_index=True), (INDEX, EXPERT, AGAIN)
    ),
    "pipe": Broken(lambda folder: make_pipe(folder / INDEX), (INDEX, "not a regular file", "Put the file itself")),
}  # fmt: skip
CONFIG = "config.json"
CONFIGS: dict[str, Broken] = {
    "missing": Broken(lambda folder: (folder / CONFIG).unlink(), (CONFIG, "no such file", "download it again")),
    "no JSON": Broken(write(CONFIG, "{'a': 1}"), (CONFIG, "not valid JSON", AGAIN)),
    "not UTF-8": Broken(write(CONFIG, b'{"a": "\xff"}'), (CONFIG, "not valid JSON", AGAIN)),
    "a list": Broken(write(CONFIG, "[]"), (CONFIG, "expected a JSON object", AGAIN)),
    "too large a number": Broken(write(CONFIG, '{"a": 1e999}'), (CONFIG, "1e999", AGAIN)),
    "half a character": Broken(write(CONFIG, '{"a": "\\ud800"}'), (CONFIG, "not valid JSON", AGAIN)),
    "no model_type": Broken(set_config(model_type=None), (CONFIG, "model_type None", "kvq models")),
    "another model": Broken(set_config(model_type="qwen3_moe"), (CONFIG, "'qwen3_moe'", "kvq models")),
    "key missing": Broken(set_config(n_routed_experts=None), (CONFIG, "'n_routed_experts'", AGAIN)),
    "number as text": Broken(set_config(n_routed_experts="4"), (CONFIG, "n_routed_experts is '4'", AGAIN)),
    "number is true": Broken(set_config(num_attention_heads=True), (CONFIG, "num_attention_heads is True", AGAIN)),
    "heads without width": Broken(set_config(head_dim=0), (CONFIG, "head_dim is 0", AGAIN), source="glm-4.7"),
    "half an expert": Broken(set_config(num_experts_per_tok=1.5), (CONFIG, "num_experts_per_tok is 1.5", AGAIN)),
    "negative": Broken(set_config(vocab_size=-1), (CONFIG, "vocab_size is -1", AGAIN)),
    "a billion experts": Broken(set_config(n_routed_experts=10**9), (CONFIG, "n_routed_experts 1000000000", AGAIN)),
    "endless layers": Broken(set_config(num_hidden_layers=10**18), (CONFIG, "num_hidden_layers is 1000", AGAIN)),
    "top-k above experts": Broken(set_config(num_experts_per_tok=5), (CONFIG, "num_experts_per_tok is 5 of 4", AGAIN)),
    "no MoE layer": Broken(set_config(first_k_dense_replace=2), (CONFIG, "first_k_dense_replace 2")),
    "every second layer": Broken(set_config(moe_layer_freq=2), (CONFIG, "moe_layer_freq 2")),
    "a layer fewer": Broken(set_config(num_hidden_layers=1, first_k_dense_replace=0), ("model.layers.0.mlp.experts",)),
    "a layer more": Broken(set_config(num_hidden_layers=3), ("model.layers.3.", AGAIN)),
    "an expert fewer": Broken(set_config(n_routed_experts=3), ("experts.3", CONFIG, "another release")),
    "an expert more": Broken(set_config(n_routed_experts=5), ("experts.4", AGAIN)),
    "other width": Broken(set_config(hidden_size=96), (SHARD, "[64, 64]", "[64, 96]")),
    "other expert width": Broken(set_config(moe_intermediate_size=96), (SHARD, "[64, 64]", "[96, 64]")),
    "other heads": Broken(set_config(num_attention_heads=8), (SHARD, "q_b_proj", "another release")),
    "other vocabulary": Broken(set_config(vocab_size=130), (SHARD, "embed_tokens", "another release")),
    "MTP denied": Broken(set_config(num_nextn_predict_layers=0), ("layer 2", "num_nextn_predict_layers", CONFIG)),
    "MTP promised": Broken(no_mtp, (MTP, AGAIN)),
    "unknown activation": Broken(set_config(hidden_act="softfoo"), (CONFIG, "softfoo")),
    "rope_parameters is text": Broken(set_config(rope_parameters="x"), (CONFIG, "'rope_parameters'", AGAIN)),
    "layer_types is a number": Broken(set_config(layer_types=7), (CONFIG, "'layer_types'", AGAIN)),
    "unknown rotary embedding": Broken(
        set_config(rope_parameters={"rope_type": "foo"}), (CONFIG, "rope_parameters", "foo", AGAIN)
    ),
    "MXFP4": Broken(set_quantization(quant_method="mxfp4"), (CONFIG, "'mxfp4'", "Start from the FP8 or BF16")),
    "NVFP4": Broken(set_quantization(quant_method="modelopt"), (CONFIG, "'modelopt'", "Start from the FP8 or BF16")),
    "no block size": Broken(set_quantization(weight_block_size=None), (CONFIG, "block size")),
    "block of nothing": Broken(set_quantization(weight_block_size=[0, 32]), (CONFIG, "block size", "[0, 32]")),
    "other block size": Broken(set_quantization(weight_block_size=[64, 64]), (SHARD, "_scale_inv", "expected a float")),
    "no quantization_config": Broken(
        lambda folder: edit_config(folder, lambda config: config.pop("quantization_config")),
        (SHARD, "F8_E4M3", "another release"),
    ),
    "bad pattern": Broken(set_quantization(modules_to_not_convert=["re:("]), (CONFIG, "'re:('", AGAIN)),
    "huge pattern": Broken(
        set_quantization(modules_to_not_convert=["re:" + "a?" * 9999]), (CONFIG, "characters", AGAIN)
    ),
    "pattern of a billion": Broken(
        set_quantization(modules_to_not_convert=["re:a{999999999}"]), (CONFIG, "a{999999999}", "multiply", AGAIN)
    ),
    "nested repetitions": Broken(
        set_quantization(modules_to_not_convert=["re:((a{99}){99}){99}"]), (CONFIG, "multiply", AGAIN)
    ),
    "recursive pattern": Broken(set_quantization(modules_to_not_convert=["re:(?R)"]), (CONFIG, "(?R)", AGAIN)),
    "one group, no type": Broken(set_group(type=None), (CONFIG, "not supported", "Start from"), source="glm-4.7"),
    "FP8 per tensor": Broken(set_group(strategy="tensor"), (CONFIG, "'tensor'", "channel and block"), source="glm-4.7"),
    "asymmetric INT4": Broken(set_group(symmetric=False), (CONFIG, "symmetric"), source="kimi-k2.5"),
    "groups of text": Broken(set_group(group_size="32"), (CONFIG, "INT4", "'32'"), source="kimi-k2.5"),
}  # fmt: skip
TENSORS: dict[str, Broken] = {
    "expert left out": Broken(drop(EXPERT, SCALE), (EXPERT, AGAIN)),
    "no scale": Broken(drop(SCALE), (SHARD, EXPERT, SCALE, AGAIN)),
    "scale without weight": Broken(drop(EXPERT), (EXPERT, AGAIN)),
    "scale of another shape": Broken(tensor(SCALE, lambda t: t[:1]), (SHARD, SCALE, "expected a float tensor [2, 2]")),
    "scale of whole numbers": Broken(tensor(SCALE, lambda t: t.int()), (SHARD, SCALE, "I32", "float tensor")),
    "scale NaN": Broken(tensor(SCALE, first(float("nan"))), (SHARD, SCALE, "NaN or Inf", AGAIN), late=True),
    "scale Inf": Broken(tensor(SCALE, first(float("inf"))), (SHARD, SCALE, "NaN or Inf", AGAIN), late=True),
    "scale 0": Broken(tensor(SCALE, first(0.0)), (SHARD, SCALE, "not positive", "damaged"), late=True),
    "scale negative": Broken(tensor(SCALE, first(-1.0)), (SHARD, SCALE, "not positive", "damaged"), late=True),
    "scale too large": Broken(tensor(SCALE, first(3e38)), (SHARD, EXPERT, "NaN or Inf", AGAIN), late=True),
    "expert NaN": Broken(tensor(EXPERT, first(float("nan"))), (SHARD, EXPERT, "NaN or Inf", AGAIN), late=True),
    "expert in two bytes a word": Broken(tensor(EXPERT, lambda t: t.view(torch.uint8)), (SHARD, EXPERT, "Start from")),
    "expert in E5M2": Broken(tensor(EXPERT, lambda t: t.float().to(torch.float8_e5m2)), (SHARD, EXPERT, "F8_E5M2")),
    "expert in bytes": Broken(tensor(EXPERT, lambda t: t.view(torch.int8)), (SHARD, EXPERT, "I8", "another release")),
    "expert in BF16": Broken(tensor(EXPERT, lambda t: t.bfloat16()), (SCALE, "not FP8")),
    "expert cut": Broken(tensor(EXPERT, lambda t: t[:, :32]), (SHARD, EXPERT[:20])),
    "experts fused": Broken(renamed(EXPERT, f"{LAYER}mlp.experts.gate_up_proj"), (SHARD, "gate_up_proj")),
    "expert under no number": Broken(renamed(EXPERT, f"{LAYER}mlp.experts.x.up_proj.weight"), ("experts.x",)),
    "head left out": Broken(drop("lm_head.weight"), ("lm_head.weight", AGAIN)),
    "head under another name": Broken(renamed("lm_head.weight", "x" * 300), ("lm_head.weight", AGAIN), source="bf16"),
    "router left out": Broken(drop(f"{LAYER}mlp.gate.weight"), (f"{LAYER}mlp.gate.weight", AGAIN)),
    "router bias left out": Broken(
        drop(f"{LAYER}mlp.gate.e_score_correction_bias"), ("e_score_correction_bias", AGAIN)
    ),
    "router NaN": Broken(
        tensor(f"{LAYER}mlp.gate.weight", first(float("nan"))), (SHARD, "gate.weight", "NaN", AGAIN), late=True
    ),
    "norm left out": Broken(drop(f"{LAYER}input_layernorm.weight"), (f"{LAYER}input_layernorm.weight", AGAIN)),
    "final norm left out": Broken(drop("model.norm.weight"), ("model.norm.weight", AGAIN)),
    "embedding left out": Broken(drop("model.embed_tokens.weight"), ("model.embed_tokens.weight", AGAIN)),
    "embedding NaN": Broken(
        tensor("model.embed_tokens.weight", first(float("nan"))), (SHARD, "embed_tokens", "NaN", AGAIN), late=True
    ),
    "head NaN": Broken(tensor("lm_head.weight", first(float("nan"))), (SHARD, "lm_head", "NaN", AGAIN), late=True),
    "attention of another shape": Broken(
        tensor(f"{LAYER}self_attn.q_a_layernorm.weight", lambda t: t[:7]), (SHARD, "q_a_layernorm", "another release")
    ),
    "indexer left out": Broken(drop(f"{LAYER}self_attn.indexer.weights_proj.weight"), ("weights_proj", AGAIN)),
    "draft layer without eh_proj": Broken(drop(f"{MTP}eh_proj.weight"), (f"{MTP}eh_proj.weight", AGAIN)),
    "draft layer without a norm": Broken(drop(f"{MTP}enorm.weight"), (f"{MTP}enorm.weight", AGAIN)),
    "activations overflow": Broken(
        tensor("model.layers.0.input_layernorm.weight", lambda t: torch.full_like(t, 3e38)), ("layer 0", "look at"),
        code=4, late=True,
    ),
    "INT4 expert left out": Broken(
        drop("language_model.model.layers.1.mlp.experts.0.up_proj.weight_packed"), ("weight_packed", AGAIN),
        source="kimi-k2.5",
    ),
    "INT4 scale left out": Broken(
        drop("language_model.model.layers.1.mlp.experts.0.up_proj.weight_scale"), ("weight_scale", AGAIN),
        source="kimi-k2.5",
    ),
    "row scales for two": Broken(
        tensor(f"{EXPERT}_scale", lambda t: t.repeat(1, 2)), (SHARD, f"{EXPERT}_scale", "expected a float tensor"),
        source="glm-4.7",
    ),
    "dense layer in INT4": Broken(
        renamed("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_packed"),
        (SHARD, "model.layers.0.mlp.up_proj.weight"),
    ),
    "attention in INT4": Broken(
        renamed(f"{LAYER}self_attn.o_proj.weight", f"{LAYER}self_attn.o_proj.weight_packed"), ("o_proj.weight",)
    ),
    "expert scale under the other name": Broken(renamed(SCALE, f"{EXPERT}_scale"), (SHARD, SCALE, AGAIN)),
    "scale of an expert twice": Broken(renamed(SCALE, f"{LAYER}mlp.experts.2.up_proj.weight_scale"), (SCALE, AGAIN)),
    "link to nothing": Broken(lambda folder: (folder / "notes.txt").symlink_to("none"), ("notes.txt", "link", AGAIN)),
    "side file elsewhere": Broken(
        lambda folder: link_away(folder / "LICENSE"), ("LICENSE", "leads out", "Put the file")
    ),
    "side folder elsewhere": Broken(
        lambda folder: (folder / "docs").symlink_to(folder.parent), ("docs", "leads out", "Put the file")
    ),
}  # fmt: skip
SIDE_FILES: dict[str, Broken] = {
    "tokenizer is no JSON": Broken(write(TOKENIZER, "{"), (TOKENIZER, "not valid JSON", AGAIN)),
    "tokenizer is a pointer": Broken(write(TOKENIZER, LFS_POINTER), (TOKENIZER, "not valid JSON", AGAIN)),
    "tokenizer is a pipe": Broken(lambda folder: make_pipe(folder / TOKENIZER), (TOKENIZER, "Put the file itself")),
    **{
        f"{name} {title}": Broken(write(name, text), (name, says, AGAIN))
        for name in JSON_OBJECTS
        for title, text, says in (("is empty", "", "not valid JSON"), ("is a list", "[1]", "expected a JSON object"))
    },
}  # fmt: skip
# Found when calibration data of text are read.
TEXTS: dict[str, Broken] = {
    "tokenizer is of nothing": Broken(write(TOKENIZER, "{}"), ("tokenizer", "cannot be loaded", TOKENIZER), code=4),
    "no tokenizer": Broken(lambda folder: (folder / TOKENIZER).unlink(), ("tokenizer", "input_ids"), code=4),
    "token with a huge id": Broken(token_id(2**31), (TOKENIZER, "cannot be loaded", AGAIN), code=4),
    "token outside the model": Broken(token_id(4000), ("token id", "vocabulary size"), code=4),
}  # fmt: skip
TABLE: dict[str, Broken] = {
    f"{kind}: {name}": broken
    for kind, rows in (
        ("shard", SHARDS),
        ("index", INDEXES),
        ("config", CONFIGS),
        ("tensor", TENSORS),
        ("side file", SIDE_FILES),
        ("text", TEXTS),
    )
    for name, broken in rows.items()
}
