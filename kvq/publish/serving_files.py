"""What `serving/` holds: settings as the engines read them, commands, and the reasons in words.

Nothing in it names a path of this machine: commands start in the checkpoint's folder, so it can be moved, and the same
run writes the same bytes. The manifest does not hash these files; `kvq serve-config` writes them anew for other GPUs.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvq.checkpoint.writer import umask
from kvq.errors import OutputError
from kvq.publish.engines import SGLANG_VERSIONS
from kvq.publish.parallel import Parallel
from kvq.publish.served import Served
from kvq.publish.sglang_config import BOOTSTRAP_PORT, SglangConfig

SERVING_FOLDER = "serving"
NOTES = "NOTES.md"
SHELL = "#!/usr/bin/env bash\nset -euo pipefail\n"


def yaml_text(config: SglangConfig) -> str:
    """Flat YAML with dashed keys, all that SGLang takes (`utils/server_args_config_parser.py`). JSON's scalars
    are YAML's, so none of them can be read as something else."""
    deployment = config.deployment
    lines = [
        f"# SGLang {deployment.version.name}, {deployment.parallel.tp} x {deployment.gpu.title}, {deployment.role}. "
        f"Start it by {config_name(config, 'sh')}.",
    ]
    return "\n".join([*lines, *(f"{key}: {json.dumps(value)}" for key, value in config.settings.items())]) + "\n"


def is_inside(config: SglangConfig) -> bool:
    """Whether the files lie in the checkpoint's `serving/`; else the settings name the checkpoint's folder."""
    return config.deployment.model_path == "."


def _script(config: SglangConfig, command: str) -> str:
    """Starts in the checkpoint's folder, or beside the settings where they lie outside."""
    return f'{SHELL}cd "$(dirname "$0")"{"/.." if is_inside(config) else ""}\nexec {command}\n'


def config_name(config: SglangConfig, ending: str) -> str:
    return f"sglang-{config.deployment.role}.{ending}"


def sglang_command(config: SglangConfig) -> str:
    """Flags given to the script go on to the server and win over the YAML."""
    words = [f"{key}={value}" for key, value in config.environment.items()]
    place = f"{SERVING_FOLDER}/" if is_inside(config) else ""
    words += ["python3 -m sglang.launch_server --config", place + config_name(config, "yaml"), '"$@"']
    return " ".join(words)


def vllm_command(config: SglangConfig) -> str:
    """vLLM's flags for the same checkpoint. It chooses the INT4 kernel and finds the format by itself.

    Parsers and MTP: vLLM's recipes for GLM and Kimi (docs.vllm.ai, recipes.vllm.ai). Expert parallelism there is over
    all GPUs. vLLM 0.32 reads GLM's two formats of calls with one parser, and by default holds the model to the newer
    (tool_parsers/glm47_moe_tool_parser.py), in which no line ends after the name: a model of the older one then calls
    without arguments (benchmarks/2026-11-30_cpu_vllm.md).
    """
    served, deployment = config.served, config.deployment
    free = "env VLLM_ENFORCE_STRICT_TOOL_CALLING=0 " if served.parsers.tool_call == "glm45" else ""
    words = [f"{free}vllm serve {shlex.quote(deployment.model_path)}", f"--served-model-name {served.name}"]
    words += [f"--tensor-parallel-size {deployment.parallel.tp}"]
    words += ["--enable-expert-parallel"] if deployment.parallel.ep > 1 else []
    words += ["--kv-cache-dtype fp8"] if deployment.kv_dtype == "fp8_e4m3" else []
    words += [f"--max-model-len {deployment.context}"] if deployment.context else []
    parsers = served.parsers
    if parsers.tool_call:
        words += ["--enable-auto-tool-choice", f"--tool-call-parser {parsers.tool_call}"]
    words += [f"--reasoning-parser {parsers.reasoning}"] if parsers.reasoning else []
    if served.has_mtp:
        words.append('--speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\'')
    words += ["--trust-remote-code"] if served.trust_remote_code else []
    return " \\\n  ".join([*words, '"$@"'])


def transformers_snippet(served: Served) -> str:
    """A model that lacks tensors loads without complaint and says nonsense: the snippet looks."""
    trust = ", trust_remote_code=True" if served.trust_remote_code else ""
    return f'''"""{served.name} in transformers, for checks: slow, and experts are unpacked to BF16.

Run it in the checkpoint's folder.
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("."{trust})
model, info = AutoModelForCausalLM.from_pretrained(
    ".", dtype="auto", device_map="auto", output_loading_info=True{trust}
)
assert not info["missing_keys"], f"these weights are random: {{sorted(info['missing_keys'])[:5]}}"
messages = [{{"role": "user", "content": "What is 17 * 3?"}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs.to(model.device), max_new_tokens=256)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
'''


def notes_text(configs: Sequence[SglangConfig], workable: Sequence[Parallel]) -> str:
    """What the settings assume, what fits, and what was left out, in words."""
    first = configs[0]
    served, memory, deployment = first.served, first.memory, first.deployment
    pairs = ", ".join(f"{parallel.tp} x {parallel.ep}" for parallel in workable)
    lines = [
        f"# Serving {served.name}",
        "",
        f"Written for SGLang {deployment.version.name} on {deployment.parallel.tp} x {deployment.gpu.title}; "
        f"`kvq serve-config` writes these files for other GPUs, roles, cache types and versions "
        f"({', '.join(SGLANG_VERSIONS)}).",
        "",
        f"- Sizes: TP {deployment.parallel.tp} x EP {deployment.parallel.ep}. TP x EP that keep {served.cut.step_name} "
        f"of {served.cut.expert_step} and FP8 blocks whole: {pairs}. SGLang loads other sizes too, and misplaces "
        "scales.",
        f"- Memory of each GPU: {memory.weights / 1e9:.1f} GB of weights, {memory.reserve / 1e9:.1f} GB of reserve, "
        f"and {memory.max_total_tokens:,} tokens of KV cache at {memory.kv_bytes_per_token:,} bytes "
        f"({memory.kv_layout}). "
        "This is arithmetic; without `max-total-tokens` SGLang takes what it finds free.",
        f"- Experts: {served.experts}, `moe-runner-backend: {first.settings['moe-runner-backend']}`.",
        f"- KV cache: `{first.settings['kv-cache-dtype']}`, named because `auto` depends on version, model and GPU.",
        f"- Draft layer (MTP): {served.draft_problem or 'used by EAGLE'}.",
        f"- KV integrity: {first.integrity.name}: {first.integrity.reason}.",
        "- Data-parallel attention is not set: its flag differs between versions and was not run.",
    ]
    if any(config.deployment.role != "single" for config in configs):
        lines += ["", *_pair_notes(first)]
    return "\n".join(lines) + "\n"


def router_command() -> str:
    """In front of a pair; PREFILL and DECODE are the roles' hosts."""
    return (
        "python3 -m sglang_router.launch_router --pd-disaggregation --prefill http://PREFILL:30000 "
        f"{BOOTSTRAP_PORT} --decode http://DECODE:30000 --host 0.0.0.0 --port 8000"
    )


def _pair_notes(config: SglangConfig) -> list[str]:
    """Prefill and decode apart."""
    version = config.deployment.version
    checksum = (
        "`disaggregation-enable-kv-checksum` is on in both roles: a request whose pages arrive changed is aborted"
        if version.kv_checksum
        else f"SGLang {version.name} has no KV checksum; 0.5.21 has"
    )
    return [
        "## Prefill and decode apart",
        "",
        "The published set-up is FP8 weights with a BF16 cache for prefill, and INT4 weights with an FP8 cache for "
        "decode. INT4 prefill is slower than FP8, so give the prefill role the FP8 source: `kvq serve-config SOURCE "
        "--role prefill --out FOLDER`. Its cache type must be the decode role's: SGLang compares the two names as text "
        "and refuses the pair (`disaggregation/common/conn.py:try_ensure_parallel_info`), so BF16 prefill with FP8 "
        f"decode does not start. These files name `{config.settings['kv-cache-dtype']}`, page size "
        f"{config.settings['page-size']} and the same sparse attention backends for both; change them in both or in "
        "neither.",
        "",
        f"{checksum}. Transfer: Mooncake over RDMA (`disaggregation-ib-device` names the cards; "
        "`disaggregation-transfer-backend: nixl` is the other choice), the same in both.",
        "",
        f"    {router_command()}",
        "",
        "with each role started as `serving/sglang-ROLE.sh --host 0.0.0.0 --port 30000`.",
    ]


def serving_texts(configs: Sequence[SglangConfig], workable: Sequence[Parallel]) -> dict[str, str]:
    """File name -> text, for SGLang's roles; vLLM and transformers beside them where one of the roles is `single`."""
    texts: dict[str, str] = {}
    for config in configs:
        texts[config_name(config, "yaml")] = yaml_text(config)
        texts[config_name(config, "sh")] = _script(config, _env(config))
    single = next((config for config in configs if config.deployment.role == "single"), None)
    if single is not None:
        texts["vllm.sh"] = _script(single, vllm_command(single))
        texts["transformers_check.py"] = transformers_snippet(single.served)
    return texts | {NOTES: notes_text(configs, workable)}


def _env(config: SglangConfig) -> str:
    return f"env {sglang_command(config)}" if config.environment else sglang_command(config)


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Into a folder that may be there. Raises OutputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                (folder / name).chmod(0o777 & ~umask())
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written ({error.strerror}). Choose another --out.") from None
