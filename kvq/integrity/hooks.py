"""Where SGLang 0.5.17 calls the guard: one small function for each name that `compat` lists.

HookRegistry gives a BEFORE hook the arguments, an AFTER hook the result and the arguments, an AROUND hook the original
function and the arguments. A hook that returns None changes nothing.
"""

from collections.abc import Callable
from typing import Any, Literal

from kvq.errors import RecipeError
from kvq.integrity import compat, faults
from kvq.integrity.guard import Guard
from kvq.integrity.settings import Settings

Kind = Literal["before", "after", "around"]
Hook = tuple[Kind, Callable[..., Any]]

_SETTINGS = Settings()
_GUARD: Guard | None = None


def use(settings: Settings) -> None:
    global _SETTINGS
    _SETTINGS = settings


def attach(guard: Guard | None) -> None:
    """The guard of this process's scheduler; None: there is none, and every hook passes."""
    global _GUARD
    _GUARD = guard


def after_scheduler_init(_result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    try:
        guard = Guard(scheduler, _SETTINGS)
    except RecipeError as error:
        raise SystemExit(compat.refusal([str(error)])) from error
    if found := _hooked_otherwise(scheduler):
        raise SystemExit(compat.refusal(found))
    if getattr(scheduler.server_args, "enable_metrics", False):
        guard.counters.connect({"tp_rank": str(scheduler.ps.tp_rank), "dp_rank": str(scheduler.ps.dp_rank or 0)})
    attach(guard)


def _hooked_otherwise(scheduler: Any) -> list[str]:
    """What plugins that were loaded after ours have made of our hooks, and whether this scheduler's class has them."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    functions = {name: function for name, (_, function) in HOOKS.items()}
    found = [*compat.unhooked(functions), *compat.passed_over(functions, HookRegistry._hooks)]
    own = {name: functions[f"{_SCHEDULER}.{name}"] for name in ("run_batch", "process_batch_result")}
    return found or compat.unhooked(own, lambda name: getattr(type(scheduler), name, None))


# Pages change hands


def around_alloc_for_extend(original: Callable[..., Any], batch: Any) -> Any:
    if _GUARD is None:
        return original(batch)
    was_new = [req.req_pool_idx is None for req in batch.reqs]
    result = original(batch)
    _GUARD.admitted(batch, result[1], was_new)
    return result


def after_alloc_for_decode(_result: Any, batch: Any, token_per_req: int) -> None:
    if _GUARD is not None:
        _GUARD.decoding(batch, token_per_req)


def after_alloc_for_spec_decode(_result: Any, *args: Any, **kwargs: Any) -> None:
    if _GUARD is not None:
        rows_B, old_B, new_B = kwargs["req_pool_indices"], kwargs["cur_kv_lens"], kwargs["nxt_kv_lens"]
        most = int((kwargs["nxt_kv_lens_cpu"] - kwargs["cur_kv_lens_cpu"]).max())
        _GUARD.drafting(rows_B, old_B, new_B, most)


def around_free(original: Callable[..., Any], allocator: Any, free_index: Any) -> None:
    if _GUARD is None or allocator is not _GUARD.allocator:
        original(allocator, free_index)
        return
    before = len(allocator.free_pages) + len(allocator.release_pages)
    original(allocator, free_index)
    # In a free group nothing is freed yet; the group's end comes here again.
    if len(allocator.free_pages) + len(allocator.release_pages) > before:
        _GUARD.freed(free_index)


def before_release_page_ids(allocator: Any, *page_ids: Any) -> None:
    if _GUARD is not None and allocator is _GUARD.allocator:
        for pages_N in page_ids:
            _GUARD.freed(pages_N)


def after_clear(_result: None, allocator: Any) -> None:
    if _GUARD is not None and allocator is _GUARD.allocator:
        _GUARD.emptied()


def around_release_kv_cache(original: Callable[..., Any], req: Any, tree_cache: Any, is_insert: bool = True) -> None:
    if _GUARD is None:
        original(req, tree_cache, is_insert)
        return
    if req.req_pool_idx is not None:
        _GUARD.releasing(req)
    original(req, tree_cache, is_insert)
    _GUARD.incidents.ended(req)


# The prefix cache


def around_cache_finished(original: Callable[..., Any], cache: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    if _GUARD is None:
        return original(cache, req, *args, **kwargs)
    _GUARD.inserting_row = req.req_pool_idx
    try:
        return original(cache, req, *args, **kwargs)
    finally:
        _GUARD.inserting_row = None


def around_cache_unfinished(original: Callable[..., Any], cache: Any, req: Any, chunked: bool = False) -> Any:
    if _GUARD is None or cache.disable:
        return original(cache, req, chunked)
    _GUARD.read_all()
    if _GUARD.aborts and _GUARD.incidents.failed(req):
        # As without a prefix cache: the next chunk goes on from the row, and the cache gets nothing of it.
        row_S = cache.req_to_token_pool.req_to_token[req.req_pool_idx, : req.extend_range.end]
        req.prefix_indices = row_S.long()
        return None
    row, size, before = req.req_pool_idx, _GUARD.page_size, req.cache_protected_len
    _GUARD.inserting_row = row
    try:
        result = original(cache, req, chunked)
    finally:
        _GUARD.inserting_row = None
    # The row goes on with what the cache had of it; of what the cache took, it is the holder and has the record.
    if _GUARD.matched_len > before:
        _GUARD.tags.adopt(row, before // size, _GUARD.matched_len // size)
    return result


def after_insert(result: Any, cache: Any, params: Any) -> None:
    if (guard := _guard_of(cache)) is not None and params.value is not None:
        guard.inserted(result.prefix_len, params.value)


def before_delete_leaf(cache: Any, node: Any) -> None:
    if (guard := _guard_of(cache)) is not None:
        guard.uncached(node.value)


def after_reset(_result: None, cache: Any) -> None:
    if (guard := _guard_of(cache)) is not None:
        guard.tags.forget_cache()


def _guard_of(cache: Any) -> Guard | None:
    """None for the second tree that the policies `lpm` and `dfs-weight` keep of waiting prompts: it holds no pages."""
    return _GUARD if _GUARD is not None and cache is _GUARD.scheduler.tree_cache else None


# The scheduler's steps


def before_next_batch(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    if _GUARD is not None:
        _GUARD.next_step()
        if _SETTINGS.faults:
            faults.inject(scheduler, _GUARD, _SETTINGS.faults)


def before_run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    if _GUARD is not None:
        if _SETTINGS.faults:
            faults.inject(scheduler, _GUARD, _SETTINGS.faults, "check", batch)
        _GUARD.before_forward(batch)


def before_process_batch_result(scheduler: Any, batch: Any, _result: Any) -> None:
    if _GUARD is not None:
        _GUARD.before_results(batch)
        if _SETTINGS.faults:
            faults.inject(scheduler, _GUARD, _SETTINGS.faults, "results", batch)


def before_chunked_abort(scheduler: Any) -> None:
    """SGLang reports the abort of a chunked prefill without a reason; the first report that arrives counts."""
    req = scheduler._pending_chunked_abort_req
    if _GUARD is None or not _GUARD.aborts or req is None or scheduler.chunked_req is not req:
        return
    if not _GUARD.incidents.failed(req):
        return
    from sglang.srt.managers.io_struct import AbortReq

    reason = _GUARD.incidents.reason(req).to_json()
    scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid, finished_reason=reason), req)


def before_stream_output(_streamer: Any, reqs: Any, *args: Any, **kwargs: Any) -> None:
    if _GUARD is not None and _GUARD.incidents.namespace:  # else nothing has failed yet
        for req in reqs:
            _GUARD.incidents.withhold(req)


def before_queue(_scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    if _GUARD is not None:
        _GUARD.incidents.queued(req)


def before_idle(_scheduler: Any) -> None:
    if _GUARD is not None:
        _GUARD.idle()


def after_internal_state(result: Any, _scheduler: Any, _recv_req: Any) -> Any:
    if _GUARD is not None:
        result.internal_state["kvq_kv_tags"] = _GUARD.health()
    return result


_MEM = "sglang.srt.mem_cache"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_RADIX = f"{_MEM}.radix_cache.RadixCache"
_TOKEN = f"{_MEM}.allocator.token.TokenToKVPoolAllocator"
_PAGED = f"{_MEM}.allocator.paged.PagedTokenToKVPoolAllocator"
HOOKS: dict[str, Hook] = {
    f"{_MEM}.allocation.alloc_for_extend": ("around", around_alloc_for_extend),
    f"{_MEM}.allocation.alloc_for_decode": ("after", after_alloc_for_decode),
    f"{_MEM}.allocation.alloc_for_spec_decode": ("after", after_alloc_for_spec_decode),
    f"{_MEM}.common.release_kv_cache": ("around", around_release_kv_cache),
    f"{_TOKEN}.free": ("around", around_free),
    f"{_TOKEN}.clear": ("after", after_clear),
    f"{_PAGED}._release_page_ids": ("before", before_release_page_ids),
    f"{_PAGED}.clear": ("after", after_clear),
    f"{_RADIX}.insert": ("after", after_insert),
    f"{_RADIX}.cache_finished_req": ("around", around_cache_finished),
    f"{_RADIX}.cache_unfinished_req": ("around", around_cache_unfinished),
    f"{_RADIX}._delete_leaf": ("before", before_delete_leaf),
    f"{_RADIX}.reset": ("after", after_reset),
    f"{_SCHEDULER}.__init__": ("after", after_scheduler_init),
    f"{_SCHEDULER}.get_next_batch_to_run": ("before", before_next_batch),
    f"{_SCHEDULER}.run_batch": ("before", before_run_batch),
    f"{_SCHEDULER}.process_batch_result": ("before", before_process_batch_result),
    f"{_SCHEDULER}.process_pending_chunked_abort": ("before", before_chunked_abort),
    f"{_STREAMER}.stream_output": ("before", before_stream_output),
    f"{_SCHEDULER}._add_request_to_queue": ("before", before_queue),
    f"{_SCHEDULER}.on_idle": ("before", before_idle),
    f"{_SCHEDULER}.get_internal_state": ("after", after_internal_state),
}
