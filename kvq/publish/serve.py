"""From a request to the files of `serving/`: the one place where sizes, memory, settings and texts meet."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvq.errors import RecipeError
from kvq.publish.engines import sglang_version
from kvq.publish.gpus import find_gpu
from kvq.publish.kv_cache import KvDtype
from kvq.publish.parallel import Parallel
from kvq.publish.served import Served
from kvq.publish.serving_files import NOTES, serving_texts, sglang_command, vllm_command
from kvq.publish.sglang_config import (
    ROLES,
    Deployment,
    IntegrityChoice,
    Role,
    SglangConfig,
    choose_parallel,
    sglang_config,
    workable,
)  # fmt: skip

DEFAULT_GPUS = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """Flags of `kvq serve-config`. A `model_path` other than `.` means that the files lie outside the checkpoint."""

    gpu: str = "h200"
    gpus: int = 8
    tp: int | None = None
    ep: int | None = None
    roles: tuple[Role, ...] = ("single",)
    kv_dtype: Literal["auto", "bf16", "fp8_e4m3"] = "auto"
    version: str | None = None
    context: int | None = None
    integrity: IntegrityChoice = "auto"
    model_path: str = "."


@dataclass(frozen=True, slots=True)
class Serving:
    """Settings of each role, the sizes that work, and the files."""

    configs: tuple[SglangConfig, ...]
    workable: tuple[Parallel, ...]
    texts: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        first = self.configs[0]
        deployment = first.deployment
        return {
            "name": first.served.name,
            "experts": first.served.experts,
            "gpu": deployment.gpu.name,
            "engine_version": deployment.version.name,
            **asdict(deployment.parallel),
            "workable": [[parallel.tp, parallel.ep] for parallel in self.workable],
            "memory": asdict(first.memory),
            "integrity": {"name": first.integrity.name, "reason": first.integrity.reason},
            "roles": {
                config.deployment.role: {
                    "settings": config.settings, "environment": dict(config.environment),
                    "command": sglang_command(config),
                }
                for config in self.configs
            },
            "vllm": vllm_command(first),
        }  # fmt: skip


def make_serving(served: Served, request: ServeRequest) -> Serving:
    """Raises RecipeError for sizes, GPUs, versions and memory that do not work, and says which do."""
    version, gpu = sglang_version(request.version), find_gpu(request.gpu)
    parallel = choose_parallel(served, request.gpus, request.tp, request.ep)
    longest = served.facts.max_positions
    if request.context is not None and request.context > longest:
        raise RecipeError(f"--context {request.context}: the model's config allows {longest} positions.")
    kv_dtype: KvDtype = "bf16" if request.kv_dtype == "auto" else request.kv_dtype
    shared = (kv_dtype, version, request.context, request.integrity, request.model_path)
    configs = tuple(sglang_config(served, Deployment(gpu, parallel, role, *shared)) for role in request.roles)
    sizes = tuple(workable(served, request.gpus))
    return Serving(configs, sizes, serving_texts(configs, sizes))


def default_serving(served: Served) -> Mapping[str, str]:
    """The files that a run leaves beside its output: all roles, for as many of eight H200 as the sizes allow.

    Where nothing fits, a note with the reason stands in for them: the checkpoint is whole all the same.
    """
    reason = ""
    for gpus in DEFAULT_GPUS:
        try:
            return make_serving(served, ServeRequest(gpus=gpus, roles=ROLES)).texts
        except RecipeError as error:
            reason = reason or str(error)
    text = f"# Serving {served.name}\n\nNo settings for up to 8 x H200: {reason}\n\nSee `kvq serve-config`.\n"
    return {NOTES: text}
