"""What `kvq serve-config` says: the settings, the command, what fits, and where the files are."""

from collections.abc import Mapping
from typing import Any

from kvq.console.screen import ERR, OUT, short_size


def show_serving(serving: Mapping[str, Any], texts: Mapping[str, str], out: str, engine: str) -> None:
    """The command is the last line on stdout."""
    memory = serving["memory"]
    works = ", ".join(f"{tp} x {ep}" for tp, ep in serving["workable"])
    ERR.print(f"{serving['name']}: {serving['experts']} experts, TP {serving['tp']} x EP {serving['ep']}", style="bold")
    ERR.print(f"TP x EP that work: {works}")
    ERR.print(
        f"each GPU: {short_size(memory['weights'])} of weights, {short_size(memory['reserve'])} of reserve; "
        f"{memory['max_total_tokens']:,} tokens of KV cache ({memory['kv_layout']})"
    )
    ERR.print(f"KV integrity: {serving['integrity']['name']}: {serving['integrity']['reason']}")
    ERR.print(f"written to {out}: {', '.join(texts)}")
    if engine == "vllm":
        OUT.print(serving["vllm"])
        return
    for name, text in texts.items():
        if name.endswith(".yaml"):
            OUT.print(text.rstrip())
    for role in serving["roles"].values():
        OUT.print(role["command"])
