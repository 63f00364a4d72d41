"""Answers of a checkpoint that fits into memory: the whole model in this process, one prompt at a time.

One at a time, because an answer must not depend on its neighbours in a batch.

Shape suffixes: S = tokens, V = vocabulary.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from kvq.calibration.forward import ModelRunner
from kvq.calibration.whole_model import load_whole_model
from kvq.checkpoint.reader import CheckpointReader
from kvq.errors import CalibrationError
from kvq.verify.answers import Answer, Watch, before_stop
from kvq.verify.chat import ChatFormat


class InProcess:
    """The model, dequantized, in float32 on a CPU and BF16 on a GPU."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        runner = ModelRunner(CheckpointReader(folder), device)
        self.place = str(folder)
        self.chat = ChatFormat(folder)
        self.context = runner.facts.max_positions
        self.device = device
        self.model = load_whole_model(runner)

    @torch.no_grad()
    def steps(self, prompt: Sequence[int], max_tokens: int) -> Iterator[Tensor]:
        """Logits [V] of each greedy step. Raises CalibrationError when they are not finite."""
        ids, cache = torch.tensor([list(prompt)], device=self.device), None
        for _ in range(max_tokens):
            output = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logits_V = output.past_key_values, output.logits[0, -1].float()
            yield self._finite(logits_V)
            ids = logits_V.argmax().reshape(1, 1)

    def _finite(self, logits: Tensor) -> Tensor:
        """The logits. Raises CalibrationError when they are not finite."""
        if not bool(torch.isfinite(logits).all()):
            raise CalibrationError(f"{self.place}: logits are NaN or Inf; look at its weights with `kvq verify`.")
        return logits

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str], watch: Watch
    ) -> list[Answer]:
        answers = []
        for number, prompt in enumerate(prompts, start=1):
            watch(f"answer {number}/{len(prompts)}")
            answers.append(self._answer(prompt, min(max_tokens, self.context - len(prompt)), stop))
        return answers

    def _answer(self, prompt: Sequence[int], max_tokens: int, stop: Sequence[str]) -> Answer:
        if max_tokens < 1:
            raise CalibrationError(f"{self.place}: a prompt of {len(prompt)} tokens leaves no room for an answer.")
        said: list[int] = []
        for logits_V in self.steps(prompt, max_tokens):
            token = int(logits_V.argmax())
            if token in self.chat.stop_ids:
                return Answer(before_stop(self.chat.decode(said), stop), cut=False)
            said.append(token)
            if stop and before_stop(text := self.chat.decode(said), stop) != text:
                return Answer(before_stop(text, stop), cut=False)
        return Answer(self.chat.decode(said), cut=True)

    @torch.no_grad()
    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], watch: Watch) -> list[tuple[float, bool]]:
        scores = []
        for number, (prompt, continuation) in enumerate(pairs, start=1):
            watch(f"score {number}/{len(pairs)}")
            ids = torch.tensor([[*prompt, *continuation]], device=self.device)
            count = len(continuation)
            logits_SV = self.model(ids[:, :-1], use_cache=False, logits_to_keep=count).logits[0].float()
            self._finite(logits_SV)
            wanted_S = ids[0, -count:]
            picked_S = F.log_softmax(logits_SV, dim=-1).gather(-1, wanted_S.unsqueeze(-1)).squeeze(-1)
            scores.append((float(picked_S.double().sum()), bool((logits_SV.argmax(dim=-1) == wanted_S).all())))
        return scores
