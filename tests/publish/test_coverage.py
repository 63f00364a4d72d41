"""The coverage report: what the manifest says, by expert and by layer; plots where there is something to draw with."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from kvq.errors import CheckpointError
from kvq.publish.coverage import coverage_report, write_coverage
from kvq.publish.manifest import FEW_TOKENS
from kvq.verify.checks import verify_checkpoint
from tests.checkpoints import read_json
from tests.runs import CASES, Shared, manifest_of

REPORT = "kvq-reports/coverage.json"
PLOTS = ["kvq-reports/coverage-tokens.png", "kvq-reports/coverage-error.png"]


@pytest.fixture
def out(shared: Shared, tmp_path: Path) -> Path:
    return shared.copy(shared.output("glm-5"), tmp_path / "out")


def test_every_expert_has_its_tokens_and_outcomes(out: Path) -> None:
    written = write_coverage(out)
    report, modules = read_json(out / REPORT), manifest_of(out)["modules"]
    assert report == written.report and written.path == REPORT
    assert report["schema"] == "kvq.coverage/1"
    case = CASES["glm-5"]
    assert len(report["experts"]) == len(modules) / 3 == len(report["layers"]) * case.dims.n_routed_experts
    for module in modules:
        layer, expert = int(module["name"].split(".")[2]), int(module["name"].split(".")[5])
        (row,) = [row for row in report["experts"] if (row["layer"], row["expert"]) == (layer, expert)]
        assert row["tokens"] == module["num_tokens"]
        matrix = row["matrices"][module["name"].rsplit(".", 1)[1]]
        assert matrix.items() <= module.items() and len(matrix) == 5


def test_layers_sum_up_their_experts(out: Path) -> None:
    report = write_coverage(out).report
    for row in report["layers"]:
        experts = [expert for expert in report["experts"] if expert["layer"] == row["layer"]]
        tokens = [expert["tokens"] for expert in experts]
        errors = [matrix["relative_output_error"] for expert in experts for matrix in expert["matrices"].values()]
        assert (row["min_tokens"], row["max_tokens"]) == (min(tokens), max(tokens))
        assert row["median_tokens"] == median(tokens)
        assert row["experts_with_few_tokens"] == sum(count < FEW_TOKENS for count in tokens)
        assert row["experts_without_tokens"] == tokens.count(0)
        assert row["mean_relative_output_error"] == pytest.approx(sum(errors) / len(errors), abs=1e-6)
        assert row["max_relative_output_error"] == max(errors)


def test_starved_experts_and_fallbacks_are_counted() -> None:
    def module(expert: int, tokens: int, outcome: str) -> list[dict[str, Any]]:
        return [
            {
                "name": f"language_model.model.layers.4.mlp.experts.{expert}.{projection}", "num_tokens": tokens,
                "outcome": outcome, "blend_weight": 0.5, "dampening_frac": 0.0, "relative_weight_error": 0.1,
                "relative_output_error": 0.2,
            }
            for projection in ("gate_proj", "up_proj", "down_proj")
        ]  # fmt: skip

    modules = [*module(10, 0, "solved"), *module(2, 63, "hessian_not_positive_definite"), *module(3, 64, "solved")]
    report = coverage_report({"modules": modules})
    assert [(row["layer"], row["expert"]) for row in report["experts"]] == [(4, 2), (4, 3), (4, 10)]
    (row,) = report["layers"]
    assert (row["experts_without_tokens"], row["experts_with_few_tokens"], row["fallbacks"]) == (1, 2, 3)


@pytest.mark.parametrize("settings", [(), ("solver=rtn",)])
def test_plots_are_written_and_the_same_each_time(shared: Shared, tmp_path: Path, settings: tuple[str, ...]) -> None:
    out = shared.copy(shared.output("glm-4.7", *settings), tmp_path / "out")
    assert list(write_coverage(out).plots) == PLOTS
    first = [(out / name).read_bytes() for name in (REPORT, *PLOTS)]
    assert all(data.startswith(b"\x89PNG") for data in first[1:])
    write_coverage(out)
    assert [(out / name).read_bytes() for name in (REPORT, *PLOTS)] == first
    assert verify_checkpoint(out, None, lambda done, total: None).passed


def test_without_matplotlib_it_says_so(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    written = write_coverage(out)
    assert written.plots == () and "matplotlib is not installed" in str(written.note)
    assert (out / REPORT).is_file() and not list(out.glob("kvq-reports/*.png"))


def test_a_folder_of_others_is_refused(shared: Shared) -> None:
    with pytest.raises(CheckpointError, match=r"has no kvq-manifest\.json"):
        write_coverage(shared.source("glm-5"))


def test_command(out: Path, kvq_main: Callable[..., Any]) -> None:
    said = kvq_main("coverage", out)
    assert said.code == 0 and REPORT in said.out and "min / median / max" in said.out
    said = kvq_main("coverage", out, "--json")
    report = json.loads(said.out)
    assert report.pop("written") == {"path": REPORT, "plots": PLOTS, "note": None}
    assert report == read_json(out / REPORT)
