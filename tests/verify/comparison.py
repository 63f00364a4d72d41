"""`evaluate_checkpoint` with the settings of small tests, and what else to compare it with.

Shape suffixes: S = tokens, V = vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvq.calibration.forward import ModelRunner
from kvq.checkpoint.reader import CheckpointReader
from kvq.verify.documents import Cut
from kvq.verify.evaluation import Evaluation, Request, evaluate_checkpoint
from kvq.verify.streaming import final_hidden

CPU = torch.device("cpu")


def compare(
    folder: Path, source: Path, *data: Path, rows: int | None = None, length: int = 512, **options: Any
) -> Evaluation:
    """`options` are those of Request, and `long_context`."""
    cut = Cut(rows, length, options.pop("long_context", None))
    return evaluate_checkpoint(Request(folder, source, source.name, data, cut, **options), CPU, lambda text: None)


def whole_logits(folder: Path, ids_S: Tensor) -> Tensor:
    """Logits [S, V] of one sequence by itself."""
    runner = ModelRunner(CheckpointReader(folder), CPU)
    with torch.no_grad():
        return F.linear(final_hidden(runner, [ids_S.unsqueeze(0)], lambda text: None)[0][0], runner.lm_head())
