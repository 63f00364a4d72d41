"""The operations of `table` that run in every step or with every request, as one Triton kernel each.

Same results as `PageTags`, as the tests make sure; here nothing waits for the device. What the pages of single requests
and of single cache entries call for is put off until an operation needs it, and is then done for all of them at once,
in order: 64 requests that end in one decode step would otherwise be hundreds of launches while the GPU has nothing else
to do.

Shape suffixes as in `table`; G = gifts to the cache, K = what is known of each.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.integrity.table import DISPUTED, NOT_CACHED, VERDICT_FIELDS, PageTags, Writes

# One value each, whatever the batch: a kernel compiled in the middle of serving would be a pause.
BLOCK = 1024
BATCH_BLOCK = 256
_DISPUTED, _NOT_CACHED = tl.constexpr(DISPUTED), tl.constexpr(NOT_CACHED)
_FIELDS = tl.constexpr(VERDICT_FIELDS)
_NO_INDEX = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True)
class _Gift:
    """Pages [first, first + count) of a row, which the cache took; all their slots."""

    row: int
    first: int
    count: int
    slots_N: Tensor


class TritonPageTags(PageTags):
    """`PageTags` for a page table on a GPU."""

    def __init__(self, slots_RS: Tensor, num_pages: int, page_size: int) -> None:
        super().__init__(slots_RS, num_pages, page_size)
        # What was put off. Gifts read tags, so either there are gifts or there is what changes tags and the cache's
        # names; these two touch nothing in common.
        self._gifts: list[_Gift] = []
        self._freed: list[Tensor] = []
        self._evicted: list[Tensor] = []

    def apply(self) -> None:
        self._apply_gifts()
        self._apply_releases()

    def grow(self, rows_B: Tensor, old_lens_B: Tensor, new_lens_B: Tensor | None, max_new_pages: int) -> None:
        self.apply()
        batch = rows_B.shape[0]
        first_serial = self.take_serials(batch * max_new_pages)
        _grow_kernel[(batch,)](
            rows_B, old_lens_B, old_lens_B if new_lens_B is None else new_lens_B, first_serial,
            self.slots_RS, self.tag_P, self.record_RJ, self.covered_R,
            self.slots_RS.stride(0), self.record_RJ.stride(0), max_new_pages,
            ONE_MORE=new_lens_B is None, PAGE_SIZE=self.page_size, BLOCK=1 if max_new_pages == 1 else BLOCK,
        )  # fmt: skip

    def free(self, pages_N: Tensor) -> None:
        self._apply_gifts()
        if pages_N.shape[0]:
            # The engine overwrites a row while what was freed of it is still waiting here.
            is_view = pages_N.untyped_storage().data_ptr() == self.slots_RS.untyped_storage().data_ptr()
            self._freed.append(pages_N.clone() if is_view else pages_N)

    def adopt(self, row: int, first: int, end: int) -> None:
        self.apply()
        if end > first:
            _adopt_kernel[(triton.cdiv(end - first, BLOCK),)](
                row, first, end, self.slots_RS, self.cached_P, self.record_RJ,
                self.slots_RS.stride(0), self.record_RJ.stride(0), PAGE_SIZE=self.page_size, BLOCK=BLOCK,
            )  # fmt: skip

    def give_to_cache(self, row: int, first: int, end: int, slots_N: Tensor | None = None) -> None:
        self._apply_releases()
        if end > first:
            if slots_N is None:
                slots_N = self.slots_RS[row, first * self.page_size : end * self.page_size].long()
            self._gifts.append(_Gift(row, first, end - first, slots_N))

    def evict(self, pages_N: Tensor) -> None:
        self._apply_gifts()
        if pages_N.shape[0]:
            self._evicted.append(pages_N)

    def _apply_gifts(self) -> None:
        if not self._gifts:
            return
        gifts, self._gifts = self._gifts, []
        starts = accumulate((len(gift.slots_N) for gift in gifts), initial=0)
        known = [[gift.row, gift.first, gift.count, start] for gift, start in zip(gifts, starts, strict=False)]
        device = self.slots_RS.device
        known_GK = torch.tensor(known, dtype=torch.int64, pin_memory=device.type == "cuda")
        blocks = triton.cdiv(max(gift.count for gift in gifts), BLOCK)
        _give_kernel[(len(gifts), blocks)](
            known_GK.to(device, non_blocking=True), torch.cat([gift.slots_N for gift in gifts]),
            self.tag_P, self.cached_P, self.named_P, self.record_RJ, self.record_RJ.stride(0),
            PAGE_SIZE=self.page_size, BLOCK=BLOCK,
        )  # fmt: skip

    def _apply_releases(self) -> None:
        if self._freed:
            pages_N = _joined(self._freed)
            count = pages_N.shape[0]
            _free_kernel[(triton.cdiv(count, BLOCK),)](
                pages_N, pages_N.stride(0), self.tag_P, self.double_frees, count, BLOCK=BLOCK
            )
            self._freed = []
        if self._evicted:
            pages_N = _joined(self._evicted)
            count = pages_N.shape[0]
            _evict_kernel[(triton.cdiv(count, BLOCK),)](
                pages_N, pages_N.stride(0), self.cached_P, self.named_P, count, BLOCK=BLOCK
            )
            self._evicted = []

    def check(self, rows_B: Tensor, max_pages: int, *, writes: Writes | None) -> Tensor:
        self.apply()
        batch = rows_B.shape[0]
        verdict_BF = torch.empty((batch + 1, VERDICT_FIELDS), dtype=torch.int32, device=rows_B.device)
        slots_T, lengths_B = (None, None) if writes is None else (writes.slots_T, writes.lengths_B)
        _check_kernel[(batch,)](
            rows_B, self.slots_RS, self.tag_P, self.record_RJ, self.covered_R, self.double_frees, verdict_BF,
            slots_T, lengths_B, self.slots_RS.stride(0), self.record_RJ.stride(0), self.slots_RS.shape[1],
            CONTAIN=writes is not None,
            PAGE_SIZE=self.page_size, BATCH_BLOCK=BATCH_BLOCK, BLOCK=BLOCK,
        )  # fmt: skip
        return verdict_BF


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def compile_all(device: torch.device, page_size: int, slots_per_row: int) -> None:
    """Runs each kernel in each of its forms once, on a table of its own, so that none is compiled while serving.

    Triton compiles for the divisibility of strides too, so the rows must be as long as the real ones.
    """
    slots_RS = torch.zeros((2, slots_per_row), dtype=torch.int32, device=device)
    tags = TritonPageTags(slots_RS, 8, page_size)
    ones_B = torch.ones(1, dtype=torch.int64, device=device)
    for lens_B in (ones_B, ones_B.int()):
        tags.grow(ones_B, lens_B, lens_B, 2)
        tags.grow(ones_B, lens_B, None, 1)
        tags.grow(ones_B, lens_B, lens_B, 1)
    for pages_N in (ones_B, ones_B.int()):
        tags.free(pages_N)
        tags.evict(pages_N)
        tags.apply()
    tags.adopt(1, 0, 1)
    tags.give_to_cache(1, 0, 1)
    tags.apply()
    for writes in (None, Writes(), Writes(ones_B.clone()), Writes(ones_B.clone(), ones_B)):
        tags.check(ones_B, 1, writes=writes)


@triton.jit(do_not_specialize=["rows", "old_lens", "new_lens", "first_serial", "max_new_pages"])
def _grow_kernel(
    rows, old_lens, new_lens, first_serial, slots, tags, records, covered, slots_stride, record_stride, max_new_pages,
    ONE_MORE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    row = tl.load(rows + at).to(tl.int64)
    old_len = tl.load(old_lens + at).to(tl.int64)
    new_len = old_len + 1 if ONE_MORE else tl.load(new_lens + at).to(tl.int64)
    first = (old_len + PAGE_SIZE - 1) // PAGE_SIZE
    end = (new_len + PAGE_SIZE - 1) // PAGE_SIZE
    for start in range(0, (end - first).to(tl.int32), BLOCK):
        step = start + tl.arange(0, BLOCK)
        index = first + step
        new = index < end
        page = tl.load(slots + row * slots_stride + index * PAGE_SIZE, mask=new, other=0) // PAGE_SIZE
        serial = (first_serial + at * max_new_pages + step).to(tl.int32)
        before = tl.load(tags + page, mask=new & (page != 0), other=1)
        # Two rows that were given one page race for it here, and one of them loses.
        before = tl.where(before <= 0, before, -_NO_INDEX)
        tl.atomic_cas(tags + page, before, serial, sem="relaxed")
        tl.store(records + row * record_stride + index, serial, mask=new)
    tl.store(covered + row, end.to(tl.int32))


@triton.jit(do_not_specialize=["pages", "pages_stride", "count"])
def _free_kernel(pages, pages_stride, tags, double_frees, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages + at * pages_stride, mask=at < count, other=0)
    tag = tl.load(tags + page, mask=at < count, other=1)
    # A page that is listed twice is freed once, whoever comes first.
    before = tl.atomic_cas(tags + page, tl.where((at < count) & (tag > 0), tag, _NO_INDEX), -tag, sem="relaxed")
    doubled = tl.sum(((at < count) & ((tag <= 0) | (before != tag))).to(tl.int32))
    if doubled > 0:
        tl.atomic_add(double_frees, doubled)


@triton.jit(do_not_specialize=["row", "first", "end"])
def _adopt_kernel(
    row, first, end, slots, cached, records, slots_stride, record_stride, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = row.to(tl.int64)
    index = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = index < end
    page = tl.load(slots + row * slots_stride + index * PAGE_SIZE, mask=used, other=0) // PAGE_SIZE
    tag = tl.load(cached + page, mask=used, other=0)
    tl.store(records + row * record_stride + index, tl.maximum(tag, 0), mask=used)


@triton.jit(do_not_specialize=["known", "given_slots"])
def _give_kernel(
    known, given_slots, tags, cached, named, records, record_stride, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    of_gift = known + tl.program_id(0) * 4
    row, first, count = tl.load(of_gift), tl.load(of_gift + 1), tl.load(of_gift + 2)
    step = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = step < count
    page = tl.load(given_slots + tl.load(of_gift + 3) + step * PAGE_SIZE, mask=used, other=0) // PAGE_SIZE
    index = first + step
    record = tl.load(records + row * record_stride + index, mask=used, other=0)
    tag = tl.load(tags + page, mask=used, other=0)
    before = tl.atomic_add(named + page, 1, mask=used, sem="relaxed")
    sound = used & (before == 0) & (record == tag) & (record > 0)
    # A page that is named twice, by one row or by two: whichever comes first, it ends as disputed.
    tl.atomic_cas(cached + page, tl.where(sound, _NOT_CACHED, _NO_INDEX), record, sem="relaxed")
    tl.atomic_min(cached + page, _DISPUTED, mask=used & ~sound, sem="relaxed")


@triton.jit(do_not_specialize=["pages", "pages_stride", "count"])
def _evict_kernel(pages, pages_stride, cached, named, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages + at * pages_stride, mask=at < count, other=0)
    before = tl.atomic_add(named + page, -1, mask=at < count, sem="relaxed")
    tl.store(cached + page, _NOT_CACHED, mask=(at < count) & (before <= 1))


@triton.jit
def _write_to_padding(out_slots, lengths, at, BATCH_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """What the forward would write for this request of the batch goes to slot 0."""
    if lengths is None:
        tl.store(out_slots + at, 0)
    else:
        token = tl.full((), 0, tl.int64)
        for start in range(0, at, BATCH_BLOCK):
            earlier = start + tl.arange(0, BATCH_BLOCK)
            token += tl.sum(tl.load(lengths + earlier, mask=earlier < at, other=0).to(tl.int64))
        count = tl.load(lengths + at).to(tl.int32)
        for start in range(0, count, BLOCK):
            step = start + tl.arange(0, BLOCK)
            tl.store(out_slots + token + step, 0, mask=step < count)


@triton.jit(do_not_specialize=["rows", "verdict", "out_slots", "lengths"])
def _check_kernel(
    rows, slots, tags, records, covered, double_frees, verdict, out_slots, lengths,
    slots_stride, record_stride, row_slots,
    CONTAIN: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BATCH_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    row = tl.load(rows + at).to(tl.int64)
    end = tl.load(covered + row)
    first_bad = tl.full((), _NO_INDEX, tl.int32)
    bad_page = tl.full((), 0, tl.int32)
    bad_expected = tl.full((), 0, tl.int32)
    bad_found = tl.full((), 0, tl.int32)
    for start in range(0, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        used = index < end
        page = tl.load(slots + row * slots_stride + index * PAGE_SIZE, mask=used, other=0) // PAGE_SIZE
        expected = tl.load(records + row * record_stride + index, mask=used, other=1)
        found = tl.load(tags + page, mask=used, other=1)
        bad = used & ((expected != found) | (expected <= 0))
        here = tl.min(tl.where(bad, index, _NO_INDEX))
        if here < first_bad:
            first_bad = here
            bad_page = tl.sum(tl.where(index == here, page, 0)).to(tl.int32)
            bad_expected = tl.sum(tl.where(index == here, expected, 0))
            bad_found = tl.sum(tl.where(index == here, found, 0))
        if CONTAIN:
            if here < _NO_INDEX:
                for offset in range(PAGE_SIZE):
                    slot = index * PAGE_SIZE + offset
                    tl.store(slots + row * slots_stride + slot, offset, mask=bad & (slot < row_slots))
    if out_slots is not None:
        if first_bad < _NO_INDEX:
            _write_to_padding(out_slots, lengths, at, BATCH_BLOCK, BLOCK)
    out = verdict + at * _FIELDS
    tl.store(out, tl.where(first_bad == _NO_INDEX, 0, first_bad + 1))
    tl.store(out + 1, bad_page)
    tl.store(out + 2, bad_expected)
    tl.store(out + 3, bad_found)
    if at == 0:
        last = verdict + tl.num_programs(0) * _FIELDS
        tl.store(last, 0)
        tl.store(last + 1, tl.load(double_frees))
        tl.store(last + 2, 0)
        tl.store(last + 3, 0)
