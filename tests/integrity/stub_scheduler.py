"""A scheduler that only has what the guard asks of it, for tests without an engine and for `hook_cost`."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvq.integrity.guard import Guard
from kvq.integrity.settings import Mode, Settings

PAGES, ROWS = 80, 72


class PagedTokenToKVPoolAllocator:
    """Gives out pages in order, as SGLang's does."""

    def __init__(self, page_size: int) -> None:
        self.page_size, self.size = page_size, PAGES * page_size
        self.free_pages = torch.arange(1, PAGES + 1)
        self.release_pages = self.free_pages[:0]

    def alloc(self, tokens: int) -> Tensor | None:
        count = tokens // self.page_size
        if count > len(self.free_pages):
            return None
        pages_N, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return (pages_N[:, None] * self.page_size + torch.arange(self.page_size)).flatten()

    def free(self, slots_N: Tensor) -> None:
        self.free_pages = torch.cat([self.free_pages, slots_N[:: self.page_size] // self.page_size])


class ChunkCache:
    def evict(self, params: Any) -> None:
        raise AssertionError("evicted")


def make_guard(page_size: int = 1, mode: Mode = "abort", ranks: int = 1, sweep_seconds: float = 0) -> Guard:
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(), token_to_kv_pool_allocator=PagedTokenToKVPoolAllocator(page_size),
        tree_cache=ChunkCache(), ps=SimpleNamespace(attn_tp_size=ranks), waiting_queue=[], chunked_req=None,
        running_batch=None, last_batch=None, model_config=SimpleNamespace(is_encoder_decoder=False),
        attn_tp_group=SimpleNamespace(device_group="device", cpu_group="cpu"), is_fully_idle=lambda: True,
        process_pending_chunked_abort=lambda: None,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((ROWS, 8 * page_size), dtype=torch.int32)),
    )  # fmt: skip
    return Guard(scheduler, Settings(mode, sweep_seconds))


def request(guard: Guard, row: int, tokens: int) -> Any:
    """A request that was given pages for this many tokens."""
    size = guard.page_size
    slots_N = guard.allocator.alloc(-(-tokens // size) * size)
    guard.tags.slots_RS[row, : len(slots_N)] = slots_N.int()
    guard.tags.grow(torch.tensor([row]), torch.tensor([0]), torch.tensor([tokens]), -(-tokens // size))
    return SimpleNamespace(
        rid=f"r{row}", req_pool_idx=row, kv=SimpleNamespace(kv_allocated_len=tokens), finished=lambda: True
    )


def batch(*reqs: Any, idle: bool = False, plain: bool = True) -> Any:
    mode = SimpleNamespace(is_idle=lambda: idle, is_decode=lambda: True)
    found = SimpleNamespace(
        reqs=list(reqs), forward_mode=mode, spec_algorithm=SimpleNamespace(is_none=lambda: plain),
        req_pool_indices=torch.tensor([req.req_pool_idx for req in reqs], dtype=torch.int64),
    )  # fmt: skip
    if plain:
        found.out_cache_loc = torch.arange(50, 50 + len(reqs))
    return found
