"""The settings that SGLang serves a checkpoint with, correct by construction, each with its reason.

Sources are files of SGLang 0.5.23 below `sglang/srt` unless another version is named.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal, get_args

from kvq.errors import RecipeError
from kvq.publish.engines import SglangVersion
from kvq.publish.gpus import Gpu
from kvq.publish.kv_cache import KvDtype
from kvq.publish.parallel import TRITON_INT4_GROUPS, Parallel, cut_problems, marlin_takes
from kvq.publish.served import Served
from kvq.publish.serving_memory import CHUNK, MAX_RUNNING, MTP_TOKENS, PAGE_SIZE, MemoryPlan, kv_layout_of, memory_plan

Role = Literal["single", "prefill", "decode"]
IntegrityChoice = Literal["auto", "page-tags", "kv-canary", "none"]
ROLES: tuple[Role, ...] = get_args(Role)
Settings = dict[str, str | int | float | bool]
# NVIDIA only: the INT4 kernels and the sparse attention's backends of other makers were not looked at.
ARCHITECTURES: Mapping[str, str] = {"h100": "hopper", "h200": "hopper", "b200": "blackwell", "b200-192": "blackwell"}
# (prefill, decode). arg_groups/overrides.py:_dsa_split_backend_resolution (0.5.17 the same). Named here so that both
# roles of a pair have the same: the backend decides how a cached token is laid out (576 or 656 bytes).
DSA_BACKENDS: Mapping[tuple[str, KvDtype], tuple[str, str]] = {
    ("hopper", "bf16"): ("flashmla_sparse", "fa3"),
    ("hopper", "fp8_e4m3"): ("flashmla_kv", "flashmla_kv"),
    ("blackwell", "bf16"): ("flashmla_sparse", "trtllm"),
    ("blackwell", "fp8_e4m3"): ("trtllm", "trtllm"),
}
# disaggregation/common/conn.py compares the resolved names as text: `auto`, `bf16` and `bfloat16` are three names.
KV_NAMES: Mapping[KvDtype, str] = {"bf16": "bfloat16", "fp8_e4m3": "fp8_e4m3"}
PLUGIN_GROUP, PLUGIN_MODULE = "sglang.srt.plugins", "kvq.integrity"
TAGS_SWEEP_SECONDS = 60
BOOTSTRAP_PORT = 8998


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is asked for: the GPUs, the role and the engine."""

    gpu: Gpu
    parallel: Parallel
    role: Role
    kv_dtype: KvDtype
    version: SglangVersion
    context: int | None = None
    integrity: IntegrityChoice = "auto"
    model_path: str = "."

    @property
    def architecture(self) -> str:
        """Raises RecipeError for a GPU whose kernels were not looked at."""
        known = ARCHITECTURES.get(self.gpu.name)
        if known is None:
            raise RecipeError(
                f"--gpu {self.gpu.name}: kvq writes SGLang settings for {', '.join(ARCHITECTURES)} only; start from "
                "the engine's own defaults there."
            )
        return known


@dataclass(frozen=True, slots=True)
class Integrity:
    """The strongest check of the KV cache that starts with this model."""

    name: str
    reason: str
    settings: Settings
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SglangConfig:
    """`settings` are the YAML's keys; `environment` stands before the command."""

    served: Served
    deployment: Deployment
    settings: Settings
    environment: Mapping[str, str]
    memory: MemoryPlan
    integrity: Integrity


def page_tags_installed() -> bool:
    """Whether kvq's page-tag plugin is registered in this environment."""
    return any(entry.value.startswith(PLUGIN_MODULE) for entry in entry_points(group=PLUGIN_GROUP))


def choose_integrity(served: Served, choice: IntegrityChoice) -> Integrity:
    """Of `auto`: kvq's plugin, else SGLang's canary where the pool has one, else nothing. Raises RecipeError for a
    canary with which the server would not start.

    `kv_canary/pool_patcher/api.py:_POOL_ATTACHERS` has no MLA and no DSA pool: enabling the canary there ends the start
    with NotImplementedError. `kv_canary/api.py:install_canary` refuses the piecewise prefill graph.
    """
    attention = served.facts.arch.attention
    if choice == "none":
        return Integrity("none", "as asked", {}, {})
    if choice == "page-tags" or (choice == "auto" and page_tags_installed()):
        environment = {"KVQ_KV_TAGS": "abort", "KVQ_KV_TAGS_SWEEP_SECONDS": str(TAGS_SWEEP_SECONDS)}
        reason = (
            "a page that changed hands aborts the request that still reads it; needs kvq in the engine's environment, "
            "without it the variables do nothing"
        )
        return Integrity("kvq page tags", reason, {}, environment)
    if attention == "gqa":
        settings: Settings = {
            "kv-canary": "log", "kv-canary-real-data": "partial", "kv-canary-sweep-interval": 1000,
            "disable-prefill-cuda-graph": True,
        }  # fmt: skip
        return Integrity("kv-canary", "SGLang's own check, which logs and aborts no request", settings, {})
    unsupported = f"SGLang's kv-canary knows no {attention.upper()} pool: with it the server would not start"
    if choice == "kv-canary":
        raise RecipeError(f"--integrity kv-canary: {unsupported}. Use auto.")
    return Integrity("none", f"kvq's page-tag plugin is not installed here, and {unsupported}", {}, {})


def workable(served: Served, gpus: int) -> list[Parallel]:
    """TP x EP sizes up to `gpus` at which nothing is cut within a group, a block or a head."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size <= gpus]
    pairs = [Parallel(tp, ep) for tp in sizes for ep in sizes if ep <= tp]
    return [parallel for parallel in pairs if not cut_problems(served.cut, parallel)]


def choose_parallel(served: Served, gpus: int, tp: int | None, ep: int | None) -> Parallel:
    """All GPUs as one server, with as little expert parallelism as works. Raises RecipeError that lists what works.

    SGLang checks none of this: it loads, and misplaces the scales of a group that was cut.
    """
    works = workable(served, gpus)
    wanted = tp or gpus
    fitting = [p for p in works if p.tp == wanted and ep in (None, p.ep)]
    if fitting:
        return min(fitting, key=lambda parallel: parallel.ep)
    asked = Parallel(wanted, ep or 1)
    listed = ", ".join(f"{p.tp} x {p.ep}" for p in works) or "none"
    raise RecipeError(
        f"TP {asked.tp} x EP {ep or 'any'}: {'; '.join(cut_problems(served.cut, asked)) or 'does not fit'}. TP x EP "
        f"that work with up to {gpus} GPUs: {listed}."
    )


def _moe_runner(served: Served, deployment: Deployment) -> str:
    """The INT4 kernel by name: `auto` would choose Marlin on Hopper, whatever its tiles, and on SM100 by version and
    group."""
    if served.experts != "INT4":
        return "auto"
    blackwell = deployment.architecture == "blackwell"
    triton = blackwell and deployment.version.triton_int4_sm100 and served.cut.expert_step in TRITON_INT4_GROUPS
    return "triton" if triton or not marlin_takes(served.cut, deployment.parallel) else "marlin"


def _attention(served: Served, deployment: Deployment) -> Iterator[tuple[str, str | int]]:
    yield "kv-cache-dtype", KV_NAMES[deployment.kv_dtype]
    yield "page-size", PAGE_SIZE
    if served.facts.arch.attention == "dsa":
        backends = DSA_BACKENDS[deployment.architecture, deployment.kv_dtype]
        for stage, backend in zip(("prefill", "decode"), backends, strict=True):
            yield deployment.version.dsa_key(stage), backend


def _experts(served: Served, deployment: Deployment) -> Iterator[tuple[str, str | bool]]:
    """A fused shared expert would be dropped beside INT4 experts, with at most a warning (models/deepseek_v2.py and
    glm4_moe.py:shared_experts_fusion_disable_reason); the all-to-all back ends have no INT4 path
    (layers/moe/ep_moe/layer.py)."""
    if served.experts == "INT4":
        yield "quantization", "compressed-tensors"
    yield "moe-runner-backend", _moe_runner(served, deployment)
    yield "moe-a2a-backend", "none"
    yield "disable-shared-experts-fusion", True


def _disaggregation(deployment: Deployment) -> Iterator[tuple[str, str | int | bool]]:
    if deployment.role == "single":
        return
    yield "disaggregation-mode", deployment.role
    yield "disaggregation-transfer-backend", "mooncake"
    if deployment.role == "prefill":
        yield "disaggregation-bootstrap-port", BOOTSTRAP_PORT
    if deployment.version.kv_checksum:
        yield "disaggregation-enable-kv-checksum", True


def sglang_config(served: Served, deployment: Deployment) -> SglangConfig:
    """Raises RecipeError for sizes that break groups or blocks, and for what does not fit in memory."""
    found = cut_problems(served.cut, deployment.parallel)
    assert not found, f"choose_parallel let {found} through"
    integrity = choose_integrity(served, deployment.integrity)
    blackwell, draft = deployment.architecture == "blackwell", served.draft_problem is None
    layout = kv_layout_of(served, deployment.kv_dtype, deployment.parallel, blackwell)
    memory = memory_plan(
        served, deployment.gpu, deployment.parallel, layout, deployment.role, draft=draft,
        canary=integrity.name == "kv-canary",
    )  # fmt: skip
    settings: Settings = {
        "model-path": deployment.model_path, "served-model-name": served.name,
        "tp-size": deployment.parallel.tp, "ep-size": deployment.parallel.ep,
        "mem-fraction-static": memory.mem_fraction, "max-total-tokens": memory.max_total_tokens,
        "chunked-prefill-size": CHUNK, "max-running-requests": MAX_RUNNING,
    }  # fmt: skip
    settings |= {} if deployment.context is None else {"context-length": deployment.context}
    settings |= dict(_attention(served, deployment)) | dict(_experts(served, deployment))
    parsers = served.parsers
    settings |= {} if parsers.tool_call is None else {"tool-call-parser": parsers.tool_call}
    settings |= {} if parsers.reasoning is None else {"reasoning-parser": parsers.reasoning}
    if draft:  # docs/basic_usage/glm45.md of SGLang; the draft layer is read from the same folder
        settings |= {
            "speculative-algorithm": "EAGLE", "speculative-num-steps": MTP_TOKENS - 1, "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": MTP_TOKENS,
        }  # fmt: skip
    settings |= dict(_disaggregation(deployment)) | integrity.settings | {"enable-metrics": True}
    settings |= {"trust-remote-code": True} if served.trust_remote_code else {}
    return SglangConfig(served, deployment, settings, integrity.environment, memory, integrity)
