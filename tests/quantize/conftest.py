import pytest
import torch

from tests.quantize.tiny_layer import SpySolver, TinyLayer, tiny_layer


@pytest.fixture
def layer() -> TinyLayer:
    return tiny_layer()


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> SpySolver:
    """In the place of GPTQ: notes what it is given."""
    solver = SpySolver()
    solver.install(monkeypatch)
    return solver


@pytest.fixture
def double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """llmcompressor's working precision is a constant of two of its modules."""
    for module in ("gptq_quantize", "helpers"):
        monkeypatch.setattr(f"llmcompressor.modifiers.gptq.{module}.GPTQ_PRECISION", torch.float64)
