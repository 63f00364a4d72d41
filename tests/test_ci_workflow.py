"""The example workflow run step by step with the real kvq, against a Hub on this machine."""

import json
import stat
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import yaml

import kvq
from tests.checkpoints import make_checkpoint
from tests.hub.server import Hub, serve
from tests.runs import all_bytes, write_calibration
from tests.workflow import Runner, machine_environment

ROOT = Path(kvq.__file__).parent.parent
WORKFLOW = ROOT / "examples" / "ci" / "quantize.yml"
RESULT = "acme/tiny-int4"
INPUTS = {"recipe": "int4-g32", "repo": RESULT, "max_mean_kl": "10", "min_same_top": "0.01", "model": "owner/name"}


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub()
    hub.store.create("owner/name", private=False)
    hub.put_folder("owner/name", make_checkpoint(tmp_path / "repository", "kimi_k2"))
    with serve(hub):
        yield hub


@pytest.fixture
def runner(tmp_path: Path, hub: Hub) -> Runner:
    """A runner whose `gh` notes what it is asked, and whose kvq is this one."""
    copytree(ROOT / "examples" / "ci", tmp_path / "checkout" / "examples" / "ci")
    (tmp_path / "kvq").mkdir()  # the disk that outlives a job
    programs = tmp_path / "programs"
    write_program(programs / "kvq", f'exec "{sys.executable}" -m kvq "$@"\n')
    write_program(programs / "gh", f'printf "%s\\n" "$@" > "{tmp_path}/asked-gh"\n')
    environment = machine_environment(
        HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hub-cache"), HF_HUB_DISABLE_XET="1", NO_PROXY="*",
        HF_HUB_DISABLE_TELEMETRY="1", KVQ_ROOT=str(tmp_path / "kvq"), PYTHONPATH=str(ROOT),
    )  # fmt: skip
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    return Runner(workflow, tmp_path / "checkout", environment, {"HF_TOKEN": hub.token})


def limit_quantize(workflow: dict[str, Any], limit: str) -> None:
    (step,) = [step for step in workflow["jobs"]["quantize"]["steps"] if step.get("id") == "quantize"]
    step["env"]["LIMIT"] = limit


def asked_of_gh(path: Path) -> dict[str, str]:
    """The inputs of `gh workflow run ... -f name=value`."""
    words = path.read_text().splitlines()
    return dict(word.split("=", 1) for flag, word in pairwise(words) if flag == "-f")


def test_from_a_hub_id_to_an_upload_over_two_jobs(runner: Runner, hub: Hub, tmp_path: Path) -> None:
    """The first job's time limit comes at once, it starts itself again, the second one finishes."""
    inputs = INPUTS | {"held_out": str(write_calibration(tmp_path / "held-out.jsonl", rows=4))}
    workflow: Any = runner.workflow
    usual = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    limit_quantize(workflow, "1")
    first = runner.run(inputs)
    assert first == {
        "plan": "success", "quantize": "success", "again": "success", "evaluate": "skipped", "upload": "skipped"
    }, runner.said  # fmt: skip
    again = asked_of_gh(tmp_path / "asked-gh")
    assert again == inputs | {"attempt": "2"}

    runner.workflow = usual
    second = runner.run(again)
    assert second == {
        "plan": "success", "quantize": "success", "again": "skipped", "evaluate": "success", "upload": "success"
    }, runner.said  # fmt: skip
    out = tmp_path / "kvq" / "out" / "name-int4-g32"
    branch = hub.store.repos[RESULT].branches["main"]
    remote = {path: file.data for path, file in hub.store.repos[RESULT].commits[branch].items()}
    remote.pop(".gitattributes", None)
    assert remote == all_bytes(out) and branch in runner.said[-1]
    assert json.loads(remote["kvq-manifest.json"])["recipe"]["name"].startswith("int4-g32")
    assert hub.token not in "".join(runner.said)


def test_a_failed_gate_stops_before_the_upload(runner: Runner, tmp_path: Path) -> None:
    """With a kvq that does nothing but fail its gates: `| tee` must not hide the exit code."""
    write_program(tmp_path / "programs" / "kvq", '[ "$1" != evaluate ] || { echo "mean KL is 0.2"; exit 10; }\n')
    outcomes = runner.run(INPUTS | {"held_out": "held-out.jsonl"})
    assert (outcomes["quantize"], outcomes["evaluate"], outcomes["upload"]) == ("success", "failure", "skipped")
    assert runner.log[-1] == "evaluate / Distance, with gates: 10" and "mean KL is 0.2" in runner.said[-1]
