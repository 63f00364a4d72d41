"""A prefill and a decode role from kvq's two YAMLs meet as SGLang lets them: over its bootstrap server, each with its
own `CommonKVManager`, in a process of its own. And the router's command, through the router's own parser.

The KV memory itself is left out; the managers are told the cache's name and page size and a layer's bytes by the
engine's own functions. Only port and host differ from the YAML.
"""

import json
import multiprocessing
import shlex
import socket
import time
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.contract import engine
from tests.contract.test_server_args import settings

HOST = "127.0.0.1"
SHAPES = ("published/glm-5.2", "published/glm-4.5", "published/kimi-k2")  # DSA, GQA, MLA
OF_THE_CACHE = ("kv_cache_dtype", "page_size", "disaggregation_transfer_backend", "dsa_prefill_backend",
                "dsa_decode_backend", "disaggregation_enable_kv_checksum")  # fmt: skip


def pairs() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(prefill, decode) of one model and cache type."""
    rows = [row for row in settings() if row["model"].endswith(SHAPES)]
    by_name = {row["yaml"]: row for row in rows if row["settings"].get("disaggregation-mode")}
    return [
        (row, by_name[name.replace("-prefill-", "-decode-")]) for name, row in by_name.items() if "-prefill-" in name
    ]


PAIRS = pytest.mark.parametrize("pair", pairs(), ids=lambda pair: pair[0]["yaml"].split("/")[-2] + "-"
                                + pair[0]["settings"]["kv-cache-dtype"])  # fmt: skip


@contextmanager
def bootstrap_server() -> Iterator[int]:
    """SGLang's own, in a process of its own; gives its port."""
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]

    def serve() -> None:
        CommonKVBootstrapServer(HOST, port)
        time.sleep(120)

    process = multiprocessing.get_context("fork").Process(target=serve, daemon=True)
    process.start()
    try:
        _wait_for(port)
        yield port
    finally:
        process.kill()
        process.join()


def _wait_for(port: int) -> None:
    for _ in range(100):
        try:
            urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=1).close()
            return
        except urllib.error.URLError:
            time.sleep(0.1)
    raise AssertionError("SGLang's bootstrap server does not answer")


def kv_args(args: Any, model: Any, rank: int) -> Any:
    """What a role's scheduler tells its manager of the cache (`disaggregation/prefill.py`, `decode.py`)."""
    import torch
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.mem_cache import kv_cache_configurator, kv_cache_dtype

    name = engine.resolved(args, "kv_cache_dtype")
    chosen, dtype = kv_cache_dtype.configure_kv_cache_dtype(
        server_args_kv_cache_dtype=name, model=types.SimpleNamespace(quant_config=None), model_dtype=torch.bfloat16,
        is_draft_worker=False, is_dflash=False, speculative_draft_attention_backend=None,
    )  # fmt: skip
    width = model.head_dim
    if getattr(model, "kv_lora_rank", None):
        more = {} if engine.is_newer() else {"server_args": args}
        width = kv_cache_configurator.calculate_mla_kv_cache_dim(model_config=model, kv_cache_dtype=dtype, **more)
    told = KVArgs()
    told.kv_cache_dtype_str, told.page_size = chosen or name, engine.resolved(args, "page_size")
    told.engine_rank, told.pp_rank, told.system_dp_rank = rank, 0, 0
    told.kv_item_lens, told.state_item_lens, told.state_types = [width * dtype.itemsize * told.page_size], [], []
    told.swa_kv_cache_layout = None
    return told


def manager(row: dict[str, Any], port: int, *words: str) -> tuple[Any, Any]:
    """Arguments and manager of the role's first GPU. A prefill manager registers itself when it is made."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    place = ["--model-path", row["model"], "--host", HOST, "--disaggregation-bootstrap-port", str(port)]
    args = engine.server_args("--config", row["yaml"], *place, *words)
    tp, ep = row["settings"]["tp-size"], row["settings"]["ep-size"]
    engine.publish(args, 0, tp, ep)
    model = ModelConfig.from_server_args(args, model_path=row["model"])
    initialize_dp_attention(*([args] if engine.is_newer() else [args, model]))
    manage = type("Manager", (CommonKVManager,), {"__abstractmethods__": frozenset()})
    mode = DisaggregationMode(row["settings"]["disaggregation-mode"])
    return args, manage(kv_args(args, model, 0), mode, args, model.attention_arch.name == "MLA")


def prefill(row: dict[str, Any], port: int) -> dict[str, Any]:
    """Registers every GPU of the role; what it resolved."""
    args, made = manager(row, port)
    for rank in range(1, row["settings"]["tp-size"]):
        made.attn_tp_rank = rank
        made.register_to_bootstrap()
    return told(args, made)


def decode(row: dict[str, Any], port: int, *words: str) -> dict[str, Any]:
    """Asks for the prefill role, as before its first request; what it resolved."""
    args, made = manager(row, port, *words)
    made.bootstrap_timeout = 1
    assert made.try_ensure_parallel_info(f"{HOST}:{port}"), "the prefill role is not there"
    return told(args, made)


def told(args: Any, made: Any) -> dict[str, Any]:
    """The cache's settings; and from 0.5.21 on, the number by which both know that their checksums can be compared."""
    found = {key: engine.resolved(args, key) for key in OF_THE_CACHE if hasattr(args, key)}
    found["name"], found["bytes"] = made.kv_cache_dtype_str, made.kv_args.kv_item_lens
    if engine.is_newer():
        from sglang.srt.disaggregation.utils import kv_layout_signature

        found["signature"] = kv_layout_signature(made.kv_args)
    return found


@PAIRS
def test_the_two_roles_of_a_pair_accept_each_other(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    with bootstrap_server() as port:
        one = engine.in_child(lambda: prefill(pair[0], port))
        other = engine.in_child(lambda: decode(pair[1], port))
    assert one == other
    assert one["name"] == pair[0]["settings"]["kv-cache-dtype"]
    assert one.get("disaggregation_enable_kv_checksum", False) is engine.is_newer()


@pytest.mark.parametrize(("words", "said"), [
    (("--kv-cache-dtype", "fp8_e4m3"), "KV cache dtype mismatch"),
    (("--kv-cache-dtype", "bf16"), "KV cache dtype mismatch"),  # the same bytes under another name
    (("--page-size", "128"), "Page size mismatch"),
])  # fmt: skip
def test_another_cache_is_refused(words: tuple[str, str], said: str) -> None:
    """The check above can fail: the published set-up, BF16 in prefill and FP8 in decode, is the first."""
    pair = next(both for both in pairs() if both[0]["settings"]["kv-cache-dtype"] == "bfloat16"
                and "kimi-k2" in both[0]["model"])  # fmt: skip
    with bootstrap_server() as port:
        engine.in_child(lambda: prefill(pair[0], port))
        with pytest.raises(AssertionError, match=said):
            engine.in_child(lambda: decode(pair[1], port, *words))


def test_another_sparse_backend_means_another_layout() -> None:
    """SGLang does not compare the backends; a decode role with another one would read the pages wrongly."""
    pair = next(both for both in pairs() if both[0]["settings"]["kv-cache-dtype"] == "fp8_e4m3"
                and "glm-5" in both[0]["model"])  # fmt: skip
    flag = next(key for key in pair[1]["settings"] if key.endswith("sa-decode-backend"))
    with bootstrap_server() as port:
        one = engine.in_child(lambda: prefill(pair[0], port))
        other = engine.in_child(lambda: decode(pair[1], port, f"--{flag}", "trtllm"))
    assert one["bytes"] != other["bytes"]


def test_the_routers_own_parser_takes_the_command() -> None:
    from sglang_router.launch_router import parse_router_args
    from sglang_router.router import Router

    notes = json.loads((engine.CASES / "router.json").read_text(encoding="utf-8"))
    words = shlex.split(notes.replace("PREFILL", "10.0.0.1").replace("DECODE", "10.0.0.2"))
    assert words[:3] == ["python3", "-m", "sglang_router.launch_router"]
    args = parse_router_args(words[3:])
    args._validate_router_args()
    assert args.pd_disaggregation and (args.host, args.port) == ("0.0.0.0", 8000)
    assert args.prefill_urls == [("http://10.0.0.1:30000", 8998)] and args.decode_urls == ["http://10.0.0.2:30000"]
    assert Router.from_args(args)
