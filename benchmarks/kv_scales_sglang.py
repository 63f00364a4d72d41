"""FP8 KV cache in a real SGLang: unquantized, at scale 1.0, and with calibrated scales through kvq's plugin.

The test checkpoint is made from a trained one so that scale 1.0 must saturate, and so that its function stays what it
was: GQA keys are enlarged in k_norm and made up for in q_norm, values in v_proj and o_proj; MLA's latent in
kv_a_layernorm and kv_b_proj. All factors are powers of two, so values keep their digits and only exponents move.

On any machine, with kvq's environment (a minute on a CPU; WORK then holds all that the GPU machine needs):

    python benchmarks/kv_scales_sglang.py prepare SOURCE... --calibration FILE... --texts FILE --out WORK

On the GPU machine, with SGLang's environment (kvq itself need not be installed there):

    python benchmarks/kv_scales_sglang.py measure WORK [--engine JSON]

Perplexity is of prompts that are prefilled in pieces of 32 tokens: all but the first piece attend to keys and values
read back from the cache. It counts the tokens after the first piece.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
FACTOR = 256.0  # a trained |K| of 10 becomes 2,560; FP8 at scale 1.0 ends at 448
PIECE = 32
NUM_TEXTS = 16
TEXT_LENGTH = 1200
INSIDE = "-scales-inside"
ENGINE = {
    "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none", "disable_cuda_graph": True,
    "disable_shared_experts_fusion": True, "disable_overlap_schedule": True, "disable_radix_cache": True,
    "mem_fraction_static": 0.08, "max_running_requests": 16, "context_length": 2048, "chunked_prefill_size": PIECE,
    "moe_runner_backend": "triton", "log_level": "warning",
}  # fmt: skip


def enlarged(name: str, tensor: Any, attention: str) -> Any:
    """The tensor with its factor; scales of FP8 weights carry the factor where there are any."""
    import torch

    rules = {
        "gqa": {"k_norm.weight": FACTOR, "q_norm.weight": 1 / FACTOR, "v_proj.weight_scale": FACTOR,
                "v_proj.bias": FACTOR, "o_proj.weight_scale": 1 / FACTOR},
        "mla": {"kv_a_layernorm.weight": FACTOR, "kv_b_proj.weight_scale_inv": 1 / FACTOR,
                "kv_b_proj.weight_scale": 1 / FACTOR},
    }[attention]  # fmt: skip
    factor = next((value for suffix, value in rules.items() if name.endswith(f"self_attn.{suffix}")), None)
    return tensor if factor is None else (tensor.to(torch.float64) * factor).to(tensor.dtype)


def make_enlarged(source: Path, out: Path) -> str:
    """Copy a checkpoint with enlarged keys and values; its kind of attention."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    attention = "gqa" if json.loads((source / "config.json").read_text())["model_type"] == "glm4_moe" else "mla"
    shutil.copytree(source, out)
    for shard in sorted(source.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            tensors = {name: enlarged(name, file.get_tensor(name), attention) for name in file.keys()}
        (out / shard.name).unlink()
        save_file(tensors, out / shard.name, metadata={"format": "pt"})
    return attention


def with_checkpoint_scales(enlarged_folder: Path, scales: Path, out: Path) -> None:
    """The checkpoint with the scales inside, under names that SGLang's MLA loader takes; to be served as it is."""
    import torch
    from safetensors.torch import save_file

    shutil.copytree(enlarged_folder, out)
    layers = json.loads(scales.read_text())["layers"]
    tensors = {
        f"model.layers.{layer}.self_attn.{letter}_proj.{letter}_scale": torch.tensor(row[f"{letter}_scale"])
        for layer, row in layers.items() for letter in "kv"
    }  # fmt: skip
    save_file(tensors, out / "model-kv-scales.safetensors", metadata={"format": "pt"})
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "model-kv-scales.safetensors")
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


def prepare(arguments: argparse.Namespace) -> None:
    """Test checkpoints, and their scales by `kvq calibrate-kv`."""
    work: Path = arguments.out
    (work / "models").mkdir(parents=True)
    rows = [json.loads(line)["text"][:TEXT_LENGTH] for line in arguments.texts.read_text().splitlines()[:NUM_TEXTS]]
    (work / "texts.json").write_text(json.dumps(rows))
    for source, data in zip(arguments.sources, arguments.calibration, strict=True):
        folder = work / "models" / source.name
        attention = make_enlarged(source, folder)
        command = [sys.executable, "-m", "kvq", "calibrate-kv", str(folder), "--calibration", str(data), "--held-out",
                   str(arguments.texts), "--max-rows", "8", "--num-samples", "32", "--max-seq-length", "512", "--out",
                   str(work / "scales" / source.name)]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        subprocess.run(command, check=True, env=environment)
        (work / "scales" / source.name / "attention").write_text(attention)


def plugin_path(work: Path) -> Path:
    """A folder with this repository's entry points as an installed package has them, for machines without kvq."""
    entry_points = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
    folder = work / "entry-points"
    information = folder / "kvq-0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kvq\nVersion: 0\n")
    groups = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in rows.items()) for group, rows in entry_points.items()]
    (information / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    return folder


def arms(work: Path) -> list[dict[str, Any]]:
    """Every engine to start: model, KV dtype, plugin or not."""
    found: list[dict[str, Any]] = []
    for folder in sorted(path for path in (work / "models").iterdir() if not path.name.endswith(INSIDE)):
        scales = work / "scales" / folder.name / "serving" / "kv_cache_scales.json"
        if (work / "scales" / folder.name / "attention").read_text() == "mla":
            inside = folder.with_name(folder.name + INSIDE)
            shutil.rmtree(inside, ignore_errors=True)
            with_checkpoint_scales(folder, scales, inside)
            found.append({"name": "FP8, scales in the checkpoint, no plugin", "model": inside, "dtype": "fp8_e4m3"})
        found += [
            {"name": "BF16", "model": folder, "dtype": "bfloat16"},
            {"name": "FP8 at 1.0", "model": folder, "dtype": "fp8_e4m3"},
            {"name": "FP8 calibrated, through the plugin", "model": folder, "dtype": "fp8_e4m3", "scales": scales},
        ]
    return found


def measure(arguments: argparse.Namespace) -> None:
    """One process for each engine: the first alone, as it compiles kernels for all, then up to three at a time."""
    entry_points = plugin_path(arguments.work)
    waiting, running, results = arms(arguments.work), [], []
    started = time.monotonic()
    while waiting or running:
        limit = 3 if results else 1
        while waiting and len(running) < limit:
            arm = waiting.pop(0)
            number = len(results) + len(running)
            environment = {**os.environ, "SGLANG_ENABLE_JIT_DEEPGEMM": "0", "PYTHONPATH": os.pathsep.join(
                [str(REPOSITORY), str(entry_points), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
            environment.pop("KVQ_KV_SCALES", None)
            if "scales" in arm:
                environment["KVQ_KV_SCALES"] = str(arm["scales"])
            extra = {
                **ENGINE,
                **json.loads(arguments.engine),
                "kv_cache_dtype": arm["dtype"],
                "port": 31000 + 200 * number,
            }
            command = [sys.executable, __file__, "serve", str(arm["model"]), str(arguments.work / "texts.json"),
                       json.dumps(extra)]  # fmt: skip
            log = (arguments.work / f"log-{arm['model'].name}-{len(waiting)}.txt").open("w+")
            running.append((arm, subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT), log))
        for item in [item for item in running if item[1].poll() is not None]:
            running.remove(item)
            results.append(_result(*item))
            say(json.dumps(results[-1]))
        if time.monotonic() - started > arguments.limit:
            for _, process, _ in running:
                process.kill()
            sys.exit(f"stopped after {arguments.limit} s")
        time.sleep(1)
    for row in sorted(results, key=lambda row: (row["model"], row["kv_cache"])):
        say(f"{row['model']:40} {row['kv_cache']:42} {row.get('perplexity', 'failed')}")


def _result(arm: dict[str, Any], process: subprocess.Popen[bytes], log: Any) -> dict[str, Any]:
    log.seek(0)
    lines = log.read().splitlines()
    found = next((json.loads(line[7:]) for line in reversed(lines) if line.startswith("RESULT ")), None)
    row = {"model": arm["model"].name, "kv_cache": arm["name"], "exit": process.returncode}
    if found is None:
        return {**row, "log": "\n".join(lines[-25:])}
    said = [line for line in lines if "kvq:" in line]
    return {**row, **found, "plugin": said[:1]}


def serve(arguments: argparse.Namespace) -> None:
    """One engine in this process: prompt log probabilities of the texts."""
    import sglang

    engine = sglang.Engine(model_path=arguments.model, **json.loads(arguments.engine))
    texts = json.loads(Path(arguments.texts).read_text())
    outs = engine.generate(texts, {"temperature": 0, "max_new_tokens": 8}, return_logprob=True, logprob_start_len=0)
    kept = [[entry[0] for entry in out["meta_info"]["input_token_logprobs"]][PIECE:] for out in outs]
    values = [value for row in kept for value in row]
    bad = sum(value is None or not math.isfinite(value) for value in values)
    good = [value for value in values if value is not None and math.isfinite(value)]
    perplexity = math.exp(min(700.0, -sum(good) / len(good))) if good else math.inf
    found = {"perplexity": round(perplexity, 4), "tokens": len(values), "not_finite": bad}
    say("RESULT " + json.dumps({**found, "first_answer": outs[0]["text"][:60]}))
    engine.shutdown()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("prepare")
    one.add_argument("sources", nargs="+", type=Path)
    one.add_argument("--calibration", nargs="+", type=Path, required=True, help="one file for each source")
    one.add_argument("--texts", type=Path, required=True, help="held-out JSON lines with `text`")
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(run=prepare)
    two = commands.add_parser("measure")
    two.add_argument("work", type=Path)
    two.add_argument("--engine", default="{}", help="JSON of engine arguments to change")
    two.add_argument("--limit", type=int, default=560, help="seconds")
    two.set_defaults(run=measure)
    three = commands.add_parser("serve")
    three.add_argument("model")
    three.add_argument("texts")
    three.add_argument("engine")
    three.set_defaults(run=serve)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
