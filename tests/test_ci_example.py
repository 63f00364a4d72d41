"""The CI example: its script under a time limit, its workflow's commands and the container's rules."""

import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

import kvq
from kvq.cli import app

ROOT = Path(kvq.__file__).parent.parent
CI = ROOT / "examples" / "ci"
SCRIPT = CI / "quantize-until.sh"


@pytest.fixture
def workflow() -> dict[str, Any]:
    loaded = yaml.safe_load((CI / "quantize.yml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def run_script(folder: Path, kvq_does: str, limit: str = "60") -> tuple[int, dict[str, str], str]:
    """The script with a `kvq` that notes its arguments and then does this: exit code, outputs, arguments."""
    (folder / "bin").mkdir(exist_ok=True)
    fake = folder / "bin" / "kvq"
    fake.write_text(f'#!/usr/bin/env bash\necho "$@" > "{folder}/arguments"\n{kvq_does}\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    outputs = folder / "outputs"
    outputs.unlink(missing_ok=True)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    environment |= {"GITHUB_OUTPUT": str(outputs), "LIMIT": limit}
    command = ["bash", str(SCRIPT), "source", str(folder / "o" / "out"), "--recipe", "int4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    written = dict(line.split("=", 1) for line in outputs.read_text().splitlines())
    arguments = folder / "arguments"
    return done.returncode, written, arguments.read_text().strip() if arguments.exists() else ""


@pytest.mark.parametrize(
    ("code", "ends", "state"),
    [(0, 0, "done"), (143, 0, "continue"), (137, 0, "continue"), (2, 2, None), (7, 7, None), (130, 130, None)],
)
def test_exit_codes_become_a_state(tmp_path: Path, code: int, ends: int, state: str | None) -> None:
    returned, outputs, arguments = run_script(tmp_path, f"exit {code}")
    out = tmp_path / "o" / "out"
    assert (returned, outputs.get("state")) == (ends, state)
    assert arguments == f"quantize source --out {out} --events {out}.events.jsonl --recipe int4"
    assert outputs["events"] == f"{out}.events.jsonl"


def test_the_time_limit_is_a_sigterm(tmp_path: Path) -> None:
    """kvq finishes its layer and ends with 143, as it does on SIGTERM."""
    does = f"trap 'touch {tmp_path}/layer-finished; exit 143' TERM; for i in $(seq 100); do sleep 0.1; done; exit 1"
    returned, outputs, _ = run_script(tmp_path, does, limit="0.5")
    assert (returned, outputs["state"]) == (0, "continue") and (tmp_path / "layer-finished").exists()


def test_what_is_finished_is_not_done_again(tmp_path: Path) -> None:
    (tmp_path / "o" / "out").mkdir(parents=True)
    (tmp_path / "o" / "out" / "kvq-manifest.json").touch()
    assert run_script(tmp_path, "exit 1") == (0, {**run_script(tmp_path, "exit 1")[1], "state": "done"}, "")


def shell_lines(workflow: dict[str, Any]) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def test_no_input_is_pasted_into_a_shell(workflow: dict[str, Any]) -> None:
    """Inputs and secrets reach a shell as variables only: a model's name could be a command."""
    assert not [line for line in shell_lines(workflow) if "${{" in line]


def test_only_steps_that_ask_the_hub_see_the_token(workflow: dict[str, Any]) -> None:
    assert "HF_TOKEN" not in workflow["env"]
    for job in workflow["jobs"].values():
        assert "HF_TOKEN" not in job.get("env", {})
        for step in job["steps"]:
            asks = re.search(r"kvq (plan|download|upload)", step.get("run", "")) is not None
            assert ("HF_TOKEN" in step.get("env", {})) == asks, step.get("name")


def test_jobs_stop_before_their_limit(workflow: dict[str, Any]) -> None:
    job = workflow["jobs"]["quantize"]
    (step,) = [step for step in job["steps"] if step.get("id") == "quantize"]
    limit = int(step["env"]["LIMIT"].removesuffix("m"))
    assert limit + 10 <= job["timeout-minutes"], "no time is left to finish a layer"


def test_a_gate_that_fails_fails_its_step(workflow: dict[str, Any]) -> None:
    """GitHub gives bash pipefail only where the shell is named."""
    assert workflow["defaults"]["run"]["shell"] == "bash"
    assert any("kvq evaluate" in line and "| tee" in line for line in shell_lines(workflow))


def test_its_commands_exist(workflow: dict[str, Any]) -> None:
    """Every command and option that the workflow uses is one of kvq's."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    text = "\n".join([*shell_lines(workflow), SCRIPT.read_text(encoding="utf-8")]).replace("\\\n", " ")
    calls = re.findall(r"(?<![\w-])kvq (\w+)((?: +(?!\|)[^\n|)]+)?)", re.sub(r"^ *#.*", "", text, flags=re.M))
    assert {name for name, _ in calls} >= {"doctor", "plan", "download", "quantize", "verify", "evaluate", "upload"}
    for name, rest in calls:
        known = {option for parameter in group.commands[name].params for option in parameter.opts}
        assert set(re.findall(r"(?<=\s)--[\w-]+", rest)) <= known, name


def test_the_container_is_not_root_and_gets_what_it_copies() -> None:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    last_stage = text.rpartition("FROM ")[2]
    assert re.search(r"^USER 10001:10001$", last_stage, re.M) and "root" not in last_stage
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M) for word in line.split()}
    assert copied == allowed and all((ROOT / name).exists() for name in copied)
