"""SGLang's own Scheduler in one process on a CPU: its constructor, its overlapped loop, its prefix cache and its pools.

In its place stands only what needs a GPU, a network or another process:

- the model worker (`hash_model`) and what the scheduler asks its model runner;
- the sockets: requests come from a `Client` here, and what is sent goes back to it;
- process groups: torch's fake ones, one rank;
- CUDA streams and events, which do nothing: work is done in the order in which it is enqueued;
- the two Triton kernels that give out pages: SGLang's own plain form of them.

Everything in SGLang is process-wide, so each run is a forked child: `in_child`.
"""

import atexit
import json
import shutil
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.contract import engine
from tests.contract.integrity import rig
from tests.contract.integrity.hash_model import MAX_TOKENS, VOCABULARY, HashModel

PATIENCE_S = 60  # of ranks with each other
RETRACT_EVERY = 20  # steps: SGLang's own switch for tests. Pressure alone makes it careful after the first
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 16,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": MAX_TOKENS, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


class Stream:
    """As of a GPU that is always done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record(self, *_: Any, **__: Any) -> None:
        pass


DEVICE_MODULE = SimpleNamespace(
    Stream=Stream, Event=Stream, stream=lambda _stream: nullcontext(), StreamContext=lambda _stream: nullcontext()
)


class Worker:
    """SGLang's TpModelWorker, as far as the scheduler asks it anything."""

    graph_memory_usage: dict[str, float] = {}  # noqa: RUF012 - SGLang reads it from the instance
    graph_time_usage: dict[str, float] = {}  # noqa: RUF012
    weight_load_time = 0.0
    is_hybrid_swa = False
    model_runner_list: list[Any] = []  # noqa: RUF012

    def __init__(self, scheduler: Any, kind: str, page_size: int, tokens: int, rows: int) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        pool = rig.kv_pool(kind, tokens, page_size)
        if page_size == 1:
            allocator: Any = TokenToKVPoolAllocator(tokens, torch.bfloat16, "cpu", pool, need_sort=False)
        else:
            allocator = PagedTokenToKVPoolAllocator(tokens, page_size, torch.bfloat16, "cpu", pool, need_sort=False)
        table = ReqToTokenPool(rows, MAX_TOKENS, "cpu", enable_memory_saver=False)
        self.model = HashModel(pool, table.req_to_token)
        self.model_config = scheduler.model_config
        self.model_runner = SimpleNamespace(
            model_config=scheduler.model_config, req_to_token_pool=table, token_to_kv_pool_allocator=allocator,
            token_to_kv_pool=SimpleNamespace(post_capture_active=False), memory_pool_config=(), canary_manager=None,
            attn_backend=SimpleNamespace(needs_cpu_seq_lens=False), prefill_aware_swa=False, device_timer=None,
            ngram_embedding_manager=SimpleNamespace(prepare_for_forward=lambda batch, **_: batch, table=None),
            lora_manager=None, weight_load_mem_usage=0.0, prefill_cuda_graph_runner=None, is_hybrid_swa=False,
            server_args=scheduler.server_args, eplb_manager=None,
        )  # fmt: skip
        self.info = (
            tokens, 16384, rows, None, MAX_TOKENS - 1, MAX_TOKENS - 6, 1, "cpu", Stream(), rows, MAX_TOKENS, tokens
        )  # fmt: skip

    def init_attention_backends(self) -> None:
        pass

    def init_cuda_graphs(self) -> None:
        pass

    def get_worker_info(self) -> Any:
        return self.info

    def get_pad_input_ids_func(self) -> None:
        return None

    def get_memory_pool(self) -> Any:
        return self.model_runner.req_to_token_pool, self.model_runner.token_to_kv_pool_allocator

    def forward_batch_generation(self, batch: Any, **_: Any) -> Any:
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.managers.utils import GenerationBatchResult

        tokens_B = self.model.forward(batch)
        return GenerationBatchResult(logits_output=LogitsProcessorOutput(None), next_token_ids=tokens_B)


@dataclass(frozen=True)
class Place:
    """A rank among others that are processes too, and meet (gloo) over this file; alone: torch's fake groups."""

    rank: int = 0
    ranks: int = 1
    meeting: Path | None = None


def start(client: Any, pool: tuple[str, int, int], rows: int, flags: list[str], place: Place) -> Any:
    """A scheduler whose requests come from `client.receive()` and whose answers go to `client.send(output)`.

    `pool`: its kind, page size and tokens.
    """
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.managers import scheduler as module
    from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels

    kind, page_size, tokens = pool
    words = [
        "--model-path", _model_folder(), "--tp-size", str(place.ranks), "--page-size", str(page_size),
        "--max-total-tokens", str(tokens), "--max-running-requests", str(rows), "--stream-interval", "1",
        "--skip-tokenizer-init", "--attention-backend", "torch_native", "--grammar-backend", "none",
        "--sampling-backend", "pytorch", *flags,
    ]  # fmt: skip
    args = engine.server_args(*words)
    # SGLang switches it off on a CPU, and its arguments cannot be set any more.
    object.__setattr__(args, "disable_overlap_schedule", "--disable-overlap-schedule" in flags)
    if place.meeting is None:
        engine.publish(args, 0, 1, 1)
    else:
        _meet(args, place)
    rig.plain_kernels()
    sender = SimpleNamespace(send_output=lambda output, _req=None: client.send(output))
    channels = SchedulerIpcChannels(
        recv_from_tokenizer=None, recv_from_rpc=None, send_to_tokenizer=sender, send_to_detokenizer=sender,
        send_metrics_from_scheduler=None,
    )  # fmt: skip

    def worker(scheduler: Any) -> None:
        initialize_dp_attention(args, scheduler.model_config)
        scheduler.tp_worker = Worker(scheduler, kind, page_size, tokens, rows)

    module.TEST_RETRACT, module.TEST_RETRACT_INTERVAL = True, RETRACT_EVERY
    module.SchedulerIpcChannels = SimpleNamespace(create=lambda **_: channels)
    module.create_load_snapshot_writer = lambda *_, **__: None
    module.create_scheduler_watchdog = lambda *_, **__: None
    module.Scheduler.init_tp_model_worker = worker
    setattr(torch, "get_device_module", lambda *_: DEVICE_MODULE)  # noqa: B010 - mypy forbids the plain form
    scheduler = module.Scheduler(args, SimpleNamespace(nccl_port=0), 0, place.rank, 0, 0, 0, 0, None)
    scheduler.request_receiver = SimpleNamespace(recv_requests=lambda: client.receive(scheduler))
    return scheduler


def _model_folder() -> str:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def _meet(args: Any, place: Place) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators import shm_broadcast
    from torch import distributed

    runtime_context.publish(args, role="scheduler")
    shm_broadcast.MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)
    distributed.init_process_group(
        "gloo", init_method=f"file://{place.meeting}", rank=place.rank, world_size=place.ranks,
        timeout=timedelta(seconds=PATIENCE_S),
    )  # fmt: skip
    parallel_state.init_distributed_environment(
        world_size=place.ranks, rank=place.rank, local_rank=place.rank, backend="gloo"
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=place.ranks, backend="gloo")


def watch(scheduler: Any, client: Any) -> set[str]:
    """Fills with the requests for which the model computed a token that it would not have on their own cache."""
    worker, exposed = scheduler.tp_worker, set()
    forward = worker.model.forward

    def watched(batch: Any) -> Any:
        tokens_B = forward(batch)
        for req, length, token in zip(batch.reqs, batch.seq_lens.tolist(), tokens_B.tolist(), strict=True):
            asked = client.load[req.rid]
            place = length - len(asked.prompt)
            if 0 <= place < len(asked.expected) and token != asked.expected[place]:
                exposed.add(req.rid)
        return tokens_B

    worker.model.forward = watched
    return exposed
