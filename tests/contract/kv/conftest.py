"""What an SGLang on a CPU lacks, replaced before its modules are imported."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest

ABSENT = ("torchvision", "fastapi", "uvicorn", "uvloop")


class _Absent(types.ModuleType):
    __version__ = "0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last: only what is not installed is imported from here."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _dummy_attribute(cls: type, key: str) -> Any:
    try:
        return type.__getattribute__(cls, key)
    except AttributeError:
        if key.startswith("_"):
            raise
        return MagicMock(name=key)


@pytest.fixture(scope="session", autouse=True)
def without_gpu() -> Iterator[None]:
    """SGLang as it can be imported without a GPU. Skips everything where there is no SGLang."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang's own environment: make contract")
    import torch
    import transformers.utils.import_utils as imports

    importlib.import_module("transformers.image_utils")  # decides what is there before the stand-ins are

    sys.meta_path.append(_StandIns())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imports.DummyObject, "__getattribute__", _dummy_attribute)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        yield
