"""Second moments and the blend with the layer's.

Shape suffixes: T = tokens, I = in_features.
"""

import pytest
import torch
from torch import Tensor

from kvq.calibration.stats import blend_hessian, blend_weight, gram
from tests import reference


def inputs(num_tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, 24, generator=generator) * torch.linspace(0.1, 3, 24)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 300])
def test_gram_is_the_sum_of_outer_products(num_tokens: int) -> None:
    x_TI = inputs(num_tokens)
    found_II = gram(x_TI)
    assert (found_II.dtype, found_II.shape) == (torch.float32, (24, 24))
    torch.testing.assert_close(found_II.double(), reference.moment_sum(x_TI), rtol=1e-5, atol=1e-4)


def test_gram_of_bf16_loses_nothing_more() -> None:
    x_TI = inputs(50).bfloat16()
    torch.testing.assert_close(gram(x_TI).double(), reference.moment_sum(x_TI), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("blend_tokens", [0, 0.5, 64])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 1000])
def test_blend_equals_the_formula(num_tokens: int, blend_tokens: float) -> None:
    own_TI = inputs(num_tokens, seed=1)
    mean_II = reference.moment_sum(inputs(500, seed=2)).float() / 500
    own_II = gram(own_TI)
    kept = own_II.clone(), mean_II.clone()
    found_II = blend_hessian(own_II, num_tokens, mean_II, blend_tokens)
    torch.testing.assert_close(found_II.double(), reference.blend(own_TI, mean_II, blend_tokens), rtol=1e-4, atol=1e-5)
    assert torch.equal(own_II, kept[0]) and torch.equal(mean_II, kept[1])
    share = 1.0 if num_tokens == 0 else blend_tokens / (blend_tokens + num_tokens)
    assert blend_weight(num_tokens, blend_tokens) == pytest.approx(share)


def test_expert_without_tokens_gets_a_copy_of_the_layer_s() -> None:
    mean_II = gram(inputs(10))
    for blend_tokens in (0, 64):
        found_II = blend_hessian(torch.zeros(24, 24), 0, mean_II, blend_tokens)
        torch.testing.assert_close(found_II, mean_II)
        found_II += 1
        assert not torch.allclose(found_II, mean_II)


def test_without_blend_tokens_an_expert_keeps_its_own() -> None:
    own_II = gram(inputs(2))
    assert torch.equal(blend_hessian(own_II, 2, torch.ones(24, 24), 0), own_II / 2)
    assert blend_weight(2, 0) == 0
