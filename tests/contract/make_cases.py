"""What kvq writes, for SGLang to read in an environment of its own: checkpoints, settings, configs.

    python -m tests.contract.make_cases FOLDER

FOLDER gets `checkpoints.json` (outputs of the tiny checkpoints, with the sizes that kvq calls workable, and their codes
worked out without kvq's packing), `cuts.json` (awkward shapes, with what kvq says of each size), `yaml.json` (settings
for published and tiny models by version, role and cache type) and `schemes.json` (quantization configs, with what kvq
planned for each module), and `router.json` (the command for a pair).
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvq.checkpoint.dequant import load_weight
from kvq.checkpoint.facts import known_aliases, known_checkpoint, published_index
from kvq.checkpoint.formats import detect_format, find_quantization_config
from kvq.checkpoint.reader import CheckpointReader
from kvq.errors import RecipeError
from kvq.publish.engines import SGLANG_VERSIONS
from kvq.publish.kv_cache import KV_DTYPES
from kvq.publish.parallel import Parallel, cut_problems
from kvq.publish.plan_report import output_kinds
from kvq.publish.serve import ServeRequest, make_serving
from kvq.publish.served import Served, served_from_folder, served_from_plan
from kvq.publish.serving_files import router_command, yaml_text
from kvq.publish.sglang_config import ROLES, workable
from kvq.recipes.models import known_models
from kvq.recipes.plan import QuantPlan, resolve_plan
from kvq.recipes.schema import load_recipe
from kvq.recipes.scheme import output_config
from tests.checkpoints import TINY, Tiny, make_checkpoint
from tests.runs import quantize, write_calibration

CODES = "codes.bin"  # safetensors under another name, so that no loader takes it for a shard
TESTED_VERSIONS = ("0.5.17", "0.5.23")
# Wide enough to be cut: eight heads, experts of eight groups, FP8 blocks of the published size where there are blocks.
WIDE = replace(TINY, hidden_size=256, moe_intermediate_size=256, intermediate_size=512, num_attention_heads=8,
               q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128,
               index_head_dim=128)  # fmt: skip
CHECKPOINTS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "glm-5": ("glm_moe_dsa", "fp8_block", {"block_size": (128, 128)}),
    "glm-4.7": ("glm4_moe", "fp8_channel", {}),
    "kimi-k2": ("kimi_k2", "fp8_block", {"block_size": (128, 128)}),
    "deepseek-v3": ("deepseek_v3", "bf16", {}),
}


BLOCKS: dict[str, Any] = {"block_size": (128, 128)}
CUT = replace(WIDE, num_hidden_layers=2, num_nextn_predict_layers=0, moe_intermediate_size=512, intermediate_size=1024)


@dataclass(frozen=True)
class Awkward:
    """A shape, and the sizes (TP, EP) at which SGLang is to be asked what it makes of it."""

    dims: Tiny
    sizes: tuple[tuple[int, int], ...]
    group: int = 128
    family: str = "kimi_k2"
    source: str = "fp8_block"


AWKWARD: Mapping[str, Awkward] = {
    "even": Awkward(CUT, ((1, 1), (4, 1), (4, 4))),
    "shared-experts": Awkward(replace(CUT, moe_intermediate_size=384), ((1, 1), (2, 2))),
    "dense-mlp": Awkward(replace(CUT, intermediate_size=384), ((1, 1), (2, 1))),
    # Scales of q_a_proj and kv_a_proj_with_mqa are as many as their sum asks for, so that nothing stops the loader.
    "q-lora": Awkward(replace(CUT, q_lora_rank=224), ((1, 1),)),
    "heads-of-160": Awkward(replace(CUT, qk_nope_head_dim=96), ((2, 1), (4, 1))),
    "o-proj": Awkward(replace(CUT, num_attention_heads=2, v_head_dim=64), ((1, 1), (2, 1))),
    "six-heads": Awkward(replace(CUT, num_attention_heads=6), ((2, 1), (4, 1))),
    "six-experts": Awkward(replace(CUT, n_routed_experts=6), ((2, 2), (4, 4))),
    "hidden": Awkward(replace(CUT, hidden_size=320), ((1, 1),), group=32),
    "key-value-heads": Awkward(replace(CUT, head_dim=64), ((1, 1), (2, 1)), family="glm4_moe"),
    "odd-vocabulary": Awkward(replace(CUT, vocab_size=130), ((4, 1),)),
    "half-groups": Awkward(replace(CUT, moe_intermediate_size=192), ((2, 1),), 64, "deepseek_v3", "bf16"),
    "slices-of-96": Awkward(replace(CUT, moe_intermediate_size=192), ((2, 1),), 32, "deepseek_v3", "bf16"),
    "no-kernel": Awkward(replace(CUT, hidden_size=192), ((1, 1),), 64, "deepseek_v3", "bf16"),
}


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def save_codes(origin: Path, out: Path) -> None:
    """Beside the output, what its packed words should hold: the source's weights in steps of the stored scales. Nothing
    here packs or unpacks."""
    source, written = CheckpointReader(origin), CheckpointReader(out)
    stored = detect_format(source.config, source.index)
    codes = {}
    for name in (name for name in written.index.tensors if name.endswith(".weight_packed")):
        weight = load_weight(source, stored, name.removesuffix(".weight_packed"))
        scale = written.tensor(name.replace("_packed", "_scale")).float()
        steps = weight / scale.repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
        codes[name] = steps.round().clamp(-8, 7).to(torch.int8)
    save_file(codes, out / CODES)


def make_cuts(folder: Path) -> Iterator[dict[str, Any]]:
    for name, case in AWKWARD.items():
        origin = make_checkpoint(folder / "cut-sources" / name, case.family, case.source, case.dims, **BLOCKS)
        out = folder / "cuts" / name
        quantize(origin, out, folder / "calibration.jsonl", "solver=rtn", f"group_size={case.group}")
        served = served_from_folder(out)
        yield {
            "name": name,
            "folder": str(out),
            "group": case.group,
            "sizes": [[tp, ep, cut_problems(served.cut, Parallel(tp, ep))] for tp, ep in case.sizes],
            "prefix": served.facts.arch.prefix,
            "text_config": dict(served.facts.text_config),
        }


def make_checkpoints(folder: Path) -> Iterator[dict[str, Any]]:
    calibration = write_calibration(folder / "calibration.jsonl")
    for name, (family, source, options) in CHECKPOINTS.items():
        origin = make_checkpoint(folder / "sources" / name, family, source, WIDE, **options)
        out = folder / "outputs" / name
        quantize(origin, out, calibration, "solver=rtn")
        save_codes(origin, out)
        served = served_from_folder(out)
        yield {
            "name": name,
            "folder": str(out),
            "workable": [[parallel.tp, parallel.ep] for parallel in workable(served, 8)],
            "has_mtp": served.has_mtp,
            "prefix": served.facts.arch.prefix,
            "text_config": dict(served.facts.text_config),
        }


def known_plans() -> Iterator[tuple[str, QuantPlan, Mapping[str, Any]]]:
    """Plan of each published checkpoint whose facts ship, with the config that the output gets. Of those that differ in
    nothing but their context length, one stands for all."""
    seen: set[str] = set()
    for alias in known_aliases():
        known = known_checkpoint(alias)
        layout = re.sub(r'"max_position_embeddings": \d+', "", json.dumps(known.config, sort_keys=True))
        if layout in seen:
            continue
        seen.add(layout)
        plan = resolve_plan(load_recipe(known_models()[alias].default_recipe), known.config, published_index(known))
        described = plan.quantization_config
        text = plan.facts.arch.text_config
        yield alias, plan, known.config if described is None else output_config(known.config, described, text)


def settings_of(served: Served, model: Path) -> Iterator[dict[str, Any]]:
    for version in (v for v in SGLANG_VERSIONS if v in TESTED_VERSIONS):
        for kv_dtype in KV_DTYPES:
            serving = _first_that_fits(served, version, kv_dtype)
            for config in serving.configs:
                name = f"{version}-{config.deployment.role}-{kv_dtype}.yaml"
                (model / name).write_text(yaml_text(config), encoding="utf-8")
                yield {
                    "version": version, "yaml": str(model / name), "model": str(model), "settings": config.settings,
                }  # fmt: skip


def _first_that_fits(served: Served, version: str, kv_dtype: Any) -> Any:
    for gpus in (8, 4, 2, 1):
        try:
            return make_serving(served, ServeRequest(gpus=gpus, roles=ROLES, kv_dtype=kv_dtype, version=version))
        except RecipeError:
            continue
    raise AssertionError(f"nothing fits {served.name}")


def planned_schemes(plan: QuantPlan) -> dict[str, str]:
    """Linear module -> fp8, int4 or plain, as its tensors are planned. Of the experts the first and the last."""
    kinds: dict[str, str] = {}
    middle = re.compile(rf"\.mlp\.experts\.(?!0\.|{plan.facts.num_experts - 1}\.)")
    for name, tensor in plan.tensors.items():
        if middle.search(name):
            continue
        module, _, part = name.rpartition(".")
        if tensor.tensor_class in ("embeddings", "vision", "norms") or ".embed_tokens" in name:
            continue
        if part == "weight_packed":
            kinds[module] = "int4"
        elif part == "weight" and len(tensor.shape) == 2:
            kinds[module] = "fp8" if tensor.dtype == "F8_E4M3" else "plain"
    return kinds


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    rows = list(make_checkpoints(folder))
    write(folder / "checkpoints.json", rows)
    write(folder / "cuts.json", list(make_cuts(folder)))
    settings: list[dict[str, Any]] = []
    for row in rows:
        settings += settings_of(served_from_folder(Path(row["folder"])), Path(row["folder"]))
    schemes = []
    for alias, plan, config in known_plans():
        model = folder / "published" / alias
        model.mkdir(parents=True)
        write(model / "config.json", config)
        served = served_from_plan(plan, output_kinds(plan), model, config, alias)
        settings += settings_of(served, model)
        schemes.append({
            "name": alias, "model_type": plan.facts.arch.model_type,
            "quantization_config": find_quantization_config(config), "modules": planned_schemes(plan),
            "block": plan.source.block, "layers": plan.facts.num_layers, "prefix": plan.facts.arch.prefix,
        })  # fmt: skip
    write(folder / "yaml.json", settings)
    write(folder / "router.json", router_command())
    write(folder / "schemes.json", schemes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
