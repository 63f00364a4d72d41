"""The Triton kernels against the truth: on a GPU, or interpreted: make kernels."""

import os
import random
from typing import Any

import pytest
import torch

from kvq.integrity.table import PageTags, Writes
from tests.integrity.drive import drive
from tests.integrity.machine import Machine

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton's interpreter does what numpy 2.4 no longer allows; the one of `make kernels` is older, and warns.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_kernels_never_miss_and_never_cry_wolf(device: str, page_size: int) -> None:
    from kvq.integrity.kernels import TritonPageTags

    machine = Machine(page_size, tags_class=TritonPageTags, device=device)
    tally = drive(800, seed=3, page_size=page_size, fault_rate=0.08, machine=machine)
    assert tally.violations > 10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_long_rows_and_prefill_writes_as_in_the_plain_form(device: str, page_size: int) -> None:
    """Rows longer than a kernel's block, and a batch that writes several tokens for each request."""
    from kvq.integrity.kernels import TritonPageTags, compile_all

    compile_all(torch.device(device), page_size, 4 * page_size)
    rows, pages = 5, 2500
    order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(1)) + 1
    slots_RS = (order.view(rows, pages, 1) * page_size + torch.arange(page_size)).flatten(1).int()
    lengths = [7, 1, 300, 2, 90]
    results = []
    for tags_class in (PageTags, TritonPageTags):
        tags = tags_class(slots_RS.clone().to(device), rows * pages + 1, page_size)
        index_B = torch.arange(rows, device=device)
        lens_B = torch.tensor([pages * page_size] * rows, device=device)
        tags.grow(index_B, torch.zeros_like(lens_B), lens_B, pages)
        tags.slots_RS[1, 7 * page_size] = tags.slots_RS[1, 5 * page_size]  # named twice: disputed
        tags.give_to_cache(1, 0, 2000)
        tags.free(order[[3 * pages + 2049, 3 * pages + 2050, 2]].to(device))
        tags.free(order[[2, 3 * pages + 2050]].to(device))  # twice: counted
        tags.slots_RS[2, 2222 * page_size] = 5 * page_size
        tags.evict(order[pages : pages + 3].to(device))
        tags.adopt(1, 0, 1500)
        writes = Writes(torch.arange(1, 401, device=device), torch.tensor(lengths, device=device))
        verdict_BF = tags.check(index_B, pages, writes=writes)
        assert writes.slots_T is not None
        results.append([verdict_BF, writes.slots_T, tags.slots_RS, tags.tag_P, tags.cached_P, tags.record_RJ])
    for plain, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel, plain, rtol=0, atol=0)
    assert [bool(row[0]) for row in results[1][0].tolist()[:-1]] == [True, True, True, True, False]
    assert results[1][0][-1].tolist() == [0, 2, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_the_holder_of_a_page_given_twice_keeps_it(device: str) -> None:
    from kvq.integrity.kernels import TritonPageTags

    slots_RS = torch.full((3, 4), 3, dtype=torch.int32, device=device)
    tags = TritonPageTags(slots_RS, 8, 1)
    none_B, one_B = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int64, device=device)
    for row in (none_B, one_B):
        tags.grow(row, none_B, one_B, 1)
    verdict = tags.check(torch.arange(2, device=device), 1, writes=None).tolist()
    assert verdict[:2] == [[0, 0, 0, 0], [1, 3, 2, 1]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_what_is_put_off_comes_to_the_same(device: str, page_size: int) -> None:
    from kvq.integrity.kernels import TritonPageTags

    doubled, cached = 0, set()
    for seed in range(6):
        plain, kernel = (pages_change_hands(kind, device, page_size, seed) for kind in (PageTags, TritonPageTags))
        for name in ("tag_P", "cached_P", "named_P", "double_frees"):
            torch.testing.assert_close(getattr(kernel, name), getattr(plain, name), rtol=0, atol=0)
        doubled += int(plain.double_frees)
        cached |= {(tag > 0) - (tag < 0) for tag in plain.cached_P.tolist()}
    assert doubled and cached == {-1, 0, 1}  # freed twice; disputed, free and cached pages


def pages_change_hands(tags_class: type[PageTags], device: str, page_size: int, seed: int) -> PageTags:
    """Pages given to the cache, evicted and freed in any order, soundly or not, and rows overwritten in between."""
    rows, pages, dice = 48, 6, random.Random(seed)
    order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(seed)) + 1
    table_RS = (order.view(rows, pages, 1) * page_size + torch.arange(page_size)).flatten(1).int()
    tags = tags_class(table_RS.to(device), rows * pages + 1, page_size)
    lens_B = torch.full((rows,), pages * page_size, device=device)
    tags.grow(torch.arange(rows, device=device), torch.zeros_like(lens_B), lens_B, pages)
    in_cache: list[int] = []
    row = 0
    for _ in range(80):
        kind, first = dice.choice([*["give"] * 5, "free", "evict", "copy"]), dice.randrange(pages)
        other = dice.randrange(rows)
        # What was just given is freed: operations on the same pages are what must keep their order.
        row = other if kind == "give" else dice.choice([row, other])
        part = slice(first * page_size, dice.randint(first + 1, pages) * page_size)
        named = (tags.slots_RS[row, part] // page_size)[::page_size]
        if kind == "give":
            slots_N = tags.slots_RS[row, part].long() if dice.random() < 0.5 else None
            tags.give_to_cache(row, first, first + len(named), slots_N)
            in_cache += named.tolist()
        elif kind == "free":
            # Some pages are listed twice.
            twice = torch.cat([named, named[: dice.randrange(2)]])
            tags.free(tags.slots_RS[row, part] if page_size == 1 and len(twice) == len(named) else twice)
        elif kind == "evict" and in_cache:
            gone = sorted(set(dice.sample(in_cache, 1 + len(in_cache) // 8)))
            for page in gone:
                in_cache.remove(page)
            tags.evict(torch.tensor(gone, device=device))
        elif kind == "copy":
            tags.slots_RS[row, part] = tags.slots_RS[other, part].clone()
    tags.apply()
    return tags


@pytest.mark.parametrize("device", DEVICES)
def test_releases_are_one_launch_each(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 requests that end together: gifts, then pages, each at once."""
    from kvq.integrity import kernels

    launched: list[str] = []
    for name in ("_give_kernel", "_free_kernel", "_evict_kernel"):
        monkeypatch.setattr(kernels, name, Counted(getattr(kernels, name), launched, name))
    slots_RS = torch.arange(1, 257, dtype=torch.int32, device=device).view(64, 4)
    tags = kernels.TritonPageTags(slots_RS, 257, 1)
    lens_B = torch.full((64,), 4, device=device)
    tags.grow(torch.arange(64, device=device), torch.zeros_like(lens_B), lens_B, 4)
    for row in range(64):
        tags.give_to_cache(row, 0, 3)
    for row in range(64):
        tags.free(slots_RS[row, 3:])
        tags.evict(slots_RS[row, :3].long())
    assert tags.held(torch.arange(1, 257, device=device)).sum() == 192 and not tags.cached_P.any()
    assert launched == ["_give_kernel", "_free_kernel", "_evict_kernel"]


class Counted:
    """A kernel that notes when it is launched."""

    def __init__(self, kernel: Any, launched: list[str], name: str) -> None:
        self.kernel, self.launched, self.name = kernel, launched, name

    def __getitem__(self, grid: Any) -> Any:
        self.launched.append(self.name)
        return self.kernel[grid]
