"""What tensor-parallel ranks agree on. They plan each step for themselves and must come to the same plan.

Shape suffixes as in `table`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from kvq.integrity.table import BAD_INDEX, FOUND_TAG

_LIFT = 2**32  # more than any tag: the tag of a freed page is negative, and would lose against another rank's 0


def lifted(verdict_BF: Tensor) -> Tensor:
    """The verdict as int64, with what was found at bad entries made the larger for it."""
    lifted_BF = verdict_BF.long()
    lifted_BF[:-1, FOUND_TAG] += _LIFT * (lifted_BF[:-1, BAD_INDEX] > 0)
    return lifted_BF


def agree(lifted_BF: Tensor, group: Any, in_turn: Callable[[], None]) -> Tensor:
    """The verdict of all ranks together, on the device, without waiting: the largest value of each field. In place.

    `in_turn` makes the device finish the forward under way first. The forward's collectives are of other communicators,
    and NCCL asks for one order of all of them on all ranks: where two run at a time, ranks can wait for each other.
    The next forward waits for what is enqueued from here on, so that is no more than it must be.
    """
    in_turn()
    torch.distributed.all_reduce(lifted_BF, ReduceOp.MAX, group=group.device_group)
    return lifted_BF


def lower(values: list[list[int]]) -> None:
    """On the host: what `lifted` did is undone."""
    for fields in values[:-1]:
        if fields[BAD_INDEX] > 0:
            fields[FOUND_TAG] -= _LIFT


def least(values: list[int], group: Any) -> list[int]:
    """The smallest of the ranks' values, each for itself. Waits for all ranks."""
    values_N = torch.tensor(values)
    torch.distributed.all_reduce(values_N, ReduceOp.MIN, group=group.cpu_group)
    smallest: list[int] = values_N.tolist()
    return smallest
