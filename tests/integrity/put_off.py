"""A table that puts off what the GPU's puts off, in plain form, and lets nobody read it while something waits."""

from collections.abc import Callable

from torch import Tensor

from kvq.integrity.table import PageTags


class PutOffTags(PageTags):
    """What waits is applied in the order in which it came. Reading a tensor that it would change is an error."""

    def __init__(self, slots_RS: Tensor, num_pages: int, page_size: int) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._values: dict[str, Tensor] = {}
        super().__init__(slots_RS, num_pages, page_size)

    def apply(self) -> None:
        waiting, self._waiting = self._waiting, []
        for operation in waiting:
            operation()

    def free(self, pages_N: Tensor) -> None:
        is_view = pages_N.untyped_storage().data_ptr() == self.slots_RS.untyped_storage().data_ptr()
        own_N = pages_N.clone() if is_view else pages_N
        self._waiting.append(lambda: super(PutOffTags, self).free(own_N))

    def evict(self, pages_N: Tensor) -> None:
        self._waiting.append(lambda: super(PutOffTags, self).evict(pages_N))

    def give_to_cache(self, row: int, first: int, end: int, slots_N: Tensor | None = None) -> None:
        if slots_N is None:
            slots_N = self.slots_RS[row, first * self.page_size : end * self.page_size].long()
        self._waiting.append(lambda: super(PutOffTags, self).give_to_cache(row, first, end, slots_N))


def _guarded(name: str) -> property:
    def read(self: PutOffTags) -> Tensor:
        assert not self._waiting, f"{name} is read while {len(self._waiting)} operations wait"
        return self._values[name]

    def write(self: PutOffTags, value: Tensor) -> None:
        self._values[name] = value

    return property(read, write)


for _name in ("tag_P", "cached_P", "named_P", "double_frees", "record_RJ"):
    setattr(PutOffTags, _name, _guarded(_name))
