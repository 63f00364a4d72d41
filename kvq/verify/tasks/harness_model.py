"""The harness's interface to a model, over an Answerer. Imported only where lm-evaluation-harness is installed."""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM

from kvq.verify.answers import Answerer, Watch
from kvq.verify.chat import ChatFormat
from kvq.verify.toolcalls.calls import split_reasoning


class HarnessModel(TemplateLM):
    """Tokens go in as the checkpoint's own tokenizer makes them; `cut` notes by prompt which answers were cut off."""

    def __init__(self, answerer: Answerer, chat: ChatFormat, max_tokens: int, watch: Watch) -> None:
        super().__init__()
        self.answerer, self.chat, self.max_tokens, self.watch = answerer, chat, max_tokens, watch
        self.cut: dict[str, bool] = {}

    @property
    def eot_token_id(self) -> int:
        return min(self.chat.stop_ids)

    @property
    def tokenizer_name(self) -> str:
        return self.chat.folder.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.chat.encode(string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.chat.render(chat_history, None, "a row of the data set")

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        return self.answerer.score([(context, wanted) for _, context, wanted in requests], self.watch)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("no preset asks for it")

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        until = {tuple(request.args[1].get("until") or ()) for request in requests}
        assert len(until) == 1, f"one task at a time: {until}"
        prompts = [self.chat.encode(request.args[0]) for request in requests]
        answers = self.answerer.generate(prompts, self.max_tokens, until.pop(), self.watch)
        for request, answer in zip(requests, answers, strict=True):
            self.cut[request.args[0]] = answer.cut
        return [split_reasoning(answer.text)[1] for answer in answers]
