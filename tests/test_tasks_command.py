"""`kvq tasks` and `kvq tool-calls` as a person meets them: models in this process and behind a server, files, gates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvq.verify.chat import ChatFormat
from tests.checkpoints import read_json
from tests.conftest import Kvq
from tests.openai_server import Engine, chat_choice, serve
from tests.runs import Shared

TOOLS = [{"name": "set_timer", "parameters": ["minutes"]}]


@pytest.fixture
def folder(shared: Shared, tmp_path: Path) -> Path:
    return shared.copy(shared.output("glm-4.7"), tmp_path / "quantized")


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps({"q": f"{i}+{i}?", "ans": 2 * i}) for i in range(4)))
    return path


@pytest.fixture
def timers(tmp_path: Path) -> Path:
    path = tmp_path / "timers.jsonl"
    call = {"name": "set_timer", "arguments": {"minutes": 5}}
    path.write_text("\n".join(json.dumps({"tools": TOOLS, "user": f"q{i}", "call": call}) for i in range(4)))
    return path


def adding(chat: ChatFormat, wrong: set[int]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """An engine that adds, but for the questions in `wrong`."""

    def complete(request: dict[str, Any]) -> dict[str, Any]:
        number = int(chat.decode(request["prompt"]).split("<|user|>\n")[1].split("+")[0])
        return {"text": f"It is {2 * number + (number in wrong)}", "finish_reason": "stop"}

    return complete


def test_in_this_process(shared: Shared, kvq_main: Kvq, folder: Path, sums: Path) -> None:
    arguments = ("tasks", folder, "--source", shared.source("glm-4.7"), "--task", sums, "--max-tokens", 3, "--limit", 2)
    said = kvq_main(*arguments)
    assert said.code == 0 and "sums" in said.out and "cut off at 3 tokens" in said.out
    report = read_json(folder / "kvq-reports" / "tasks-sums.json")
    assert report["schema"] == "kvq.tasks/1" and list(report["tasks"]) == ["sums"]
    row = report["tasks"]["sums"]
    assert row["num_samples"] == 2 == row["source"]["cut"] == row["quantized"]["cut"]
    assert row["settings"]["max_tokens"] == 3 and row["settings"]["route"] == "in process, cpu"
    again = kvq_main(*arguments, "--min-recovery", "sums=1", "--json")
    assert json.loads(again.out)["tasks"] == report["tasks"]
    assert again.code == 10 and "sums: recovery was not measured, at least 1 % is wanted" in again.err


def test_two_servers_flips_and_a_gate(shared: Shared, kvq_main: Kvq, folder: Path, sums: Path) -> None:
    chat = ChatFormat(folder)
    with serve(Engine(complete=adding(chat, {0}))) as theirs, serve(Engine(complete=adding(chat, {1, 2}))) as ours:
        places = ("--server", ours.url, "--source-server", theirs.url)
        said = kvq_main("tasks", folder, "--task", sums, *places, "--min-recovery", "sums=66.6")
        assert said.code == 0, said.err
        assert kvq_main("tasks", folder, "--task", sums, *places, "--min-recovery", "sums=66.7").code == 10
    assert "sums, row 1: 1 -> 0 (right now)" in said.out and "sums, row 2: 2 -> 3 (wrong now)" in said.out
    row = read_json(folder / "kvq-reports" / "tasks-sums.json")["tasks"]["sums"]
    assert (row["source"]["correct"], row["quantized"]["correct"]) == (3, 2)
    assert (row["flips"]["lost"], row["flips"]["gained"]) == (2, 1) and row["recovery"] == pytest.approx(200 / 3)


def test_one_server_after_the_other(kvq_main: Kvq, folder: Path, sums: Path, tmp_path: Path) -> None:
    saved, chat = tmp_path / "source.json", ChatFormat(folder)
    with serve(Engine(complete=adding(chat, set()))) as engine:
        said = kvq_main("tasks", folder, "--task", sums, "--server", engine.url, "--save-answers", saved)
        assert said.code == 0 and said.out.strip() == str(saved) and not (folder / "kvq-reports").exists()
        engine.complete = adding(chat, {3})
        arguments = ("tasks", folder, "--task", sums, "--server", engine.url, "--source-answers", saved)
        assert kvq_main(*arguments).code == 0
        other = kvq_main(*arguments, "--max-tokens", 9)
    assert read_json(folder / "kvq-reports" / "tasks-sums.json")["tasks"]["sums"]["recovery"] == 75.0
    assert other.code == 2 and "sums: max_tokens was 16384 for the source and is 9 now" in other.err


def test_tool_calls_of_servers(kvq_main: Kvq, folder: Path, timers: Path) -> None:
    five, six = chat_choice(("set_timer", '{"minutes": 5}')), chat_choice(("set_timer", '{"minutes": 6}'))
    with (
        serve(Engine(chat=lambda request: five)) as theirs,
        serve(Engine(chat=lambda request: six if request["messages"][0]["content"] == "q2" else five)) as ours,
    ):
        said = kvq_main(
            "tool-calls", folder, "--data", timers, "--server", ours.url, "--source-server", theirs.url
        )  # fmt: skip
    assert said.code == 0, said.err
    assert 'row 3: set_timer({"minutes": 5}) -> set_timer({"minutes": 6})' in said.out
    report = read_json(folder / "kvq-reports" / "toolcalls.json")
    assert report["schema"] == "kvq.toolcalls/1" and set(report["ways"]) == {"server", "server, streamed"}
    for way in report["ways"].values():
        assert way["trigger"]["f1"] == 1.0 and way["same_as_source"]["correct"] == 3
        assert way["reference"]["recovery"] == 75.0
    assert report["stream_differs"] == {"source": [], "quantized": []}
    chat = ChatFormat(folder)
    prompt = len(chat.encode(chat.render([{"role": "user", "content": "q0"}], ours.asked[0]["tools"], "q0")))
    asked = next(one for one in ours.asked if one["messages"][0]["content"] == "q0")
    assert 4096 - 100 - prompt < asked["max_tokens"] < 4096 - prompt  # not the 16384 of the default


def test_tool_calls_in_this_process(shared: Shared, kvq_main: Kvq, folder: Path, timers: Path, tmp_path: Path) -> None:
    arguments = ("tool-calls", folder, "--data", timers, "--max-tokens", 3, "--limit", 2)
    said = kvq_main(*arguments, "--source", shared.source("glm-4.7"), "--json")
    assert said.code == 0 and json.loads(said.out)["ways"]["text"]["num_samples"] == 2
    saved = tmp_path / "answers.json"
    assert kvq_main(*arguments, "--save-answers", saved).code == 0
    assert kvq_main(*arguments, "--source-answers", saved).code == 0
    report = read_json(folder / "kvq-reports" / "toolcalls.json")
    assert report["ways"]["text"]["same_as_source"]["score"] == 1.0 and report["stream_differs"]["source"] is None


@pytest.mark.parametrize(
    ("extra", "code", "reason"),
    [
        (["--task", "gsm9k"], 2, "--task gsm9k: neither a file nor one of gsm8k,"),
        (["--task", "humaneval"], 2, "--allow-code"),
        (["--task", "SUMS", "--task", "SUMS"], 2, "two --task have one name"),
        (["--task", "SUMS", "--data", "gsm8k=x"], 2, "--data gsm8k=...: no --task of that name"),
        (["--task", "SUMS", "--min-recovery", "sum=9"], 2, "--min-recovery sum=...: no --task of that name"),
        (["--task", "SUMS", "--min-recovery", "sums"], 2, "expected TASK=VALUE"),
        (["--task", "SUMS", "--min-recovery", "sums=nan"], 2, "expected a percentage"),
        (["--task", "SUMS", "--save-answers", "x"], 2, "leave out --source"),
    ],
)
def test_refused_before_a_model_is_loaded(
    shared: Shared, kvq_main: Kvq, sums: Path, extra: list[str], code: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvq.verify.in_process.load_whole_model", lambda runner: None)
    folder = shared.source("glm-4.7")
    given = [str(sums) if one == "SUMS" else one for one in extra]
    said = kvq_main("tasks", folder, "--source", folder, *given)
    assert said.code == code and reason in said.err and "Traceback" not in said.err


@pytest.mark.parametrize("command", ["tasks", "tool-calls"])
@pytest.mark.parametrize("missing", ["checkpoint", "source"])
def test_a_folder_that_is_not_there_is_not_asked_of_the_hub(
    kvq_main: Kvq, folder: Path, sums: Path, tmp_path: Path, command: str, missing: str
) -> None:
    gone = tmp_path / "gone"
    places = (gone, folder) if missing == "checkpoint" else (folder, gone)
    given = ["--task", sums] if command == "tasks" else ["--data", sums]
    said = kvq_main(command, places[0], "--source", places[1], *given)
    assert said.code == 3 and f"{gone}: no such folder. Give the folder of a checkpoint" in said.err


def test_a_server_that_is_not_there(kvq_main: Kvq, folder: Path, sums: Path) -> None:
    dead = "http://127.0.0.1:9"
    said = kvq_main("tasks", folder, "--task", sums, "--server", dead, "--source-server", dead)
    assert said.code == 11 and f"{dead}/v1/models: the server did not answer" in said.err


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"schema": "kvq.tasks/1"}', '{"schema": "kvq.task-answers/1", "tasks": 1}']
)
def test_answers_that_are_none(kvq_main: Kvq, folder: Path, sums: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "answers.json").write_text(content)
    said = kvq_main("tasks", folder, "--task", sums, "--source-answers", tmp_path / "answers.json")
    assert said.code in (3, 5) and "answers.json" in said.err and "Traceback" not in said.err
