"""One scheduler's page tags: what it records, when it checks, and when it reads the verdict.

Shape suffixes as in `table`. Objects of SGLang are `Any` here: it is not imported, so that this can be tested without.
"""

import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq.errors import RecipeError
from kvq.integrity.counters import Counters
from kvq.integrity.incidents import Incidents
from kvq.integrity.ranks import agree, least, lifted, lower
from kvq.integrity.settings import Settings
from kvq.integrity.table import BAD_PAGE, EXPECTED_TAG, FOUND_TAG, VERDICT_FIELDS, PageTags, Writes, read_verdict

ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
CACHES = ("RadixCache", "ChunkCache")
# Server arguments under which pages change hands in places that are not hooked, with the values that are fine.
NEEDED_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "disaggregation_mode": ("null", None),
    "pp_size": (1,),
    "dcp_size": (1,),
    "attn_cp_size": (1,),
    "enable_hierarchical_cache": (False,),
    "enable_hisparse": (False,),
    "enable_pdmux": (False,),
    "enable_unified_memory": (False,),
    "enable_streaming_session": (False,),
    "dllm_algorithm": (None,),
}
BUSY_CHECK = "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"
EXPORT_SECONDS = 1.0
_BUFFERS = 8  # verdicts under way at once; the overlapped loop has two


@dataclass
class Pending:
    """A verdict on its way to the host."""

    reqs: list[Any]
    verdict_BF: Tensor
    arrived: Any  # a CUDA event; None on a CPU


class Guard:
    """Of the scheduler in this process. Raises RecipeError where it does not fit how the server was started."""

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        if found := [*unsupported(scheduler), *_unsupported_environment(settings)]:
            raise RecipeError("; ".join(found))
        self.settings = settings
        self.scheduler = scheduler
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.page_size: int = self.allocator.page_size
        slots_RS: Tensor = scheduler.req_to_token_pool.req_to_token
        self.tags = make_tags(slots_RS, self.allocator.size // self.page_size + 1, self.page_size)
        self.on_gpu = slots_RS.is_cuda
        self.counters = Counters()
        self.incidents = Incidents(scheduler, self.tags, self.counters)
        self.inserting_row: int | None = None
        self.matched_len = 0  # of the key inserted last, the tokens that the prefix cache had already
        self._pending: deque[Pending] = deque()
        self._swept: Pending | None = None
        self._ranks = scheduler.attn_tp_group if scheduler.ps.attn_tp_size > 1 else None
        dtype = torch.int32 if self._ranks is None else torch.int64  # as `lifted` makes it
        self._buffers = [self._host((slots_RS.shape[0] + 1, VERDICT_FIELDS), dtype) for _ in range(_BUFFERS)]
        self._sweep_buffer = self._host((1, VERDICT_FIELDS), torch.int32)
        self._next_buffer = 0
        self._double_frees = 0
        self._worked = False
        self._last_sweep = self._last_export = time.monotonic()
        self.incidents.alone = self._ranks is None
        self._to_agree: Tensor | None = None  # a sweep's result on this rank

    @property
    def aborts(self) -> bool:
        return self.settings.mode == "abort"

    # Pages change hands

    def admitted(self, batch: Any, rows_B: Tensor, was_new: list[bool]) -> None:
        """After the pages of a prefill (or a chunk of one) were allocated and written to the page table."""
        size = self.page_size
        for req, new, prefix in zip(batch.reqs, was_new, batch.prefix_lens, strict=True):
            if new:
                self.tags.adopt(req.req_pool_idx, 0, prefix // size)
        most = max(-(-length // size) + 1 for length in batch.extend_lens)
        self.tags.grow(rows_B, self._to_device(batch.prefix_lens), batch.seq_lens, most)

    def decoding(self, batch: Any, tokens: int) -> None:
        """After one token's place was allocated for each request; most steps of a large page size take no page."""
        if self.page_size == 1 or bool((batch.seq_lens_cpu % self.page_size == 0).any()):
            new_lens_B = None if tokens == 1 else batch.seq_lens + tokens
            self.tags.grow(batch.req_pool_indices, batch.seq_lens, new_lens_B, -(-tokens // self.page_size))

    def drafting(self, rows_B: Tensor, old_lens_B: Tensor, new_lens_B: Tensor, tokens: int) -> None:
        """After speculative decoding reserved places. What it rejects stays the request's, and is used again."""
        if tokens > 0:
            self.tags.grow(rows_B, old_lens_B, new_lens_B, tokens // self.page_size + 1)

    def freed(self, pages_N: Tensor) -> None:
        self.tags.free(pages_N)

    def emptied(self) -> None:
        """The engine emptied its pool."""
        self.tags.reset()
        self.incidents.emptied()

    def inserted(self, prefix_len: int, slots_N: Tensor) -> None:
        """The prefix cache took what it did not have yet of the row at work; `slots_N`: its copy of the row's slots."""
        self.matched_len = prefix_len
        if self.inserting_row is not None and len(slots_N) > prefix_len:
            first, end = prefix_len // self.page_size, len(slots_N) // self.page_size
            self.tags.give_to_cache(self.inserting_row, first, end, slots_N[prefix_len:])

    def uncached(self, slots_N: Tensor) -> None:
        """The prefix cache gave up one of its entries."""
        self.tags.evict(slots_N if self.page_size == 1 else slots_N[:: self.page_size] // self.page_size)

    # A step

    def before_forward(self, batch: Any) -> None:
        """Enqueues the check of all requests of a batch, ahead of the forward that will read their pages."""
        if not batch.reqs or batch.forward_mode.is_idle():
            return
        self._worked = True
        self.counters.checks += len(batch.reqs)
        # Only the plain form needs the bound; the kernel reads each row's own.
        most = 0 if self.on_gpu else max(-(-req.kv.kv_allocated_len // self.page_size) for req in batch.reqs)
        verdict_BF = self.tags.check(batch.req_pool_indices, most, writes=self._writes(batch) if self.aborts else None)
        if self._ranks is not None:
            # A fault that one rank sees must end the request on all: they schedule alike.
            if self._to_agree is not None:
                verdict_BF[-1, EXPECTED_TAG:] = self._to_agree
                self._to_agree = None
            verdict_BF = agree(lifted(verdict_BF), self._ranks, self._after_forward)
        self._next_buffer = (self._next_buffer + 1) % _BUFFERS
        self._pending.append(self._send(list(batch.reqs), verdict_BF, self._buffers[self._next_buffer]))

    def before_results(self, batch: Any) -> None:
        """Reads verdicts up to this batch's own: enqueued before its forward, so it is there when the tokens are."""
        self._read_up_to(batch)
        if self.incidents.namespace:  # else nothing has failed yet
            for req in batch.reqs:
                self.incidents.insist(req)

    def _read_up_to(self, batch: Any) -> None:
        while self._pending:
            pending = self._pending.popleft()
            self._read(pending)
            if (
                pending.reqs
                and batch.reqs
                and pending.reqs[0] is batch.reqs[0]
                and len(pending.reqs) == len(batch.reqs)
            ):
                break

    def read_all(self) -> None:
        """Before a row is given back or cached: no verdict about it may be outstanding."""
        while self._pending:
            self._read(self._pending.popleft())

    def releasing(self, req: Any) -> None:
        """Before a request's pages are freed."""
        self.read_all()
        if self.aborts and self.incidents.failed(req):
            self.incidents.settle(req)

    def next_step(self) -> None:
        """Before the scheduler plans a step, which ranks must do alike."""
        self.incidents.rename_waiting()
        if self.aborts and self.incidents.unsettled and self._nothing_runs():
            # Whatever waits: it may be waiting for the very pages that are out of use.
            self.read_all()
            self.incidents.put_in_order()
            if self.scheduler.running_batch is not None:
                self.scheduler.running_batch.batch_is_full = False  # else those that did not fit are not tried again
        if self._ranks is not None:
            self._level_ranks(self._ranks)
        elif self.aborts and self.incidents.lost_pages:
            self.read_all()
            self.incidents.reclaim()
        self.between_steps()

    def between_steps(self) -> None:
        """Sweeps when it is time to, and exports the metrics."""
        now = time.monotonic()
        if self.settings.sweep_seconds and now - self._last_sweep >= self.settings.sweep_seconds:
            self._last_sweep = now
            self._sweep()
        if now - self._last_export >= EXPORT_SECONDS:
            self._last_export = now
            self.counters.export()

    def idle(self) -> None:
        """Nothing runs: what violations left behind is put in order before the engine counts its pages."""
        self.read_all()
        if self._worked and self.scheduler.is_fully_idle():
            self._worked = False
            if unsound := self.incidents.unsound_free_pages():
                self.incidents.sweep_found(0, unsound, repair=self.aborts)
            if self.aborts and self.incidents.unsettled:
                self.incidents.put_in_order()
        self.between_steps()

    def health(self) -> dict[str, Any]:
        healthy = not self.counters.violations and not self.counters.sweep_violations
        return {"mode": self.settings.mode, "healthy": healthy, **self.counters.as_json()}

    # Inside

    def _level_ranks(self, group: Any) -> None:
        """From here to the end of planning each rank has, and frees, as many pages as the others.

        So what is still to be read or settled comes first: for an entry that was overwritten on one rank, that rank
        alone has to lend a page, or has none to lend. The verdict of the forward under way is there by now, so reading
        it costs no waiting.
        """
        self.read_all()
        if not self.incidents.unsettled:
            return
        scheduler = self.scheduler
        scheduler.process_pending_chunked_abort()  # which planning would begin with
        batches = (scheduler.running_batch, scheduler.last_batch)
        reqs = {id(req): req for batch in batches if batch is not None for req in batch.reqs}
        failed = [req for req in reqs.values() if req.req_pool_idx is not None and self.incidents.failed(req)]
        made_up = [self.incidents.make_up(req) for req in failed]
        count, *made_up_everywhere = least([self.incidents.free_pages(), *map(int, made_up)], group)
        for req, everywhere in zip(failed, made_up_everywhere, strict=True):
            if not everywhere:
                self.incidents.give_up(req)
        self.incidents.keep_free(count)

    def _after_forward(self) -> None:
        """What comes next on the scheduler's stream waits, on the device, for the forward that is under way."""
        if self.on_gpu:
            self.scheduler.schedule_stream.wait_stream(self.scheduler.forward_stream)

    def _nothing_runs(self) -> bool:
        """No request holds a row, and no result of one is outstanding."""
        scheduler = self.scheduler
        results = [result[0] for result in getattr(scheduler, "result_queue", ())]  # of the overlapped loop
        batches = (scheduler.running_batch, scheduler.last_batch, *results)
        return scheduler.chunked_req is None and all(batch is None or batch.is_empty() for batch in batches)

    def _writes(self, batch: Any) -> Writes:
        # A draft is written where the page table says by then; a prefill goes to the places that were allocated.
        if not batch.spec_algorithm.is_none() and batch.forward_mode.is_decode():
            return Writes()
        lengths_B = None if batch.forward_mode.is_decode() else self._to_device(batch.extend_lens)
        return Writes(batch.out_cache_loc, lengths_B)

    def _read(self, pending: Pending) -> None:
        if pending.arrived is not None:
            pending.arrived.synchronize()
        values = pending.verdict_BF.tolist()
        if self._ranks is not None:
            lower(values)
        double_frees = values[-1][BAD_PAGE]
        if double_frees > self._double_frees:
            self.counters.double_frees += double_frees - self._double_frees
            self._double_frees = double_frees
            self.incidents.double_free(repair=self.aborts)
        if any(values[-1][EXPECTED_TAG:]):
            self.incidents.sweep_found(values[-1][EXPECTED_TAG], values[-1][FOUND_TAG], repair=self.aborts)
        found = read_verdict(values[:-1])
        for at, violation in found.items():
            self.incidents.violation(pending.reqs[at], violation, abort=self.aborts)
        if found and self.aborts:
            self.incidents.repair_cache()

    def _sweep(self) -> None:
        """Reads the last sweep's result and enqueues the next: pages of the cache, and the free list."""
        if self._swept is not None:
            if self._swept.arrived is not None:
                self._swept.arrived.synchronize()
            cached, listed = self._swept.verdict_BF[0, :2].tolist()
            if self._ranks is not None and (cached or listed):
                # Ranks sweep when their own clocks say so: the next verdict tells all of them.
                self._to_agree = self._swept.verdict_BF[0, :2].to(self.tags.slots_RS.device, copy=True)
            elif cached or listed:
                self.incidents.sweep_found(cached, listed, repair=self.aborts)
            self._swept = None
        self.counters.sweeps += 1
        found_BF = torch.zeros((1, VERDICT_FIELDS), dtype=torch.int32, device=self.tags.slots_RS.device)
        slots_N = self.incidents.cached_slots()
        if slots_N is not None:
            pages_N = slots_N[:: self.page_size] // self.page_size
            found_BF[0, 0] = self.tags.cache_mismatches(pages_N).sum()
        found_BF[0, 1] = self.tags.held(self.allocator.free_pages).sum()
        self._swept = self._send([], found_BF, self._sweep_buffer)

    def _send(self, reqs: list[Any], values_BF: Tensor, buffer_BF: Tensor) -> Pending:
        if not self.on_gpu:
            return Pending(reqs, values_BF, None)
        buffer_BF = buffer_BF[: values_BF.shape[0]]
        buffer_BF.copy_(values_BF, non_blocking=True)
        arrived = torch.cuda.current_stream().record_event()
        return Pending(reqs, buffer_BF, arrived)

    def _to_device(self, values: list[int]) -> Tensor:
        host_B = torch.tensor(values, dtype=torch.int64, pin_memory=self.on_gpu)
        return host_B.to(self.tags.slots_RS.device, non_blocking=True)

    def _host(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self.on_gpu)


def make_tags(slots_RS: Tensor, num_pages: int, page_size: int) -> PageTags:
    if not slots_RS.is_cuda:
        return PageTags(slots_RS, num_pages, page_size)
    from kvq.integrity.kernels import TritonPageTags, compile_all

    compile_all(slots_RS.device, page_size, slots_RS.shape[1])
    return TritonPageTags(slots_RS, num_pages, page_size)


def _unsupported_environment(settings: Settings) -> list[str]:
    """SGLang's count of its pages while requests run would end the server over the first page in quarantine."""
    value = os.environ.get(BUSY_CHECK, "0")
    return [f"{BUSY_CHECK} is {value}"] if settings.mode == "abort" and value not in ("", "0") else []


def unsupported(scheduler: Any) -> list[str]:
    """What of this server the plugin does not fit, a sentence each."""
    arguments = scheduler.server_args
    found = [
        f"{name} is {value!r}"
        for name, fine in NEEDED_ARGUMENTS.items()
        if (value := getattr(arguments, name, fine[0])) not in fine
    ]
    allocator, cache = type(scheduler.token_to_kv_pool_allocator).__name__, type(scheduler.tree_cache).__name__
    if allocator not in ALLOCATORS:
        found.append(f"pages are allocated by {allocator}, not by one of {', '.join(ALLOCATORS)}")
    if scheduler.model_config.is_encoder_decoder:
        found.append("the model is an encoder-decoder, whose rows begin with the encoder's pages")
    if cache not in CACHES:
        found.append(f"prefixes are cached by {cache}, not by one of {', '.join(CACHES)}")
    return found
