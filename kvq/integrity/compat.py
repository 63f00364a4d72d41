"""Which SGLang this plugin fits. It hooks names inside the engine, so it fits the versions that were read and run.

The names, their parameters and the fields of a request that it relies on are checked when the server starts. Where one
is missing or changed, nothing is hooked.
"""

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

SUPPORTED_VERSIONS = ("0.5.17",)
_MEM = "sglang.srt.mem_cache"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_RADIX = f"{_MEM}.radix_cache.RadixCache"
_TOKEN = f"{_MEM}.allocator.token.TokenToKVPoolAllocator"
_PAGED = f"{_MEM}.allocator.paged.PagedTokenToKVPoolAllocator"

# Hooked name -> its parameters, without self.
HOOKED: dict[str, tuple[str, ...]] = {
    f"{_MEM}.allocation.alloc_for_extend": ("batch",),
    f"{_MEM}.allocation.alloc_for_decode": ("batch", "token_per_req"),
    f"{_MEM}.allocation.alloc_for_spec_decode": (
        "tree_cache", "req_to_token_pool", "reqs", "req_pool_indices", "cur_kv_lens", "cur_kv_lens_cpu", "nxt_kv_lens",
        "nxt_kv_lens_cpu", "num_needed_tokens", "batch",
    ),
    f"{_MEM}.common.release_kv_cache": ("req", "tree_cache", "is_insert"),
    f"{_TOKEN}.free": ("free_index",),
    f"{_TOKEN}.clear": (),
    f"{_PAGED}._release_page_ids": ("page_ids",),
    f"{_PAGED}.clear": (),
    f"{_RADIX}.insert": ("params",),
    f"{_RADIX}.cache_finished_req": ("req", "is_insert", "kv_len_to_handle"),
    f"{_RADIX}.cache_unfinished_req": ("req", "chunked"),
    f"{_RADIX}._delete_leaf": ("node",),
    f"{_RADIX}.reset": (),
    f"{_SCHEDULER}.__init__": (
        "server_args", "port_args", "gpu_id", "tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank",
        "dp_rank",
    ),
    f"{_SCHEDULER}.get_next_batch_to_run": ("running_batch", "last_batch"),
    f"{_SCHEDULER}.run_batch": ("batch", "pp_proxy_tensors"),
    f"{_SCHEDULER}.process_batch_result": ("batch", "result"),
    f"{_SCHEDULER}.process_pending_chunked_abort": (),
    f"{_STREAMER}.stream_output": ("reqs", "return_logprob", "skip_req"),
    f"{_SCHEDULER}._add_request_to_queue": ("req", "is_retracted"),
    f"{_SCHEDULER}.on_idle": (),
    f"{_SCHEDULER}.get_internal_state": ("recv_req",),
}  # fmt: skip
# Class -> attributes that its constructor must set.
FIELDS: dict[str, tuple[str, ...]] = {
    "sglang.srt.managers.schedule_batch.Req": (
        "rid", "req_pool_idx", "kv", "kv_committed_len", "output_ids", "finished_reason", "finished_len", "to_finish",
        "cache_protected_len", "prefix_indices", "last_node", "extra_key", "is_retracted", "skip_radix_cache_insert",
        "return_logprob", "return_hidden_states", "return_sampling_mask", "return_routed_experts",
        "return_indexer_topk", "customized_info",
    ),
    "sglang.srt.managers.schedule_batch.ScheduleBatch": ("reqs", "is_empty", "batch_is_full", "out_cache_loc"),
    _SCHEDULER: (
        "running_batch", "last_batch", "chunked_req", "result_queue", "waiting_queue", "tree_cache", "schedule_stream",
        "forward_stream", "model_config",
    ),
    "sglang.srt.configs.model_config.ModelConfig": ("is_encoder_decoder",),
    f"{_MEM}.memory_pool.ReqToTokenPool": ("req_to_token", "free_slots"),
    f"{_MEM}.radix_cache.TreeNode": ("children", "parent", "key", "value"),
    "sglang.srt.managers.schedule_batch.FINISH_ABORT": ("message", "status_code", "err_type"),
}  # fmt: skip


def problems(version: str, resolve: Callable[[str], Any] = pkgutil.resolve_name) -> list[str]:
    """What keeps the plugin from this SGLang, a sentence each; empty where it fits."""
    if version not in SUPPORTED_VERSIONS:
        return [f"this is SGLang {version}"]
    return [*_changed_names(resolve), *_missing_fields(resolve)]


def unhooked(
    functions: Mapping[str, Callable[..., Any]], resolve: Callable[[str], Any] = pkgutil.resolve_name
) -> list[str]:
    """Hooked names that do not lead to our function: SGLang could not hook them, or somebody replaced them since."""
    found = []
    for name, function in functions.items():
        try:
            target = resolve(name)
        except (AttributeError, ImportError, ValueError):
            target = None
        if not _leads_to(target, function):
            found.append(f"SGLang could not hook {name}, or another plugin has replaced it")
    return found


def passed_over(functions: Mapping[str, Callable[..., Any]], registered: Mapping[str, Any]) -> list[str]:
    """Hooks of other plugins that SGLang does not call: they were registered on a name after ours were applied."""
    return [
        f"{getattr(source, 'plugin_name', 'another plugin')} hooks {name} as well, and SGLang passes over its hook"
        for name in functions
        for _, hook, source in registered.get(name, ())
        if hook is not functions[name] and not _leads_to(pkgutil.resolve_name(name), hook)
    ]


def _leads_to(target: Any, function: Callable[..., Any]) -> bool:
    """Whether a chain of SGLang's wrappers, each of which holds its hook in its closure, has this one."""
    while target is not None:
        held = inspect.getclosurevars(target).nonlocals.values() if inspect.isfunction(target) else ()
        if any(value is function for value in held):
            return True
        target = getattr(target, "__wrapped__", None)
    return False


def refusal(found: list[str]) -> str:
    return (
        f"kvq: KV page tags cannot be switched on: {'; '.join(found)}. They support SGLang "
        f"{', '.join(SUPPORTED_VERSIONS)}. Nothing was hooked; unset KVQ_KV_TAGS to serve without them."
    )


def _changed_names(resolve: Callable[[str], Any]) -> Iterator[str]:
    for name, expected in HOOKED.items():
        try:
            target = resolve(name)
            parameters = inspect.signature(target).parameters
        except (AttributeError, ImportError, ValueError, TypeError):
            yield f"{name} is missing, or is no function"
            continue
        found = tuple(name for name in parameters if name != "self")
        if found != expected:
            yield f"{name} takes ({', '.join(found)}), not ({', '.join(expected)})"


def _missing_fields(resolve: Callable[[str], Any]) -> Iterator[str]:
    for name, expected in FIELDS.items():
        try:
            owner = resolve(name)
        except (AttributeError, ImportError, ValueError):
            yield f"{name} is missing"
            continue
        present = {field for klass in owner.__mro__ for field in _assigned(klass)}
        for field in sorted(set(expected) - present):
            yield f"{name} has no field {field}"


def _assigned(klass: type) -> set[str]:
    """Names that a class's methods use as attributes, and its own attributes: enough to see that a field has gone."""
    methods = [value for value in vars(klass).values() if inspect.isfunction(value)]
    return set(vars(klass)) | {name for method in methods for name in method.__code__.co_names}
