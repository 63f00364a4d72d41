"""Share of tool calls that a checkpoint answers exactly as the reference, greedily, with its own chat template.

    python benchmarks/tool_calls.py --data TOOLCALLS.jsonl [--rows 50] [--device cuda] CHECKPOINT ...

Rows have `tools` ([{name, parameters}]), `user` and `call` ({name, arguments}). The whole model is loaded
(dequantized by kvq), so this is for small checkpoints.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from kvq.calibration.forward import ModelRunner, pick_device
from kvq.calibration.transformers_door import load_tokenizer
from kvq.calibration.whole_model import load_whole_model
from kvq.checkpoint.reader import CheckpointReader

MAX_NEW_TOKENS = 120


def prompt_and_answer(tokenizer: Any, row: dict[str, Any]) -> tuple[str, str]:
    """What the model reads, and what it should say up to the token that ends its turn."""
    user = [{"role": "user", "content": row["user"]}]
    function = {"name": row["call"]["name"], "arguments": row["call"]["arguments"]}
    call = {"id": f"functions.{function['name']}:0", "type": "function", "function": function}
    said = [*user, {"role": "assistant", "content": "", "tool_calls": [call]}]
    prompt = tokenizer.apply_chat_template(user, tools=row["tools"], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(said, tools=row["tools"], tokenize=False)
    return prompt, whole.removeprefix(prompt)


@torch.no_grad()
def answer(model: Any, tokenizer: Any, prompt: str, stop: set[int]) -> str:
    """Greedy text after the prompt, without the stop token."""
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
    said: list[int] = []
    cache = None
    while len(said) < MAX_NEW_TOKENS:
        output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, token = output.past_key_values, int(output.logits[0, -1].argmax())
        if token in stop:
            break
        said.append(token)
        ids = torch.tensor([[token]], device=model.device)
    return str(tokenizer.decode(said))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.data.read_text(encoding="utf-8").splitlines()[: arguments.rows]]
    for folder in arguments.checkpoints:
        runner = ModelRunner(CheckpointReader(folder), pick_device(arguments.device))
        model, tokenizer = load_whole_model(runner), load_tokenizer(folder)
        eos = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
        stop = set(eos if isinstance(eos, list) else [eos])
        ends = tuple(tokenizer.decode([token]) for token in stop)
        exact = 0
        for row in rows:
            prompt, expected = prompt_and_answer(tokenizer, row)
            for end in ends:
                expected = expected.split(end)[0]
            exact += answer(model, tokenizer, prompt, stop) == expected
        sys.stdout.write(f"{folder}: {exact}/{len(rows)} tool calls exact\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
