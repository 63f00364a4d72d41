"""SGLang's own request pool, allocators, KV pools, radix cache, requests and batches on a CPU, driven without a model.

What the scheduler does with them is spelled out here, in the order of its loop with the overlap schedule: the next step
is launched before the results of the last one are looked at. Hooks are installed by SGLang's HookRegistry; those on the
scheduler's own methods are called from here, since there is no scheduler.
"""

import pkgutil
from array import array
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator import paged
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.plugins import hook_registry
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from kvq.integrity import guard, hooks
from kvq.integrity.settings import Settings
from tests.integrity.put_off import PutOffTags

PAGES, ROWS, CONTEXT = 200, 16, 1024
VOCABULARY = 1000


class NaiveKernel:
    """SGLang's Triton kernel is replaced by SGLang's own plain form of it, with the kernel's call."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def __getitem__(self, grid: Any) -> Any:
        return self.plain


def _extend(prefix_lens: Any, seq_lens: Any, last_loc: Any, free_pages: Any, out: Any, _power: int, size: int) -> None:
    paged.alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out, size, "cpu")


def _decode(seq_lens: Any, last_loc: Any, free_pages: Any, out: Any, _power: int, size: int) -> None:
    taken = 0
    for at, length in enumerate(seq_lens.tolist()):
        new = length % size == 1 or size == 1
        out[at] = free_pages[taken] * size if new else last_loc[at] + 1
        taken += new


def start_engine() -> None:
    """SGLang's process-wide configuration, for a CPU."""
    publish(ServerArgs(model_path="dummy", attention_backend="torch_native", device="cpu"), role="test")
    plain_kernels()


def plain_kernels() -> None:
    paged.alloc_extend_kernel, paged.alloc_decode_kernel = NaiveKernel(_extend), NaiveKernel(_decode)


def unhook() -> None:
    """Takes back what the plugin did to SGLang; there is no such thing outside of tests."""
    for name in hooks.HOOKS:
        owner_name, _, attribute = name.rpartition(".")
        owner = pkgutil.resolve_name(owner_name)
        hooked = getattr(owner, attribute)
        setattr(owner, attribute, hooked.__wrapped__)
        hook_registry._propagate_patch(hooked, hooked.__wrapped__, owner)
    hook_registry.HookRegistry.reset()
    hooks.attach(None)


def kv_pool(kind: str, size: int, page_size: int) -> Any:
    memory: dict[str, Any] = {"layer_num": 1, "device": "cpu", "enable_memory_saver": False}
    if kind == "mha":
        return MHATokenToKVPool(size, page_size, torch.bfloat16, head_num=1, head_dim=8, **memory)
    if kind == "mla":
        return MLATokenToKVPool(size, page_size, torch.bfloat16, kv_lora_rank=8, qk_rope_head_dim=4, **memory)
    return DSATokenToKVPool(
        size, page_size, kv_lora_rank=128, dtype=torch.bfloat16, qk_rope_head_dim=64, index_head_dim=128,
        kv_cache_dim=192, **memory,
    )  # fmt: skip


class Rig:
    def __init__(self, kind: str, page_size: int, *, mode: str = "abort", radix: bool = True) -> None:
        size = PAGES * page_size
        pool = kv_pool(kind, size, page_size)
        if page_size == 1:
            allocator: Any = TokenToKVPoolAllocator(size, torch.bfloat16, "cpu", pool, need_sort=False)
        else:
            allocator = PagedTokenToKVPoolAllocator(size, page_size, torch.bfloat16, "cpu", pool, need_sort=False)
        rows = ReqToTokenPool(ROWS, CONTEXT, "cpu", enable_memory_saver=False)
        cache = (RadixCache if radix else ChunkCache)(
            CacheInitParams(
                disable=False, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, page_size=page_size
            )
        )
        self.page_size, self.allocator, self.rows, self.cache = page_size, allocator, rows, cache
        self.waiting_queue: list[Any] = []
        self.running_batch = self.last_batch = self.chunked_req = self._pending_chunked_abort_req = None
        self.server_args = SimpleNamespace()
        self.model_config = SimpleNamespace(vocab_size=VOCABULARY, is_encoder_decoder=False)
        self.ps = SimpleNamespace(attn_tp_size=1, tp_rank=0, dp_rank=None)
        self.req_to_token_pool, self.token_to_kv_pool_allocator, self.tree_cache = rows, allocator, cache
        self.sent: list[Any] = []
        sender = SimpleNamespace(send_output=lambda output, _req: self.sent.append(output))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=sender)
        hooks.attach(None)
        with mock.patch.object(guard, "make_tags", PutOffTags):  # in the order of work of a GPU's table
            self.guard = guard.Guard(self, Settings(mode, sweep_seconds=0))  # type: ignore[arg-type]
        hooks.attach(self.guard)
        self._last: tuple[Any, list[Any]] | None = None
        self._serial = 0
        self.algorithm = SpeculativeAlgorithm.NONE

    def is_fully_idle(self) -> bool:
        return not self.running_batch and not self.waiting_queue

    # Requests

    def request(self, tokens: list[int], new_tokens: int = 8) -> Any:
        self._serial += 1
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0)
        sampling.normalize(None)
        req = Req(f"r{self._serial}", "", array("q", tokens), sampling, vocab_size=VOCABULARY)
        hooks.before_queue(self, req)
        self.waiting_queue.append(req)
        return req

    def prefill(self, reqs: list[Any], chunk: int | None = None) -> Any:
        """Admits these requests; with `chunk`, only that many tokens of the last one."""
        for req in reqs:
            if req in self.waiting_queue:
                self.waiting_queue.remove(req)
            if req is not self.chunked_req:
                req.init_next_round_input(self.cache)
                self.cache.inc_lock_ref(req.last_node)
            start = len(req.prefix_indices)
            length = len(req.full_untruncated_fill_ids)
            end = min(length, start + chunk) if chunk and req is reqs[-1] else length
            req.set_extend_range(start, end)
            req.inflight_middle_chunks += end < length
        last = reqs[-1]
        self.chunked_req = last if last.extend_range.end < len(last.full_untruncated_fill_ids) else None
        batch = self._batch(reqs)
        batch.prepare_for_extend()
        return self._launch(batch)

    def decode(self, reqs: list[Any]) -> Any:
        batch = self._batch([req for req in reqs if not req.finished()])
        if not batch.reqs:
            return None
        batch.req_pool_indices = torch.tensor([req.req_pool_idx for req in batch.reqs])
        batch.seq_lens_cpu = torch.tensor([req.kv_committed_len for req in batch.reqs])
        batch.seq_lens = batch.seq_lens_cpu.clone()
        batch.orig_seq_lens = batch.seq_lens_cpu.int()
        batch.sampling_info = SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False))
        batch.prepare_for_decode()
        return self._launch(batch)

    def results(self, batch: Any, token: int = 7) -> None:
        """What the scheduler does with a step's tokens: `process_batch_result`, without the streaming."""
        hooks.before_process_batch_result(self, batch, None)
        prefill = batch.forward_mode.is_extend()
        if not prefill:
            self.allocator.free_group_begin()
        for req in batch.reqs:
            if req.finished() or req.is_retracted:
                continue
            if req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
                continue
            req.output_ids.append(token)
            req.update_finish_state()
            if req.finished():
                common.release_kv_cache(req, self.cache)
            elif prefill:
                common.maybe_cache_unfinished_req(req, self.cache)
        if not prefill:
            self.allocator.free_group_end()

    def retract(self, req: Any) -> None:
        common.release_kv_cache(req, self.cache, is_insert=False)
        req.reset_for_retract()
        hooks.before_queue(self, req)
        self.waiting_queue.append(req)

    def run(self, reqs: list[Any]) -> None:
        """Prefill and decode to the end, each step launched before the last one's results are read."""
        before = self.prefill(reqs)
        while (now := self.decode(reqs)) is not None:
            self.results(before)
            before = now
        self.results(before)
        self.running_batch = None

    def stash(self, req: Any) -> None:
        """A chunk goes to the cache before the next one is planned."""
        common.maybe_cache_unfinished_req(req, self.cache, chunked=True)

    def abort_chunked(self, req: Any) -> None:
        """The end of the scheduler's `process_pending_chunked_abort`."""
        req.to_finish, self.chunked_req, self._pending_chunked_abort_req = None, None, None
        common.release_kv_cache(req, self.cache, is_insert=False)
        self.running_batch = None

    def streamed(self, req: Any) -> list[int]:
        return list(req.output_ids_through_stop)

    def page(self, req: Any, at: int) -> int:
        return int(self.rows.req_to_token[req.req_pool_idx, at * self.page_size]) // self.page_size

    def free_page(self, page: int) -> None:
        """What a bug would do: the page goes back to the pool while somebody uses it."""
        self.allocator.free(self.allocator.free_pages.new_tensor([page * self.page_size]))

    def matched(self, tokens: list[int], extra_key: str | None = None) -> int:
        key = RadixKey(array("q", tokens), extra_key)
        return len(self.cache.match_prefix(MatchPrefixParams(key=key)).device_indices)

    def accounts(self) -> None:
        """SGLang's own idle check: free and cached pages together are all pages."""
        hooks.before_idle(self)
        free = len(self.allocator.free_pages) * self.page_size
        assert free == self.allocator.available_size()
        assert free + self.cache.evictable_size() == PAGES * self.page_size
        assert self.cache.protected_size() == 0
        assert len(set(self.allocator.free_pages.tolist())) == len(self.allocator.free_pages)
        assert len(self.rows.free_slots) == ROWS

    def _batch(self, reqs: list[Any]) -> Any:
        return ScheduleBatch.init_new(
            reqs, self.rows, self.allocator, self.cache, self.model_config, enable_overlap=True,
            spec_algorithm=self.algorithm,
        )  # fmt: skip

    def _launch(self, batch: Any) -> Any:
        self.running_batch = batch
        hooks.before_run_batch(self, batch)
        return batch
