"""SGLang's own code on a CPU: its arguments, its models and its loaders, made to run as they would on an H200.

Nothing of SGLang is replaced but what needs hardware: the compute capability says 9.0, process groups are torch's
fake ones (a rank of any size in one process, without communication), rotary tables are left out, and the sparse
attention's indexer takes the CUDA path. Each model is built in a forked child, as SGLang keeps one configuration a
process.
"""

import importlib.machinery
import importlib.util
import logging
import multiprocessing
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

CASES = Path(os.environ.get("KVQ_CONTRACT_CASES", ".contract-cases"))
if importlib.util.find_spec("sglang") is None and "KVQ_CONTRACT_CASES" not in os.environ:
    pytest.skip("SGLang lives in environments of its own: make contract", allow_module_level=True)

TORCHVISION = (
    "",
    ".io",
    ".transforms",
    ".transforms.functional",
    ".transforms.v2",
    ".transforms.v2.functional",
    ".ops",
)
NUM_SMS = 132  # of an H200


class _Stub(types.ModuleType):
    """A module that has everything and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def _stub_torchvision() -> None:
    """SGLang's image processors import it, text models never use it, and pip's would bring a CUDA build of torch."""
    from transformers import image_utils  # before the stub: they ask what is installed
    from transformers.utils import import_utils

    assert image_utils

    for end in TORCHVISION:
        module = _Stub(f"torchvision{end}")
        module.__path__ = []
        module.__dict__["__version__"] = "0.0"
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module

    def anything(cls: type, key: str) -> Any:
        if key.startswith("_") or key in ("mro", "is_dummy"):
            return type.__getattribute__(cls, key)
        try:
            return type.__getattribute__(cls, key)
        except AttributeError:
            return MagicMock(name=key)

    setattr(import_utils.DummyObject, "__getattribute__", anything)  # noqa: B010 - mypy forbids the plain form


def version() -> str:
    from importlib.metadata import version as installed

    return installed("sglang")


def is_newer() -> bool:
    """Whether configuration is published with ranks, as from 0.5.22 on."""
    return tuple(map(int, version().split("."))) >= (0, 5, 22)


_stub_torchvision()
torch.set_num_threads(1)  # children are forked
torch.cuda.get_device_capability = lambda *_: (9, 0)
logging.disable(logging.CRITICAL)
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.distributed.device_communicators import shm_broadcast  # noqa: E402
from sglang.srt.layers.attention.dsa import dsa_indexer  # noqa: E402
from sglang.srt.models import deepseek_v2, glm4_moe, registry  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402

registry.import_model_classes("sglang.srt.models")  # seconds, which no child needs to spend again


def server_args(*words: str) -> Any:
    """As `python -m sglang.launch_server` reads and resolves them, on a CPU that says it is an H200."""
    args = prepare_server_args([*words, "--device", "cpu"])
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    return args


def resolved(args: Any, name: str) -> Any:
    """The value that the engine would work with."""
    if not is_newer():
        return getattr(args, name)
    from sglang.srt.arg_groups.overrides import resolved_view

    return getattr(resolved_view(args), name)


def in_child(function: Callable[[], Any]) -> Any:
    """What a function gives in a forked process of its own; its errors are raised here."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        # torch renews its thread pool at the first use after a fork, and two threads that come first together find none
        # ("Invalid thread pool!"). SGLang loads with several threads, so this one goes first.
        torch.set_num_threads(1)
        try:
            theirs.send((True, function()))
        except Exception:  # noqa: BLE001 - whatever SGLang raises is the result
            theirs.send((False, traceback.format_exc()))

    process = context.Process(target=run)
    process.start()
    theirs.close()
    try:
        succeeded, value = ours.recv()
    finally:
        process.join()
    if not succeeded:
        raise AssertionError(value)
    return value


def _patch_hardware() -> None:
    rope = lambda *_, **__: nn.Identity()  # noqa: E731
    dsa_indexer._is_cuda = True
    dsa_indexer.deep_gemm = types.SimpleNamespace(get_num_sms=lambda: NUM_SMS)
    for module in (dsa_indexer, deepseek_v2, glm4_moe):
        for name in ("get_rope", "get_rope_wrapper"):
            if hasattr(module, name):
                setattr(module, name, rope)
    if hasattr(dsa_indexer, "resolve_num_sms"):
        dsa_indexer.resolve_num_sms = lambda: NUM_SMS


def _join(rank: int, tp: int) -> None:
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    make = distributed.new_group

    def fake(*positional: Any, **named: Any) -> Any:
        return make(*positional, **{**named, "backend": "fake", "pg_options": None})

    distributed.new_group = torch.distributed.new_group = fake
    shm_broadcast.MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)
    distributed.init_process_group("fake", rank=rank, world_size=tp, store=FakeStore())
    parallel_state.init_distributed_environment(world_size=tp, rank=rank, local_rank=rank, backend="fake")


def publish(args: Any, rank: int, tp: int, ep: int) -> None:
    """Make these the arguments of the process, which is one GPU of `tp`. Once in a process."""
    if is_newer():
        runtime_context.publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=rank))
        _join(rank, tp)
        parallel_state.initialize_model_parallel(backend="fake")
        return
    runtime_context.publish(args, role="scheduler")
    _join(rank, tp)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, backend="fake"
    )


def build_model(folder: Path, rank: int, tp: int, ep: int, *, draft: bool = False) -> nn.Module:
    """The model (or its draft layer) as one GPU of `tp` holds it, its parameters not yet loaded. Once in a process."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.model_loader import loader

    words = ["--model-path", str(folder), "--tp-size", str(tp), "--ep-size", str(ep), "--skip-tokenizer-init"]
    args = server_args(*words, "--disable-shared-experts-fusion", "--moe-runner-backend", "marlin",
                       "--moe-a2a-backend", "none")  # fmt: skip
    publish(args, rank, tp, ep)
    config = ModelConfig.from_server_args(args, model_path=str(folder), is_draft_model=draft)
    initialize_dp_attention(*([args] if is_newer() else [args, config]))
    initialize_moe_config(*([] if is_newer() else [args]))
    _patch_hardware()
    load_config = LoadConfig()
    quantization = loader._get_quantization_config(config, load_config)
    torch.set_default_dtype(torch.bfloat16)
    model: nn.Module = loader._initialize_model(config, load_config, quantization)
    torch.set_default_dtype(torch.float32)
    return model


def load(model: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """SGLang's own `load_weights`."""
    model.load_weights(list(tensors))  # type: ignore[operator]


def pack(codes_EKN: Tensor) -> Tensor:
    """Words of eight codes along K, by SGLang's own function, as its kernels' repacking takes them."""
    from sglang.srt.layers.quantization.utils import pack_rows

    return torch.stack([pack_rows(codes_KN.int() + 8, 4, *codes_KN.shape) for codes_KN in codes_EKN])
