"""Faults for tests of the plugin, on a server that serves nobody. KVQ_KV_TAGS_FAULTS="rate=0.01,seed=1" turns them on.

With this probability, before each step is planned (`at=plan+check+results`: also between planning and the check, and
before results are processed), one of: a page of a running request is freed while it is in use; an entry of a running
request's page table is pointed at a foreign page; the allocator's free list is given a page in use. Each is written to
the log as JSON with the requests that refer to the page, so that a test can see who was affected, and with how many
tokens each of them is still to be given: one whose last token is being computed reads no page afterwards.
Tensor-parallel ranks throw the same dice: each damages itself in the same way, or with `rank=0` only that one.
"""

import json
import logging
import random
from typing import Any

import torch

from kvq.integrity.guard import Guard

logger = logging.getLogger("kvq.integrity.faults")
KINDS = ("free", "swap", "double")
_DICE: random.Random | None = None


def inject(scheduler: Any, guard: Guard, text: str, moment: str = "plan", batch: Any = None) -> None:
    """A fault, if this is one of the moments and the dice say so. `batch`: the one at work, where there is one."""
    global _DICE
    options = dict(part.split("=", 1) for part in text.split(","))
    if moment not in options.get("at", "plan").split("+"):
        return
    _DICE = _DICE or random.Random(int(options.get("seed", "0")))
    if _DICE.random() >= float(options["rate"]):
        return
    reqs = [req for req in _running(scheduler, batch) if not guard.incidents.failed(req)]
    if len(reqs) < 2:
        return
    kinds = options.get("kinds", "+".join(KINDS)).split("+")
    kind, victim = _DICE.choice(kinds), _DICE.choice(reqs)
    pages = _pages(guard, victim)
    at = _DICE.randrange(len(pages))
    page = pages[at]
    if kind == "swap":
        foreign = _DICE.choice([other for other in range(1, guard.tags.num_pages) if other != page])
    if int(options.get("rank", scheduler.ps.tp_rank)) != scheduler.ps.tp_rank:
        return
    if kind == "swap":
        affected = [victim]
        guard.tags._set_page(victim.req_pool_idx, at, foreign)
        page = foreign
    else:
        affected = [req for req in reqs if page in _pages(guard, req)] if kind == "free" else []
        _misuse(guard, kind, page)
    left = [req.sampling_params.max_new_tokens - len(req.output_ids) for req in affected]
    details = {
        "kind": kind, "page": page, "at": moment, "affected": [req.rid for req in affected], "tokens_left": left,
    }  # fmt: skip
    logger.warning("KV page fault injected %s", json.dumps(details))


def _misuse(guard: Guard, kind: str, page: int) -> None:
    allocator = guard.allocator
    page_N = torch.tensor([page], dtype=torch.int64, device=guard.tags.slots_RS.device)
    if kind == "double":
        allocator.free_pages = torch.cat([page_N, allocator.free_pages])
    else:
        allocator.free(page_N * guard.page_size)


def _running(scheduler: Any, at_work: Any) -> list[Any]:
    batches = (scheduler.running_batch, scheduler.last_batch, at_work)
    reqs = [req for batch in batches if batch is not None for req in batch.reqs]
    unique = {req.rid: req for req in reqs if req.req_pool_idx is not None and not req.finished()}
    return [unique[rid] for rid in sorted(unique)]


def _pages(guard: Guard, req: Any) -> list[int]:
    count = -(-req.kv.kv_allocated_len // guard.page_size)
    pages: list[int] = guard.tags._page_range(req.req_pool_idx, 0, count).tolist()
    return pages
