"""What tensor-parallel ranks agree on. They plan each step for themselves and must come to the same plan.

Shape suffixes as in `table`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from kvq.integrity.table import BAD_INDEX, FOUND_TAG

_LIFT = 2**32  # more than any tag: the tag of a freed page is negative, and would lose against another rank's 0


def agree(verdict_BF: Tensor, group: Any) -> Tensor:
    """The verdict of all ranks together, on the device, without waiting: the largest value of each field."""
    all_BF = verdict_BF.long()
    all_BF[:-1, FOUND_TAG] += _LIFT * (all_BF[:-1, BAD_INDEX] > 0)
    torch.distributed.all_reduce(all_BF, ReduceOp.MAX, group=group.device_group)
    all_BF[:-1, FOUND_TAG] -= _LIFT * (all_BF[:-1, BAD_INDEX] > 0)
    return all_BF.int()


def least(count: int, group: Any) -> int:
    """The smallest of the ranks' counts. Waits for all of them."""
    counts = torch.tensor([count])
    torch.distributed.all_reduce(counts, ReduceOp.MIN, group=group.cpu_group)
    return int(counts)
