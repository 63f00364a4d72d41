"""A load for one scheduler, and the client that asks it and writes down every token that it is sent."""

import random
from array import array
from dataclasses import dataclass, field
from typing import Any, Literal

from kvq.integrity.incidents import ERROR_TYPE
from tests.contract.integrity.hash_model import VOCABULARY, expected_tokens

AT_ONCE = 40  # requests under way; more than there are rows, so that some always wait
BURST = 250  # after so many the client waits until the engine is idle: then SGLang counts its pages
IDLE_TURNS = 4
FLUSH_EVERY = 3  # bursts

Ending = Literal["full", "cut", "tags", "engine"]


@dataclass
class Asked:
    rid: str
    prompt: list[int]
    new_tokens: int
    patience: int | None  # the client aborts after so many turns of the scheduler
    tokens: list[int] = field(default_factory=list)
    reason: dict[str, Any] | None = None
    cached: int = 0
    retractions: int = 0
    expected: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.expected = expected_tokens(self.prompt, self.new_tokens)

    @property
    def wrong(self) -> bool:
        """Whether a token was sent that the model, on this request's own cache, would not have said."""
        return self.tokens != self.expected[: len(self.tokens)]

    @property
    def ending(self) -> Ending:
        """In full; cut off by the client; ended for its page tags, or by the engine itself (out of memory)."""
        if self.reason is None or self.reason["type"] != "abort":
            return "full"
        if self.reason.get("err_type") == ERROR_TYPE:
            return "tags"
        return "engine" if self.reason.get("status_code") else "cut"


def mixed_load(seed: int, count: int, page_size: int, twins: float = 0.0) -> list[Asked]:
    """Most requests share a prefix with others, every fifth prompt is longer than a chunk, some clients go away.

    With `twins`, this share has the whole prompt of one of the five before: they run at the same time.
    """
    dice = random.Random(seed)
    prefixes = [_tokens(dice, dice.choice([20, 64, 130, 250])) for _ in range(12)]
    load: list[Asked] = []
    for number in range(count):
        start = dice.choice(prefixes) if dice.random() < 0.7 else []
        prompt = start + _tokens(dice, dice.randint(1, 40 + page_size))
        if twins and load and dice.random() < twins:
            prompt = list(dice.choice(load[-5:]).prompt)
        patience = dice.randint(0, 25) if dice.random() < 0.06 else None
        load.append(Asked(f"r{number:06d}", prompt, dice.choice([1, 4, 10, 30, 70]), patience))
    return load


def _tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(VOCABULARY) for _ in range(count)]


class Client:
    def __init__(self, load: list[Asked], seed: int = 0) -> None:
        self.load = {asked.rid: asked for asked in load}
        self.waiting = list(reversed(load))
        self.under_way: dict[str, int] = {}  # -> turn in which it was asked
        self.turn = self.idle_turns = self.bursts = self.flushes = 0
        self.left_of_burst = BURST

    def receive(self, scheduler: Any) -> list[Any]:
        """What the scheduler's sockets hold in this turn; ends it when all is answered."""
        from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqInput

        self.turn += 1
        if not self.under_way and not (self.waiting and self.left_of_burst):
            self.idle_turns += 1
            if self.idle_turns < IDLE_TURNS:
                return []
            self.idle_turns, self.left_of_burst, self.bursts = 0, BURST, self.bursts + 1
            scheduler.gracefully_exit = not self.waiting
            return [FlushCacheReqInput()] if self.bursts % FLUSH_EVERY == 0 else []
        new: list[Any] = []
        while self.waiting and self.left_of_burst and len(self.under_way) < AT_ONCE and len(new) < 6:
            asked = self.waiting.pop()
            self.left_of_burst -= 1
            self.under_way[asked.rid] = self.turn
            new.append(_as_sglang(asked))
        for rid, since in self.under_way.items():
            if self.load[rid].patience is not None and self.turn - since == self.load[rid].patience:
                new.append(AbortReq(rid=rid))
        return new

    def send(self, output: Any) -> None:
        """What the scheduler would send to the tokenizer's process. Of two endings the first counts."""
        from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput, FlushCacheReqOutput

        if isinstance(output, FlushCacheReqOutput):
            assert output.success, output.message
            self.flushes += 1
        elif isinstance(output, AbortReq):
            if self.under_way.pop(output.rid, None) is not None:
                self.load[output.rid].reason = output.finished_reason or {"type": "abort"}
        elif isinstance(output, BatchTokenIDOutput):
            for at, rid in enumerate(output.rids):
                self._take(output, at, rid)

    def _take(self, output: Any, at: int, rid: str) -> None:
        asked = self.load[rid]
        if asked.reason is not None:
            return
        asked.tokens += output.output_ids[at]
        asked.cached, asked.retractions = output.cached_tokens[at], output.retraction_counts[at]
        if output.finished_reasons[at] is not None:
            asked.reason = output.finished_reasons[at]
            del self.under_way[rid]


def _as_sglang(asked: Asked) -> Any:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=asked.new_tokens, temperature=0, ignore_eos=True)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=asked.rid, input_text=None, input_ids=array("q", asked.prompt), input_embeds=None, mm_inputs=None,
        token_type_ids=None, sampling_params=sampling, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0,
        token_ids_logprob=None, stream=True,
    )  # fmt: skip
