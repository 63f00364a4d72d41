"""Grouping by expert, and experts left out of a layer's forward and added later.

Shape suffixes: T = tokens, H = hidden size, I = expert width, J = 2 I, K = experts per token, E = experts,
N = sequences, S = tokens per sequence.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvq.calibration.experts import (
    RoutedExperts,
    RoutingRecorder,
    busy_experts,
    gated_activation,
    sort_by_expert,
)
from tests import reference
from tests.calibration.models import layer_with_experts, open_runner, random_tokens
from tests.checkpoints import make_checkpoint

NUM_EXPERTS, HIDDEN, INTER = 5, 16, 12


def routed(num_tokens: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, two different experts for each token (never expert 3), and their weights."""
    generator = torch.Generator().manual_seed(0)
    choices = torch.tensor([0, 1, 2, 4])
    picks = [choices[torch.randperm(4, generator=generator)[:2]] for _ in range(num_tokens)]
    x_TH = torch.randn(num_tokens, HIDDEN, generator=generator)
    return x_TH, torch.stack(picks), torch.rand(num_tokens, 2, generator=generator)


def weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    gate_up_EJH = torch.randn(NUM_EXPERTS, 2 * INTER, HIDDEN, generator=generator)
    return gate_up_EJH, torch.randn(NUM_EXPERTS, HIDDEN, INTER, generator=generator)


def test_rows_are_grouped_and_keep_their_order() -> None:
    expert_TK = torch.tensor([[4, 1], [1, 0], [4, 2], [1, 4]])
    weight_TK = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8]])
    routing = sort_by_expert(expert_TK, weight_TK, NUM_EXPERTS)
    assert routing.start == [0, 1, 4, 5, 5, 8]
    assert routing.token_R.tolist() == [1, 0, 1, 3, 2, 0, 2, 3]
    assert routing.weight_R.tolist() == pytest.approx([0.4, 0.2, 0.3, 0.7, 0.6, 0.1, 0.5, 0.8])
    assert [routing.count(expert) for expert in range(NUM_EXPERTS)] == [1, 3, 1, 0, 3]
    assert [expert for expert, _, _ in busy_experts(routing)] == [0, 1, 2, 4]


def test_every_routed_row_is_there_once() -> None:
    _, expert_TK, weight_TK = routed(200)
    routing = sort_by_expert(expert_TK, weight_TK, NUM_EXPERTS)
    found = set()
    for expert, token_R, weight_R1 in busy_experts(routing):
        found |= {(expert, int(t), round(float(w), 6)) for t, w in zip(token_R, weight_R1[:, 0], strict=True)}
    expected = {(int(expert_TK[t, k]), t, round(float(weight_TK[t, k]), 6)) for t in range(200) for k in range(2)}
    assert found == expected


def test_gated_activation_equals_reference() -> None:
    gate_up_EJH, _ = weights()
    x_TH, _, _ = routed()
    expected_TI = reference.gated_activation(x_TH, gate_up_EJH[0])
    torch.testing.assert_close(gated_activation(x_TH, gate_up_EJH[0]).double(), expected_TI, rtol=1e-5, atol=1e-5)


def test_routed_experts_equal_the_plain_forward() -> None:
    x_TH, expert_TK, weight_TK = routed()
    experts = RoutedExperts(*weights())
    expected_TH = reference.moe_forward(x_TH, expert_TK, weight_TK, *weights())
    torch.testing.assert_close(experts(x_TH, expert_TK, weight_TK).double(), expected_TH, rtol=1e-5, atol=1e-4)
    assert not experts.state_dict()


@pytest.mark.parametrize("family", ["glm_moe_dsa", "glm4_moe", "deepseek_v3"])
def test_recorder_and_experts_added_equal_the_direct_forward(tmp_path: Path, family: str) -> None:
    runner = open_runner(make_checkpoint(tmp_path / "source", family, "bf16"))
    tokens_NS = random_tokens(5, 24)
    direct, apart = runner.embed(tokens_NS), runner.embed(tokens_NS)
    direct.batch_size = apart.batch_size = 2
    runner.run(layer_with_experts(runner, 1), 1, direct)

    recorder = RoutingRecorder()
    runner.run(runner.build_layer(1, recorder), 1, apart)
    assert [len(part) for part in recorder.x_TH] == [48, 48, 24]
    x_TH, expert_TK, weight_TK = (torch.cat(part) for part in (recorder.x_TH, recorder.expert_TK, recorder.weight_TK))
    everyone = range(runner.facts.num_experts)
    parts = runner.expert_gate_up(1, everyone), runner.expert_down(1, everyone)
    added_TH = reference.moe_forward(x_TH, expert_TK, weight_TK, *parts)
    total_NSH = apart.hidden_NSH.double() + added_TH.reshape(apart.hidden_NSH.shape)
    torch.testing.assert_close(total_NSH.float(), direct.hidden_NSH, rtol=0, atol=1e-4)
    assert float(added_TH.abs().max()) > 0.1
