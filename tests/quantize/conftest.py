import pytest
import torch


@pytest.fixture
def double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """llmcompressor's working precision is a constant of two of its modules."""
    for module in ("gptq_quantize", "helpers"):
        monkeypatch.setattr(f"llmcompressor.modifiers.gptq.{module}.GPTQ_PRECISION", torch.float64)
