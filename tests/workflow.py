"""As much of GitHub's runner as the CI example uses: jobs in order, conditions, outputs, environment and steps."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXPRESSION = re.compile(r"\$\{\{\s*(.+?)\s*\}\}")
# As `shell: bash` of a workflow is run, with errexit and pipefail.
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")


@dataclass
class Runner:
    """`checkout` is where steps run, `environment` what the machine gives; `log` gets `job / step: exit code`."""

    workflow: Mapping[Any, Any]
    checkout: Path
    environment: Mapping[str, str]
    secrets: Mapping[str, str]
    log: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def run(self, given: Mapping[str, str]) -> dict[str, str]:
        """Every job in its order with these inputs: its outcome, `success`, `failure` or `skipped`."""
        declared = self.workflow[True]["workflow_dispatch"]["inputs"]  # YAML 1.1 reads the key `on` as true
        inputs = {name: given.get(name, row.get("default", "")) for name, row in declared.items()}
        known: dict[str, Any] = {
            "inputs": inputs,
            "secrets": self.secrets,
            "github": {"token": "gh_token"},
            "needs": {},
        }
        outcomes: dict[str, str] = {}
        for name, job in self.workflow["jobs"].items():
            needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
            if any(outcomes[need] != "success" for need in needs) or not self._holds(job.get("if", ""), known):
                outcomes[name] = "skipped"
                continue
            succeeded, outputs = self._job(name, job, known)
            outcomes[name] = "success" if succeeded else "failure"
            known["needs"][name] = {"outputs": outputs}
        return outcomes

    def _job(self, name: str, job: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[bool, dict[str, str]]:
        known = {**known, "steps": {}}
        files = {key: self.checkout.parent / f"{name}-{key}" for key in ("output", "summary")}
        for step in (step for step in job["steps"] if "run" in step):
            for path in files.values():
                path.write_text("")
            environment = {**self.environment, "GITHUB_OUTPUT": str(files["output"])}
            environment |= {"GITHUB_STEP_SUMMARY": str(files["summary"]), "GITHUB_WORKFLOW": "quantize"}
            environment |= {"GITHUB_REPOSITORY": "acme/models", "GITHUB_REF_NAME": "main"}
            for layer in (self.workflow["env"], job.get("env", {}), step.get("env", {})):
                environment |= {key: self._filled(value, known) for key, value in layer.items()} | {
                    key: value for key, value in self.environment.items() if key in layer
                }
            done = subprocess.run(
                [*BASH, step["run"]], cwd=self.checkout, env=environment, capture_output=True, text=True, check=False
            )
            self.log.append(f"{name} / {step['name']}: {done.returncode}")
            self.said.append(done.stdout + done.stderr + files["summary"].read_text())
            if done.returncode:
                return False, {}
            written = dict(line.split("=", 1) for line in files["output"].read_text().splitlines())
            known["steps"][step.get("id", "")] = {"outputs": written}
        return True, {key: self._filled(value, known) for key, value in job.get("outputs", {}).items()}

    def _filled(self, text: str, known: Mapping[str, Any]) -> str:
        return EXPRESSION.sub(lambda found: self._value(found[1], known), text)

    def _value(self, term: str, known: Mapping[str, Any]) -> str:
        if term.startswith("'"):
            return term.strip("'")
        value: Any = known
        for word in term.split("."):
            value = value.get(word, "")
        return str(value)

    def _holds(self, condition: str, known: Mapping[str, Any]) -> bool:
        if not condition:
            return True
        left, operator, right = condition.split()
        return (self._value(left, known) == self._value(right, known)) == (operator == "==")


def machine_environment(**more: str) -> dict[str, str]:
    """This process's environment less what would point a Hub client elsewhere, with these variables."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "GITHUB_"))} | more
