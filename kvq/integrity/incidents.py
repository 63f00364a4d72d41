"""What follows a violation. All of this is rare, and may wait for the device.

A failed request ends with an error and frees exactly what is its own. What the prefix cache held by then is given to no
later request: who shared what with the damaged page cannot be known. Pages that nobody can account for are kept from
use until the engine is idle, and then put in order, before it counts its pages itself.
"""

import json
import logging
import math
import secrets
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import torch
from torch import Tensor

from kvq.integrity.counters import Counters
from kvq.integrity.table import PageTags, Violation

logger = logging.getLogger("kvq.integrity")
ERROR_TYPE = "KVPageTagMismatch"
NAMESPACE = "kvq-kv-tags"
# Attributes of a SGLang request that are ours: why it is to end; its key of the prefix cache, SGLang's own and ours.
FAILURE, OWN_KEY = "kvq_kv_tags_failure", "kvq_kv_tags_own_key"


class Incidents:
    def __init__(self, scheduler: Any, tags: PageTags, counters: Counters) -> None:
        self.scheduler = scheduler
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.tags = tags
        self.counters = counters
        self.unsettled = False
        self.lost_pages = False  # a failed request has gone, and what it lost may belong to nobody
        self.alone = True  # no other rank schedules by this one's free pages
        self.namespace = 0
        self._suffix = f"|{NAMESPACE}-{secrets.token_hex(8)}"  # no client's salt names it
        self._rename = False
        self._kept_back_N = self.allocator.free_pages[:0]
        # By the request's identity, as several tokenizers may give one id twice; until its pages are freed. Of those
        # given up, pages are not freed.
        self._failed: dict[int, Any] = {}
        self._given_up: set[int] = set()

    def failed(self, req: Any) -> bool:
        return id(req) in self._failed

    def violation(self, req: Any, violation: Violation, *, abort: bool) -> None:
        """Reports; with `abort`, the request's next result becomes an error and none of its tokens leaves any more."""
        if self.failed(req) or req.req_pool_idx is None:
            return
        message = f"KV page tag mismatch: {violation}"
        self._failed[id(req)] = req
        self.counters.violations += 1
        self.counters.last_violation = f"request {req.rid}: {violation}"
        details = {"rid": req.rid, "page": violation.page, "index": violation.index}
        details |= {"expected": violation.expected_tag, "found": violation.found_tag, "aborted": abort}
        logger.error("%s for request %s %s", message, req.rid, json.dumps(details))
        if not abort:
            return
        self.unsettled = True
        self.start_afresh()
        # Also where it has finished already: its row would enter the cache with the page that settling lends it.
        req.skip_radix_cache_insert = True
        if not req.finished():
            self.counters.aborted += 1
            self._end(req, message)

    def double_free(self, *, repair: bool) -> None:
        logger.error("KV page freed twice; %s", "its second copy leaves the free list" if repair else "nothing is done")
        if repair:
            self.unsettled = True
            self._clean_free_list()

    def sweep_found(self, cached: int, listed: int, *, repair: bool) -> None:
        self.counters.sweep_violations += 1
        logger.error("KV page sweep: %d pages of the prefix cache lost, %d wrong ones in the free list", cached, listed)
        if repair:
            self.unsettled = True
            self._clean_free_list()
            if cached:
                self.start_afresh()
                self.repair_cache()

    def ended(self, req: Any) -> None:
        """The request's pages are freed."""
        if self._failed.pop(id(req), None) is not None:
            self.lost_pages = self.unsettled
        self._given_up.discard(id(req))

    def reason(self, req: Any) -> Any:
        """The finish reason of a request that is to end with an error: an abort with HTTP status 500."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        return FINISH_ABORT(getattr(req, FAILURE), HTTPStatus.INTERNAL_SERVER_ERROR, ERROR_TYPE)

    def insist(self, req: Any) -> None:
        """Before a step's tokens are looked at: a client's abort or a time limit that came since the violation was
        read has put its own reason in the place of ours."""
        if hasattr(req, FAILURE) and not req.finished() and not _is_ours(req.to_finish):
            req.to_finish = self.reason(req)

    def withhold(self, req: Any) -> None:
        """Before answers are sent: SGLang cuts a failed request's tokens, but not all that is told beside them, such as
        the first token of a prefill with its log-probability. Nor does it forget them: a session would go on from them.
        """
        if not hasattr(req, FAILURE):
            return
        req.return_logprob = req.return_hidden_states = req.return_sampling_mask = False
        req.return_routed_experts = req.return_indexer_topk = False
        req.customized_info = None
        if req.finished():
            if not _is_ours(req.finished_reason):
                req.finished_reason = self.reason(req)
            del req.output_ids[req.finished_len :]

    def settle(self, req: Any) -> None:
        """Before a failed request's pages are freed: makes each entry of its row one that is its own to free."""
        if id(req) in self._given_up or not self.make_up(req):
            # Nothing can stand in, so nothing of it is freed now: `put_in_order` finds these pages when all is idle.
            logger.error("no page is free to settle request %s; its pages stay out of use until idle", req.rid)
            req.cache_protected_len = req.kv.kv_allocated_len = req.kv_committed_len = 0

    def make_up(self, req: Any) -> bool:
        """Lends a failed request's row the pages that it has lost; False, and nothing done, where there are none."""
        size = self.tags.page_size
        own, end = req.cache_protected_len // size, math.ceil(req.kv.kv_allocated_len / size)
        lent = self.tags.settle_row(req.req_pool_idx, own, end, self._lend)
        self.counters.quarantined_pages += lent or 0
        return lent is not None

    def give_up(self, req: Any) -> None:
        """Another rank has no page to lend it: here nothing of it is freed either."""
        self._given_up.add(id(req))

    def start_afresh(self) -> None:
        """Later requests do not find what is cached now; it leaves as it grows old.

        Those that wait learn of it before the next step is planned: this may be in the middle of planning, when one of
        them has found its prefix already, and is to insert what follows under the same name.
        """
        self.namespace += 1
        self._rename = True

    def rename_waiting(self) -> None:
        """Before a step is planned."""
        if self._rename:
            self._rename = False
            for req in self.scheduler.waiting_queue:
                self.queued(req)

    def queued(self, req: Any) -> None:
        """Puts a request that holds no pages into the present namespace of the prefix cache."""
        if self.namespace and req.req_pool_idx is None:
            if _is_ours(req.to_finish):
                # Retracted before it could end. It ends with the first result of its new pages, which are sound: while
                # it skipped the cache, SGLang would prefill its first chunk again and again.
                req.skip_radix_cache_insert = False
            own, named = getattr(req, OWN_KEY, ("", None))
            if req.extra_key != named:  # as SGLang made it: of the client's salt and the adapter
                own = req.extra_key or ""
            req.extra_key = f"{own}{self._suffix}-{self.namespace}"
            setattr(req, OWN_KEY, (own, req.extra_key))

    def put_in_order(self) -> None:
        """With nothing running: every page is free, or the cache's, once."""
        self.allocator.free_pages = torch.cat([self.allocator.free_pages, self._kept_back_N])
        self._kept_back_N = self._kept_back_N[:0]
        self.repair_cache()
        self._clean_free_list()
        found = self._free_orphans([])
        self.unsettled = self.lost_pages = False
        self._failed.clear()
        self._given_up.clear()
        logger.warning("KV pages are in order again after a violation; %d had no owner", found)

    def reclaim(self) -> None:
        """Between two steps, when failed requests have gone: their lost pages go back, before one that is sound and
        still runs has to end for want of them. A page of a row that is in use, of the cache or the free list has an
        owner."""
        self.lost_pages = False
        self._clean_free_list()
        waiting = set(self.scheduler.req_to_token_pool.free_slots)
        rows = [row for row in range(1, self.tags.slots_RS.shape[0]) if row not in waiting]
        if found := self._free_orphans(rows):
            logger.warning("%d KV pages that belonged to nobody are free again", found)

    def _free_orphans(self, rows: list[int]) -> int:
        """Frees pages that are tagged as held and that none of these rows, the cache or the free list names."""
        slots_N = self.cached_slots()
        named = [self._free_pages(), *(self.tags.pages_of(row) for row in rows)]
        orphans_N = self.tags.orphans(torch.cat(named if slots_N is None else [*named, self._pages(slots_N)]))
        if orphans_N.numel():
            self.counters.quarantined_pages += orphans_N.numel()
            self.allocator.free(self._slots(orphans_N))
        return orphans_N.numel()

    def emptied(self) -> None:
        """Every page is in the allocator's list again."""
        self._kept_back_N = self._kept_back_N[:0]

    def free_pages(self) -> int:
        return len(self.allocator.free_pages) + len(self.allocator.release_pages)

    def keep_free(self, count: int) -> None:
        """Takes what is free beyond `count` pages, which other ranks do not have, out of use until all is in order."""
        if self.free_pages() > count:
            free_N = self._free_pages()
            self._kept_back_N = torch.cat([self._kept_back_N, free_N[count:]])
            self.allocator.free_pages, self.allocator.release_pages = free_N[:count], free_N[:0]

    def repair_cache(self) -> None:
        """Entries of the cache whose page is lost get another page, so that they free one when they go.

        Nobody reads it: its tag bars it, and later requests do not find the entry.
        """
        for node, at, page in list(self._lost_entries()):
            stand_in_N = self._lend(1)
            if stand_in_N is None:
                logger.error("no page is free to stand in for page %d, which the prefix cache lost", page)
                return
            self._replace(node, at, page, int(stand_in_N[0]))

    def cached_slots(self) -> Tensor | None:
        """Every slot that the prefix cache holds; None where it holds none."""
        values = [node.value for node in self._nodes()]
        return torch.cat(values) if values else None

    def unsound_free_pages(self) -> int:
        """Held pages and second copies in the allocator's lists."""
        free_N = self._free_pages()
        return free_N.numel() - self.tags.sound_free_list(free_N).numel()

    # Inside

    def _end(self, req: Any, message: str) -> None:
        setattr(req, FAILURE, message)
        req.to_finish = self.reason(req)
        # What has been generated up to here was checked; what the forward under way gives is cut off.
        req.finished_len = len(req.output_ids)
        if self.scheduler.chunked_req is req:
            self.scheduler._pending_chunked_abort_req = req

    def _lend(self, count: int) -> Tensor | None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self._clean_free_list()
        tokens = count * self.tags.page_size
        slots_N = self.allocator.alloc(tokens)
        if slots_N is None and self.alone:  # else the others would go on hitting prefixes that are gone here
            self.scheduler.tree_cache.evict(EvictParams(num_tokens=tokens))
            self._clean_free_list()
            slots_N = self.allocator.alloc(tokens)
        return None if slots_N is None else self._pages(slots_N)

    def _clean_free_list(self) -> None:
        """Takes held pages and second copies out of the allocator's lists."""
        free_N = self._free_pages()
        kept_N = self.tags.sound_free_list(free_N)
        if dropped := free_N.numel() - kept_N.numel():
            self.counters.quarantined_pages += dropped
            self.allocator.free_pages, self.allocator.release_pages = kept_N, kept_N[:0]

    def _lost_entries(self) -> Iterator[tuple[Any, int, int]]:
        """Entries of the prefix cache whose page is another's or nobody's: node, position in pages, page."""
        for node in self._nodes():
            pages_N = self._pages(node.value)
            for at in self.tags.cache_mismatches(pages_N).nonzero().flatten().tolist():
                yield node, at, int(pages_N[at])

    def _replace(self, node: Any, at: int, lost: int, page: int) -> None:
        size = self.tags.page_size
        self.tags.hold(page)
        self.tags.stand_in(lost, page)
        node.value[at * size : (at + 1) * size] = self._slots(torch.tensor([page], device=node.value.device))
        self.counters.quarantined_pages += 1

    def _nodes(self) -> Iterator[Any]:
        """Nodes of the tree that hold pages. A cache without a tree has none."""
        root = getattr(self.scheduler.tree_cache, "root_node", None)
        waiting = list(root.children.values()) if root is not None else []
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            if node.value is not None and len(node.value):
                yield node

    def _free_pages(self) -> Tensor:
        return torch.cat([self.allocator.free_pages, self.allocator.release_pages])

    def _pages(self, slots_N: Tensor) -> Tensor:
        return slots_N[:: self.tags.page_size].long() // self.tags.page_size

    def _slots(self, pages_N: Tensor) -> Tensor:
        size = self.tags.page_size
        return (pages_N.long()[:, None] * size + torch.arange(size, device=pages_N.device)).flatten()


def _is_ours(reason: Any) -> bool:
    return getattr(reason, "err_type", None) == ERROR_TYPE
