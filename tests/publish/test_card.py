"""The model card: what stands in it, that it is stable, and that nothing hostile gets through it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from kvq.errors import CheckpointError, KvqError, OutputError, RecipeError, VerificationError
from kvq.publish.card import MARK, build_card, write_card
from kvq.publish.card_metadata import CARD
from kvq.publish.card_page import block, code, escape
from kvq.verify.report_files import TASKS, TOOL_CALLS, checkpoint_identity, report_folder, write_report
from kvq.verify.tasks.stats import Row, compare
from tests.conftest import Kvq
from tests.runs import Shared, manifest_of, rewrite_manifest

Json = dict[str, Any]
ESTIMATES = ("mean_kld", "max_kld", "same_top_p", "mean_ppl_base", "mean_ppl_q", "ppl_ratio")


@pytest.fixture
def folder(shared: Shared, tmp_path: Path) -> Path:
    return shared.copy(shared.output("glm-4.7"), tmp_path / "tiny-int4")


def head(card: str) -> Json:
    values = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(values, dict)
    return values


def html(card: str) -> str:
    return str(MarkdownIt("commonmark").enable("table").render(card.split("---\n", 2)[2]))


def tables(card: str) -> list[list[list[str]]]:
    """Cells of every table, as a reader sees them."""
    found = []
    for table in re.findall(r"<table>.*?</table>", html(card), re.DOTALL):
        rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
        found.append([re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows])
    return found


def figures(**changed: Any) -> Json:
    estimate = {"value": 0.5, "error": 0.001, "document_error": 0.002}
    percentiles = {name: dict(estimate) for name in ("99", "50")}
    return {
        "num_positions": 4321, "num_documents": 21, "percentile_kld": percentiles,
        **{name: dict(estimate) for name in ESTIMATES}, **changed,
    }  # fmt: skip


def distance(folder: Path, **changed: Any) -> Json:
    mean = {"value": 0.0123456, "error": 0.0001, "document_error": 0.0004}
    return {
        "schema": "kvq.distance/1",
        "kvq_version": "9",
        "checkpoint_sha256": checkpoint_identity(folder),
        "data": [{"name": "held|out.jsonl", "sha256": "ab" * 32, "num_documents": 21}],
        "notes": ["compared with *another* model"],
        "figures": figures(mean_kld=mean, max_kld={"value": 2.5, "error": None, "document_error": None}),
        "domains": {"code": figures(), "documents": figures()},
        **changed,
    }


def put(folder: Path, name: str, value: Json | str) -> None:
    path = folder / "kvq-reports" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def put_tasks(folder: Path, name: str = "sums", **changed: Any) -> None:
    source = [Row(f"r{i}", "a", i < 97, cut=i == 3) for i in range(100)]
    quantized = [Row(f"r{i}", "a" if i < 95 else "b", i < 95, cut=i < 2) for i in range(100)]
    settings = {"max_tokens": 777, "route": "server"}
    task = {"num_samples": 100, **compare(source, quantized), "settings": settings, **changed}
    write_report(report_folder(folder), f"tasks-{name}", TASKS, folder, {"tasks": {name: task}})


def put_tool_calls(folder: Path) -> None:
    share = {"correct": 49, "total": 50, "score": 0.98, "interval": [0.895, 0.996]}
    way = {
        "num_samples": 50, "trigger": {"f1": 0.98765}, "source": {"schema_valid": share},
        "quantized": {"schema_valid": share}, "same_as_source": share,
        "reference": {"source": share, "quantized": share},
    }  # fmt: skip
    write_report(report_folder(folder), "toolcalls", TOOL_CALLS, folder, {"ways": {"server, streamed": way}})


def test_the_head(folder: Path) -> None:
    assert head(build_card(folder)) == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "license": "mit",
        "tags": ["kvq", "compressed-tensors", "bf16", "fp8", "int4", "glm4_moe"],
    }  # fmt: skip
    named = head(build_card(folder, base_model="zai-org/GLM-4.7-FP8"))
    assert named["base_model"] == ["zai-org/GLM-4.7-FP8"] and named["base_model_relation"] == "quantized"


@pytest.mark.parametrize(
    ("card", "kept", "fields"),
    [
        ("---\nlicense: other\nlicense_name: x\nlicense_link: y\n---\n", True, ("other", "x", "y")),
        ("---\nlanguage: en\n---\n", True, ("other", "see-license-file", "LICENSE")),
        (None, True, ("other", "see-license-file", "LICENSE")),
        ("no head", False, (None, None, None)),
        ("---\nlicense: [1]\n---\n", False, (None, None, None)),
    ],
)
def test_the_licence(folder: Path, card: str | None, kept: bool, fields: tuple[str | None, ...]) -> None:
    (folder / "SOURCE_README.md").unlink()
    if card is not None:
        (folder / "SOURCE_README.md").write_text(card)
    if not kept:
        (folder / "LICENSE").unlink()
    text = build_card(folder)
    assert tuple(head(text).get(key) for key in ("license", "license_name", "license_link")) == fields
    assert ("The source states no licence." in text) is (fields[0] is None)


def test_the_first_paragraph_says_what_it_is(folder: Path) -> None:
    body = build_card(folder).split(f"{MARK}\n")[1].strip().split("\n\n")
    assert body[0] == "# tiny-int4"
    assert body[1].startswith("This is a quantized derivative of glm-4.7, not the original model.")
    assert "INT4: routed experts. FP8: " in body[1] and "BF16: " in body[1]


def test_the_tensors_are_all_of_the_manifest(folder: Path) -> None:
    rows = tables(build_card(folder))[0][1:]
    manifest = manifest_of(folder)
    assert sum(int(row[3]) for row in rows[:-1]) == int(rows[-1][3]) == len(manifest["tensors"])
    experts = next(row for row in rows if row[0] == "routed experts")
    assert experts[1:3] == ["INT4", "INT4, groups of 32, GPTQ"]


def test_what_was_not_measured_says_so(folder: Path) -> None:
    card = build_card(folder)
    for what in (
        "Distance of probabilities (KL divergence, perplexity)", "Tasks", "Tool calls", "Effect of an FP8 KV cache",
    ):  # fmt: skip
        assert f"{what}: not measured." in card
    assert "KV scales: not calibrated." in card


def test_what_was_measured(folder: Path) -> None:
    put(folder, "distance", distance(folder))
    put_tasks(folder)
    put_tool_calls(folder)
    kv = {"schema": "kvq.kv/1", "simulations": {"fp8_e4m3": {"distance": {"figures": figures()}}}, "chosen": "one",
          "why": "because", "delivery": [{"sentence": "used by x"}, {"sentence": "used by x"}]}  # fmt: skip
    put(folder, "kv", kv)
    (folder / "kvq-reports" / "damage.png").write_bytes(b"x")
    card = build_card(folder)
    assert "not measured" not in card and "not calibrated" not in card
    cells = [row for table in tables(card) for row in table]
    assert ["mean KL divergence", "0.01235 \u00b1 0.00040 nats"] in cells
    assert ["maximum", "2.50000 nats"] in cells
    assert "> compared with \\*another\\* model" in card
    assert ["same most likely token", "50.00 \u00b1 0.20 %"] in cells
    assert ["code", "4321", "0.50000 \u00b1 0.00200", "50.00 \u00b1 0.20 %"] in cells
    (sums,) = [row for row in cells if row[0] == "sums"]
    assert sums[1:4] == ["100", "97/100 (91.5 to 99.0 %)", "95/100 (88.8 to 97.8 %)"]
    assert sums[4].startswith("97.94 \u00b1 ") and sums[5:] == ["2", "0", "1 / 2"]
    (tools,) = [row for row in cells if row[0] == "server, streamed"]
    assert tools[1:4] == ["50", "0.9877", "49/50 (89.5 to 99.6 %)"]
    assert ["fp8_e4m3", "4321", "0.50000 \u00b1 0.00200 nats", "50.00 \u00b1 0.20 %"] in cells
    assert "KV scales: `one` (because)." in card and card.count("used by x") == 1
    assert "![kvq-reports/damage.png](kvq-reports/damage.png)" in card
    put_tasks(folder, "more")
    assert "(more: 777 tokens, server; sums: 777 tokens, server)" in build_card(folder)
    assert "sums: 777 tokens, server" in card and "`held\\|out.jsonl`" in card


def test_the_same_files_give_the_same_bytes(folder: Path, shared: Shared, tmp_path: Path) -> None:
    put_tasks(folder)
    other = shared.copy(folder, tmp_path / "elsewhere" / folder.name)
    assert build_card(folder) == build_card(folder) == build_card(other)
    assert str(tmp_path) not in build_card(folder)


def test_no_figure_is_typed_by_hand() -> None:
    text = (Path(__file__).parents[2] / "kvq/publish/templates/card.md.jinja").read_text(encoding="utf-8")
    outside = re.sub(r"{{.*?}}|{%.*?%}|{#.*?#}", "", text, flags=re.DOTALL).replace("sha256", "")
    assert set(re.findall(r"[A-Za-z]*\d[\d.]*", outside)) == {"95", "INT4", "F1", "FP8"}


def test_commands_come_from_the_files(folder: Path) -> None:
    flags = "--tp-size 2 --disable-shared-experts-fusion --moe-a2a-backend none"
    settings = [f"sglang-{role}.{kind}" for role in ("decode", "prefill", "single") for kind in ("sh", "yaml")]
    assert re.findall(r"^`serving/(.+)`$", build_card(folder), re.MULTILINE) == [*settings, "vllm.sh"]
    shutil.rmtree(folder / "serving")
    assert f"python3 -m sglang.launch_server --model-path . {flags}" in build_card(folder)
    (folder / "serving").mkdir()
    (folder / "serving" / "sglang-single.sh").write_text("exec sglang ```--x```\n")
    (folder / "serving" / "NOTES.md").write_text("not shown")
    card = build_card(folder)
    assert "````sh\nexec sglang ```--x```\n````" in card and "not shown" not in card and flags not in card


def test_the_recipe_can_be_read_again(folder: Path, tmp_path: Path) -> None:
    from kvq.recipes.schema import load_recipe

    text = build_card(folder).split("`recipe.yaml`, hash")[1].split("```yaml\n")[1].split("```")[0]
    (tmp_path / "recipe.yaml").write_text(text)
    manifest = manifest_of(folder)
    assert load_recipe(str(tmp_path / "recipe.yaml")).sha256 == manifest["recipe_sha256"]
    assert manifest["recipe_sha256"] in build_card(folder)


def test_a_copy_is_not_called_a_derivative(shared: Shared) -> None:
    card = build_card(shared.output("kimi-k2.5"))
    assert "This is a copy of kimi-k2.5" in card and "quantized derivative" not in card


HOSTILE = "x|y `z` <script>alert(1)</script> [a](b) ![c](d) **e** _f_ $g$ &lt;\n# h\r\n| i | & \\ \u0000\u202e"


def test_text_from_outside_stays_text(folder: Path) -> None:
    manifest = manifest_of(folder)
    manifest["source"]["id"] = manifest["source"]["format"] = HOSTILE
    manifest["warnings"] = [HOSTILE]
    manifest["calibration"]["name"] = manifest["summary"]["worst_modules"][0]["name"] = HOSTILE
    manifest["versions"]["torch"] = manifest["device"] = HOSTILE
    for tensor in list(manifest["tensors"].values())[:3]:
        tensor["class"] = HOSTILE
    rewrite_manifest(folder, manifest)
    put_tasks(folder, settings={"max_tokens": 1, "route": HOSTILE})
    report = json.loads((folder / "kvq-reports" / "tasks-sums.json").read_text())
    report["tasks"][HOSTILE] = report["tasks"]["sums"]
    put(folder, "tasks-sums", report)
    card = build_card(folder, notes=[HOSTILE])
    page = html(card)
    plain = build_card_of_plain_names(folder)
    for tag in ("<script", "<a ", "<img", "<strong>", "<em>", "<h1>", "<h2>", "<tr>"):
        assert page.count(tag) == plain.count(tag) or tag == "<script", tag
    assert "<script>" not in page and all(len(row) == len(table[0]) for table in tables(card) for row in table)


def build_card_of_plain_names(folder: Path) -> str:
    """The page of the same card with harmless words."""
    text = (folder / "kvq-manifest.json").read_text(encoding="utf-8")
    report = folder / "kvq-reports" / "tasks-sums.json"
    values, tasks = json.loads(text), json.loads(report.read_text(encoding="utf-8"))
    soft = json.loads(json.dumps(values).replace(json.dumps(HOSTILE)[1:-1], "word"))
    (folder / "kvq-manifest.json").write_text(json.dumps(soft), encoding="utf-8")
    tasks = json.loads(json.dumps(tasks).replace(json.dumps(HOSTILE)[1:-1], "word"))
    report.write_text(json.dumps(tasks), encoding="utf-8")
    return html(build_card(folder, notes=["word"]))


@pytest.mark.parametrize("text", ["", "`", "``a`", "a``", "a|b", "a\nb", "plain"])
def test_code_shows_what_it_is_given(text: str) -> None:
    shown = re.findall(
        r"<code>(.*?)</code>", MarkdownIt("commonmark").enable("table").render(f"|h|\n|-|\n|{code(text)}|")
    )
    assert [one.strip() for one in shown] == [text.replace("\n", " ").strip()] or not text
    inside = MarkdownIt("commonmark").render(block(text, "sh"))
    assert inside.count("<pre>") == 1 and inside.strip().endswith("</code></pre>")


@pytest.mark.parametrize("text", ["a_b", "_a_", "1 * 2 * 3", "<b>", "&amp;", "a ~~b~~", "![x](y)", "`x`", "\\*"])
def test_escaped_words_read_as_they_are(text: str) -> None:
    import html as unescape

    shown = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(str(escape(text)))
    assert unescape.unescape(shown.removeprefix("<p>").removesuffix("</p>\n")) == text


def break_distance(**changed: Any) -> Callable[[Path], None]:
    return lambda folder: put(folder, "distance", distance(folder, **changed))


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda folder: put(folder, "distance", "{"), "not valid JSON"),
        (lambda folder: put(folder, "distance", "[]"), "expected a JSON object"),
        (lambda folder: put(folder, "distance", "{}"), "lacks schema"),
        (break_distance(schema="kvq.distance/2"), "its schema is 'kvq.distance/2'"),
        (break_distance(schema=7), "schema is '7', not text"),
        (break_distance(figures={}), "lacks figures.num_positions"),
        (break_distance(figures=figures(mean_kld="low")), "figures.mean_kld is 'low', not a finite number"),
        (break_distance(figures=figures(mean_kld={"error": 1})), "lacks figures.mean_kld.value"),
        (break_distance(figures=figures(num_positions=-1)), "figures.num_positions is '-1', not a count"),
        (break_distance(figures=figures(num_positions=True)), "not a count"),
        (break_distance(domains=[]), "domains is not an object"),
        (break_distance(data={}), "data is not a list"),
        (break_distance(checkpoint_sha256="0"), "on other weights"),
        (
            lambda folder: put(folder, "distance", json.dumps(distance(folder)).replace("0.0123456", "NaN")),
            "NaN is no JSON",
        ),
        (
            lambda folder: put(folder, "tasks-x", {"schema": TASKS, "tasks": {}, "checkpoint_sha256": "0"}),
            "on other weights",
        ),
        (lambda folder: put_tasks(folder, flips={}), "lacks tasks.sums.flips.lost"),
        (lambda folder: put_tasks(folder, recovery="all"), "recovery is 'all', not a finite number"),
        (lambda folder: put_tasks(folder, source={"interval": [1]}), "interval is not two numbers"),
        (
            lambda folder: put(folder, "kv", {"schema": "kvq.kv/1", "simulations": {"x": 1}}),
            "lacks simulations.x.distance",
        ),
    ],
)
def test_hostile_reports(folder: Path, act: Callable[[Path], None], reason: str) -> None:
    act(folder)
    with pytest.raises((CheckpointError, VerificationError)) as error:
        build_card(folder)
    assert reason in str(error.value) and "kvq-reports" in str(error.value)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("recipe",), 1), (("recipe", "solver"), None), (("summary", "num_fallbacks"), "none"), (("source",), {}),
        (("tensors",), []), (("tensors", "lm_head.weight"), {"dtype": "BF17", "shape": [1]}),
        (("tensors", "lm_head.weight"), 5), (("tensors", "lm_head.weight", "shape"), ["x"]),
        (("calibration",), {"name": 1}), (("serving",), None), (("serving", "tensor_parallel_sizes"), ["two"]),
        (("versions",), 3), (("warnings",), 3), (("summary", "worst_modules"), [{"name": "x"}]),
    ],
)  # fmt: skip
def test_hostile_manifests(folder: Path, keys: tuple[str, ...], value: Any) -> None:
    manifest = manifest_of(folder)
    place = manifest
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (folder / "kvq-manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(KvqError, match="manifest"):
        build_card(folder)


def test_no_manifest_and_no_hub_id(shared: Shared, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no kvq-manifest\.json"):
        build_card(shared.source("glm-4.7"))
    with pytest.raises(RecipeError, match="--base-model nonsense: expected a Hub id"):
        build_card(folder, base_model="nonsense")
    (folder / "SOURCE_README.md").write_text("---\na: [\n---\n")
    with pytest.raises(CheckpointError, match="its head is not YAML"):
        build_card(folder)


def test_the_command_keeps_what_others_wrote(kvq_main: Kvq, folder: Path) -> None:
    said = kvq_main("card", folder, "--base-model", "zai-org/GLM-4.7-FP8")
    assert said.code == 0 and said.out.strip() == str(folder / CARD)
    first = (folder / CARD).read_bytes()
    assert kvq_main("card", folder, "--base-model", "zai-org/GLM-4.7-FP8").code == 0
    assert (folder / CARD).read_bytes() == first == kvq_main(
        "card", folder, "--base-model", "zai-org/GLM-4.7-FP8", "--print"
    ).out.encode()  # fmt: skip
    assert kvq_main("verify", folder).code == 0  # a card is a later addition
    (folder / CARD).write_text("mine")
    refused = kvq_main("card", folder)
    assert refused.code == 7 and "was not written by kvq" in refused.err and (folder / CARD).read_text() == "mine"
    source = (folder / "SOURCE_README.md").read_bytes()
    (folder / "SOURCE_README.md").unlink()
    (folder / CARD).write_bytes(source)
    assert kvq_main("card", folder).code == 0 and (folder / "SOURCE_README.md").read_bytes() == source


def test_a_card_that_cannot_be_written(folder: Path) -> None:
    (folder / f".{CARD}.partial").mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        write_card(folder, "text")
