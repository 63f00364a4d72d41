"""A small serving engine without a model: an allocator, a page table, a prefix cache, and faults; beside it the truth.

The truth is kept in Python objects: which allocation holds each physical page, and which one each entry of a page
table or of the cache was promised. It shares no code and no arithmetic with tags, and says for every request whether
it would read a page that is not its own.
"""

from dataclasses import dataclass, field

import torch

from kvq.integrity.table import PageTags, Writes, read_verdict

ROWS, SLOTS_PER_ROW = 6, 24
Grant = int  # number of an allocation


@dataclass
class Entry:
    """A page, and the allocation under which it was promised."""

    page: int
    grant: Grant
    barred: bool = False  # adopted from the cache while the page was disputed: not to be read, whatever comes later


@dataclass
class Node:
    """One prefix in the cache: whole pages. Requests that use it keep it from being evicted."""

    entries: list[Entry]
    users: set[int] = field(default_factory=set)


@dataclass
class Request:
    row: int
    tokens: int
    entries: list[Entry]  # what it was promised, page by page
    cached: int = 0  # of these, the leading ones that are the cache's
    nodes: list[Node] = field(default_factory=list)


class Machine:
    """Operations return whether they could be done. `check` raises AssertionError where tags and truth differ."""

    def __init__(
        self, page_size: int, num_pages: int = 20, tags_class: type[PageTags] = PageTags, device: str = "cpu"
    ) -> None:
        self.page_size = page_size
        self.device = device
        self.slots_RS = torch.zeros((ROWS, SLOTS_PER_ROW), dtype=torch.int32, device=device)
        self.tags = tags_class(self.slots_RS, num_pages + 1, page_size)
        self.num_pages = num_pages
        self.free_list = list(range(1, num_pages + 1))
        self.holder: dict[int, Grant | None] = dict.fromkeys(self.free_list)
        self.requests: dict[int, Request] = {}
        self.nodes: list[Node] = []
        self.disputed: set[int] = set()
        self.faulty = False
        self.violations = 0
        self.doubled = 0
        self._grants = 0

    # What an engine does

    def admit(self, tokens: int, node: Node | None = None, prefix_pages: int = 0) -> bool:
        """A request, on the first pages of a cached prefix where one is given (share, fork, reuse)."""
        row = next((row for row in range(ROWS) if row not in self.requests), None)
        shared = node.entries[:prefix_pages] if node else []
        total = len(shared) * self.page_size + tokens
        if row is None or total > SLOTS_PER_ROW or self._missing(total, len(shared)) > len(self.free_list):
            return False
        adopted = [self._adopted(entry) for entry in shared]
        request = Request(row, len(shared) * self.page_size, adopted, len(shared))
        if node and shared:
            request.nodes.append(node)
            node.users.add(row)
        for index, entry in enumerate(shared):
            self._write(row, index, entry.page)
        self.requests[row] = request
        self.tags.adopt(row, 0, len(shared))
        self._grow(request, total)
        return True

    def grow(self, row: int, tokens: int) -> bool:
        """Decode, or a further chunk of a prompt."""
        request = self.requests[row]
        total = request.tokens + tokens
        if total > SLOTS_PER_ROW or self._missing(total, len(request.entries)) > len(self.free_list):
            return False
        self._grow(request, total)
        return True

    def cache(self, row: int) -> bool:
        """The cache takes the whole pages of a request that goes on, as after a prefill or between chunks."""
        request = self.requests[row]
        full = request.tokens // self.page_size
        if full <= request.cached:
            return False
        taken = [Entry(self._read(row, index), request.entries[index].grant) for index in range(request.cached, full)]
        for entry in taken:
            if self._names(entry.page) or self.holder.get(entry.page) != entry.grant:
                self.disputed.add(entry.page)
        node = Node(taken, {row})
        self.nodes.append(node)
        self.disputed |= {entry.page for entry in taken if self._names(entry.page) > 1}
        self.tags.give_to_cache(row, request.cached, full)
        request.nodes.append(node)
        request.cached = full
        return True

    def finish(self, row: int, *, keep: bool) -> bool:
        """The request ends; the cache keeps its whole pages (finished) or not (aborted, retracted)."""
        if keep:
            self.cache(row)
        request = self.requests.pop(row)
        for node in request.nodes:
            node.users.discard(row)
        self._free([self._read(row, index) for index in range(request.cached, len(request.entries))])
        return True

    def evict(self, node: Node) -> bool:
        if node.users:
            return False
        self.nodes.remove(node)
        pages = [entry.page for entry in node.entries]
        self.disputed -= {page for page in pages if not self._names(page)}
        self.tags.evict(self._ints(*pages))
        self._free(pages)
        return True

    # What goes wrong

    def fault_free(self, page: int) -> bool:
        """A page is freed while somebody uses it."""
        self.faulty = True
        self._free([page])
        return True

    def fault_double(self, page: int) -> bool:
        """The allocator's list names a page that is in use."""
        self.faulty = True
        self.free_list.insert(0, page)
        return True

    def fault_swap(self, row: int, index: int, page: int) -> bool:
        """An entry of the page table is overwritten."""
        self.faulty = True
        self._write(row, index, page)
        return True

    # The check

    def check(self) -> dict[int, str]:
        """Compares tags with the truth; returns the requests that fail, and contains what they would write."""
        rows = sorted(self.requests)
        if not rows:
            return {}
        truth = {row: reason for row in rows if (reason := self._wrong(self.requests[row]))}
        writes = Writes(torch.arange(100, 100 + len(rows), device=self.device))
        most = max(len(self.requests[row].entries) for row in rows)
        verdict = self.tags.check(self._ints(*rows), most, writes=writes).tolist()
        found = {rows[at]: str(violation) for at, violation in read_verdict(verdict[:-1]).items()}
        assert set(found) == set(truth), f"tags say {found}, the truth is {truth}"
        assert self.faulty or not found
        assert writes.slots_T is not None
        assert writes.slots_T.tolist() == [0 if row in found else 100 + at for at, row in enumerate(rows)]
        self.violations += len(found)
        self.doubled = verdict[-1][1]
        return found

    def recover(self, failed: dict[int, str]) -> None:
        """What the plugin does after a check: failed requests end without spreading the damage."""
        for row in failed:
            request = self.requests[row]
            if self.tags.settle_row(row, request.cached, len(request.entries), self._lend) is None:
                request.entries = request.entries[: request.cached]  # nothing of it may be freed
            self.finish(row, keep=False)
        if self.faulty:
            self._clean_free_list()

    def idle(self) -> None:
        """All requests end and the cache is emptied; then every page must be free again, once."""
        for row in list(self.requests):
            self.finish(row, keep=False)
        for node in list(self.nodes):
            self.evict(node)
        if self.faulty:
            self._clean_free_list()
            orphans = self.tags.orphans(self._ints(*self.free_list))
            if orphans.numel():
                self._free(orphans.tolist())
        assert sorted(self.free_list) == list(range(1, self.num_pages + 1))
        assert not self.used_pages()
        self.faulty = False

    def accounts(self) -> None:
        """Every page is free, cached, or a request's: once."""
        used = [entry.page for node in self.nodes for entry in node.entries]
        used += [entry.page for request in self.requests.values() for entry in request.entries[request.cached :]]
        assert sorted(used + self.free_list) == list(range(1, self.num_pages + 1))

    def used_pages(self) -> list[int]:
        return sorted(page for page, grant in self.holder.items() if grant is not None)

    # Inside

    def _wrong(self, request: Request) -> str | None:
        for index, entry in enumerate(request.entries):
            page = self._read(request.row, index)
            if page != entry.page:
                return f"entry {index} names {page}, not {entry.page}"
            if self.holder.get(page) != entry.grant:
                return f"page {page} is held by {self.holder.get(page)}, not {entry.grant}"
            if entry.barred:
                return f"page {page} was disputed"
        return None

    def _grow(self, request: Request, total: int) -> None:
        row, old = request.row, request.tokens
        new_pages = self._missing(total, len(request.entries))
        pages, self.free_list = self.free_list[:new_pages], self.free_list[new_pages:]
        for page in pages:
            self._grants += 1
            # A page that is held stays its holder's: the newcomer was promised what it cannot have.
            self.holder[page] = self._grants if self.holder[page] is None else self.holder[page]
            self._write(row, len(request.entries), page)
            request.entries.append(Entry(page, self._grants))
        request.tokens = total
        self.tags.grow(self._ints(row), self._ints(old), self._ints(total), max(1, new_pages))

    def _free(self, pages: list[int]) -> None:
        self.tags.free(self._ints(*pages))
        for page in pages:
            if page:
                self.holder[page] = None
        self.free_list += pages

    def _lend(self, count: int) -> torch.Tensor | None:
        self._clean_free_list()
        if count > len(self.free_list):
            return None
        pages, self.free_list = self.free_list[:count], self.free_list[count:]
        for page in pages:
            self._grants += 1
            self.holder[page] = self._grants
        return self._ints(*pages)

    def _clean_free_list(self) -> None:
        self.free_list = self.tags.sound_free_list(self._ints(*self.free_list)).tolist() if self.free_list else []

    def _adopted(self, entry: Entry) -> Entry:
        return Entry(entry.page, entry.grant, barred=entry.page in self.disputed)

    def _names(self, page: int) -> int:
        return sum(entry.page == page for node in self.nodes for entry in node.entries)

    def _missing(self, tokens: int, have: int) -> int:
        return max(0, -(-tokens // self.page_size) - have)

    def _read(self, row: int, index: int) -> int:
        return int(self.slots_RS[row, index * self.page_size]) // self.page_size

    def _write(self, row: int, index: int, page: int) -> None:
        first = index * self.page_size
        stop = min(first + self.page_size, SLOTS_PER_ROW)
        self.slots_RS[row, first:stop] = torch.arange(
            page * self.page_size, page * self.page_size + stop - first, dtype=torch.int32
        )

    def _ints(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
