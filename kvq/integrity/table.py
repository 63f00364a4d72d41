"""Tags of physical pages, what each request recorded of them, and the comparison of the two.

Shape suffixes: P = physical pages, R = request rows, S = slots of a row, J = pages of a row, B = rows of a batch,
N = listed pages, T = tokens that a forward writes, F = fields of a verdict.

A page's tag is the serial number of the allocation that holds it. It is positive while the page is held; freeing
negates it, so that the log shows which allocation ended. A serial is given out once, so two held pages never share a
tag, and an entry of a page table that points at a foreign page shows as surely as a page that was freed. Page 0 is the
engine's padding page: it is never tagged, and so never valid in a row.

This is the plain form, for a CPU and as the reference of `kernels`, which does the same on a GPU without waiting.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SERIAL_LIMIT = 2**31 - 1
NOT_CACHED = 0  # cached_P: the prefix cache does not hold this page
STAND_IN = -1  # cached_P: lent to the cache in place of a lost page; no request may read it
DISPUTED = -2  # cached_P: the cache was given it twice, or by a request that did not hold it

# Fields of a verdict.
BAD_INDEX, BAD_PAGE, EXPECTED_TAG, FOUND_TAG = range(4)
VERDICT_FIELDS = 4


@dataclass(frozen=True, slots=True)
class Violation:
    """The first page of a row whose tag is not the recorded one. `index` counts pages from the row's start."""

    index: int
    page: int
    expected_tag: int
    found_tag: int

    def __str__(self) -> str:
        state = "was never allocated" if self.found_tag == 0 else "is free" if self.found_tag < 0 else "is held"
        return (
            f"page {self.page} at position {self.index} of its page table {state}: "
            f"expected tag {self.expected_tag}, found {self.found_tag}"
        )


Lender = Callable[[int], Tensor | None]


@dataclass(frozen=True, slots=True)
class Writes:
    """Where the coming forward writes: `lengths_B` of `slots_T` for each request of the batch, in its order.

    No lengths: one each. No slots: the engine will take them from the page table.
    """

    slots_T: Tensor | None = None
    lengths_B: Tensor | None = None


class PageTags:
    """Tags of one pool's pages, and the records of the rows of one page table.

    `slots_RS` is the engine's own page table: row, position -> token slot, page = slot // page_size. It is read and,
    where a check or a repair says so, written; the engine goes on owning it.

    Memory: 4 bytes per page three times, and 4 bytes per page of every row: as much again as the page table at a page
    size of 1, 1/64 of it at 64.
    """

    def __init__(self, slots_RS: Tensor, num_pages: int, page_size: int) -> None:
        device, rows, slots = slots_RS.device, slots_RS.shape[0], slots_RS.shape[1]
        self.slots_RS = slots_RS
        self.page_size, self.num_pages = page_size, num_pages
        self.pages_per_row = -(-slots // page_size)
        self.tag_P = torch.zeros(num_pages, dtype=torch.int32, device=device)
        self.cached_P = torch.full((num_pages,), NOT_CACHED, dtype=torch.int32, device=device)
        self.named_P = torch.zeros(num_pages, dtype=torch.int32, device=device)
        self.record_RJ = torch.zeros((rows, self.pages_per_row), dtype=torch.int32, device=device)
        self.covered_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self.double_frees = torch.zeros(1, dtype=torch.int32, device=device)
        self._next_serial = 1

    def apply(self) -> None:
        """Applies what `free`, `evict` and `give_to_cache` have put off. The plain form puts nothing off."""

    # Allocation and release

    def take_serials(self, count: int) -> int:
        """The first of `count` serials that nobody else gets. After 2**31 of them they start again at 1."""
        if self._next_serial + count > SERIAL_LIMIT:
            self._next_serial = 1
        first = self._next_serial
        self._next_serial += count
        return first

    def grow(self, rows_B: Tensor, old_lens_B: Tensor, new_lens_B: Tensor | None, max_new_pages: int) -> None:
        """Tags and records the pages that rows gained when they grew from old to new lengths (tokens; None: one more).

        `max_new_pages` bounds the pages that one row gained, at least 1. A page that is still held keeps its tag, while
        the row records the serial that it was promised: the newcomer's record is wrong then, not the holder's.
        """
        self.apply()
        first_serial = self.take_serials(rows_B.shape[0] * max_new_pages)
        rows_B = rows_B.long()
        new_lens_B = old_lens_B + 1 if new_lens_B is None else new_lens_B
        first_page_B = _pages(old_lens_B.long(), self.page_size)
        end_page_B = _pages(new_lens_B.long(), self.page_size)
        step_J = torch.arange(max_new_pages, device=rows_B.device)
        index_BJ = first_page_B[:, None] + step_J
        new_BJ = index_BJ < end_page_B[:, None]
        serial_BJ = first_serial + torch.arange(new_BJ.numel(), device=rows_B.device).view(new_BJ.shape).int()
        index_BJ = index_BJ.clamp(max=self.pages_per_row - 1)
        page_BJ = self._page(rows_B[:, None], index_BJ)
        # What is masked out goes to page 0, whose tag is put back to 0 below.
        target_BJ = torch.where(new_BJ & (self.tag_P[page_BJ] <= 0), page_BJ, 0)
        self.tag_P[target_BJ] = serial_BJ
        self.tag_P[0] = 0
        # Entries of the record that are masked out may name one place twice, so only the others are written.
        self.record_RJ[rows_B[:, None].expand_as(new_BJ)[new_BJ], index_BJ[new_BJ]] = serial_BJ[new_BJ]
        self.covered_R[rows_B] = end_page_B.int()

    def free(self, pages_N: Tensor) -> None:
        """Ends the allocations of these pages. One that is free already, or listed again, is counted, not changed."""
        pages_N, copies_N = torch.unique(pages_N.long(), return_counts=True)
        tag_N = self.tag_P[pages_N]
        self.double_frees += torch.where(tag_N > 0, copies_N - 1, copies_N).sum(dtype=torch.int32)
        self.tag_P[pages_N] = -tag_N.abs()

    def reset(self) -> None:
        """All pages are free: the engine emptied its pool."""
        self.apply()
        self.tag_P.copy_(-self.tag_P.abs())
        self.forget_cache()

    # The prefix cache

    def adopt(self, row: int, first: int, end: int) -> None:
        """Pages [first, end) of the row are the cache's: the row records the tags under which the cache took them.

        Not the tags that they have now: those are another's, if the cache lost the page.
        """
        self.apply()
        self.record_RJ[row, first:end] = self.cached_P[self._page_range(row, first, end)].clamp(min=0)

    def give_to_cache(self, row: int, first: int, end: int, slots_N: Tensor | None = None) -> None:
        """The cache took pages [first, end) of this row, under the tags that the row had recorded. `slots_N` are all
        slots of these pages as the cache copied them, in int64; None: what the row names now.

        A page that another entry of the cache names as well, or whose tag is another, is disputed: no request may read
        it until no entry names it.
        """
        page_J = self._page_range(row, first, end)
        if slots_N is not None:
            page_J = slots_N[:: self.page_size] // self.page_size
        record_J = self.record_RJ[row, first:end]
        self.named_P.scatter_add_(0, page_J, torch.ones_like(record_J))
        sound_J = (self.named_P[page_J] == 1) & (self.tag_P[page_J] == record_J) & (record_J > 0)
        self.cached_P[page_J] = torch.where(sound_J, record_J, DISPUTED)

    def evict(self, pages_N: Tensor) -> None:
        """The cache gave these pages up itself. A page that it loses in any other way stays marked as the cache's."""
        pages_N = pages_N.long()
        self.named_P.scatter_add_(0, pages_N, torch.full_like(pages_N, -1, dtype=torch.int32))
        self.cached_P[pages_N] = torch.where(self.named_P[pages_N] <= 0, NOT_CACHED, self.cached_P[pages_N])

    def forget_cache(self) -> None:
        """The cache was emptied at once."""
        self.apply()
        self.cached_P.fill_(NOT_CACHED)
        self.named_P.zero_()

    def cache_mismatches(self, pages_N: Tensor) -> Tensor:
        """Boolean per page: the cache names it, yet its tag is no longer the one under which the cache took it."""
        self.apply()
        pages_N = pages_N.long()
        cached_N, tag_N = self.cached_P[pages_N], self.tag_P[pages_N]
        stand_in_N = (cached_N == STAND_IN) & (tag_N > 0)
        return ~stand_in_N & ((cached_N != tag_N) | (tag_N <= 0))

    def held(self, pages_N: Tensor) -> Tensor:
        """Boolean per page: somebody's allocation holds it."""
        self.apply()
        return self.tag_P[pages_N.long()] > 0

    # The check

    def check(self, rows_B: Tensor, max_pages: int, *, writes: Writes | None) -> Tensor:
        """int32 verdict of B + 1 rows of F fields: [first bad index + 1, page, expected, found], all 0 for a sound row.

        The last row is [0, double frees so far, 0, 0]. `max_pages` bounds the pages of any of these rows. With
        `writes`, entries that fail are pointed at the padding page, and so is all that the coming forward would write
        for their requests: it neither reads nor writes a foreign page.
        """
        self.apply()
        rows_B = rows_B.long()
        index_J = torch.arange(max_pages, device=rows_B.device)
        page_BJ = self._page(rows_B[:, None], index_J)
        expected_BJ, found_BJ = self.record_RJ[rows_B, :max_pages], self.tag_P[page_BJ]
        used_BJ = index_J < self.covered_R[rows_B, None]
        bad_BJ = used_BJ & ((expected_BJ != found_BJ) | (expected_BJ <= 0))
        bad_B = bad_BJ.any(dim=1)
        first_B1 = bad_BJ.int().argmax(dim=1, keepdim=True)
        verdict_BF = torch.zeros((rows_B.shape[0] + 1, VERDICT_FIELDS), dtype=torch.int32, device=rows_B.device)
        seen = (first_B1 + 1, *(value_BJ.gather(1, first_B1) for value_BJ in (page_BJ, expected_BJ, found_BJ)))
        verdict_BF[:-1] = torch.cat([field.int() for field in seen], dim=1) * bad_B[:, None]
        verdict_BF[-1, BAD_PAGE] = self.double_frees[0]
        if writes is not None:
            self._point_at_padding(rows_B, bad_BJ)
            if writes.slots_T is not None:
                lengths_B = writes.lengths_B
                bad_T = bad_B if lengths_B is None else torch.repeat_interleave(bad_B, lengths_B.long())
                writes.slots_T.masked_fill_(bad_T, 0)
        return verdict_BF

    def _point_at_padding(self, rows_B: Tensor, bad_BJ: Tensor) -> None:
        slots = min(bad_BJ.shape[1] * self.page_size, self.slots_RS.shape[1])
        bad_BS = bad_BJ.repeat_interleave(self.page_size, dim=1)[:, :slots]
        padding_S = (torch.arange(slots, device=rows_B.device) % self.page_size).to(self.slots_RS.dtype)
        self.slots_RS[rows_B, :slots] = torch.where(bad_BS, padding_S, self.slots_RS[rows_B, :slots])

    # Repair: all of this waits for the device; it runs after a violation only

    def settle_row(self, row: int, held_from: int, end: int, lend: Lender) -> int | None:
        """Makes pages [held_from, end) of a failed row safe to free: each is held by this row's own allocation.

        An entry that is not gets a fresh page from `lend(count) -> pages`, so that the row frees as many pages as it
        was given. Returns how many were lent, or None when `lend` had none: then nothing of the row may be freed.
        Where an entry had been overwritten, the page that belongs there is among the `orphans`.
        """
        self.apply()
        record_J, page_J = self.record_RJ[row, held_from:end], self._page_range(row, held_from, end)
        unsound_J = (self.tag_P[page_J] != record_J) | (record_J <= 0)
        lost = (unsound_J.nonzero().flatten() + held_from).tolist()
        if not lost:
            return 0
        pages_N = lend(len(lost))
        if pages_N is None:
            return None
        for index, page in zip(lost, pages_N.tolist(), strict=True):
            self.record_RJ[row, index] = self.hold(page)
            self._set_page(row, index, page)
        return len(lost)

    def hold(self, page: int) -> int:
        """Tags one page that a repair took from the pool; returns the tag."""
        self.apply()
        tag = self.take_serials(1)
        self.tag_P[page] = tag
        return tag

    def stand_in(self, lost: int, page: int) -> None:
        """The cache names `page`, which `hold` has tagged, where it named a page that it lost."""
        self.evict(torch.tensor([lost], device=self.slots_RS.device))
        self.apply()
        self.named_P[page] = 1
        self.cached_P[page] = STAND_IN

    def orphans(self, named_N: Tensor) -> Tensor:
        """Pages tagged as held that are not in `named_N`: those that are cached, free, or of a row in use."""
        self.apply()
        known_P = torch.zeros_like(self.tag_P, dtype=torch.bool)
        known_P[named_N.long()] = True
        return ((self.tag_P > 0) & ~known_P).nonzero().flatten()

    def pages_of(self, row: int) -> Tensor:
        """The pages that a row in use names. Waits for the device."""
        self.apply()
        return self._page_range(row, 0, int(self.covered_R[row]))

    def sound_free_list(self, pages_N: Tensor) -> Tensor:
        """The free list without pages that are held, the padding page, and second copies; order is kept."""
        self.apply()
        ordered_N, from_N = torch.sort(pages_N, stable=True)
        first_N = torch.ones_like(ordered_N, dtype=torch.bool)
        first_N[1:] = ordered_N[1:] != ordered_N[:-1]
        keep_N = torch.empty_like(first_N)
        keep_N[from_N] = first_N
        return pages_N[keep_N & (pages_N != 0) & (self.tag_P[pages_N.long()] <= 0)]

    # Addressing

    def _page(self, rows: Tensor, index: Tensor) -> Tensor:
        return self.slots_RS[rows, index * self.page_size].long() // self.page_size

    def _page_range(self, row: int, first: int, end: int) -> Tensor:
        return (
            self.slots_RS[row, first * self.page_size : end * self.page_size : self.page_size].long() // self.page_size
        )

    def _set_page(self, row: int, index: int, page: int) -> None:
        start = index * self.page_size
        stop = min(start + self.page_size, self.slots_RS.shape[1])
        self.slots_RS[row, start:stop] = torch.arange(
            page * self.page_size, page * self.page_size + stop - start, device=self.slots_RS.device
        ).to(self.slots_RS.dtype)


def read_verdict(verdict_BF: Sequence[Sequence[int]]) -> dict[int, Violation]:
    """Position in the batch -> its violation. `verdict_BF` is a verdict on the host, without its last row."""
    return {
        at: Violation(row[BAD_INDEX] - 1, row[BAD_PAGE], row[EXPECTED_TAG], row[FOUND_TAG])
        for at, row in enumerate(verdict_BF)
        if row[BAD_INDEX]
    }


def _pages(tokens_B: Tensor, page_size: int) -> Tensor:
    """Pages that this many tokens need."""
    return (tokens_B + page_size - 1) // page_size
