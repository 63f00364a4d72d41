"""Every emitted YAML through SGLang's parser and resolution, with the model's config: nothing refused or changed."""

import json
from collections import defaultdict
from typing import Any

import pytest

from tests.contract import engine

# Spelt otherwise in the engine's record.
FIELDS = {"nsa-prefill-backend": "dsa_prefill_backend", "nsa-decode-backend": "dsa_decode_backend"}
OTHER_NAMES = {"glm45": "glm"}  # one parser, two names; 0.5.23 keeps the shorter
OF_A_PAIR = ("kv-cache-dtype", "page-size", "dsa-prefill-backend", "dsa-decode-backend", "nsa-prefill-backend",
             "nsa-decode-backend", "speculative-algorithm", "disaggregation-transfer-backend")  # fmt: skip


def settings() -> list[dict[str, Any]]:
    rows = json.loads((engine.CASES / "yaml.json").read_text(encoding="utf-8"))
    return [row for row in rows if row["version"] == engine.version()]


@pytest.mark.parametrize("row", settings(), ids=lambda row: "-".join(row["yaml"].split("/")[-2:]))
def test_the_engine_takes_every_setting_as_it_is(row: dict[str, Any]) -> None:
    args = engine.server_args("--config", row["yaml"], "--model-path", row["model"])
    for key, value in row["settings"].items():
        if key != "model-path":
            field = FIELDS.get(key, key.replace("-", "_"))
            found = engine.resolved(args, field)
            assert OTHER_NAMES.get(found, found) == OTHER_NAMES.get(value, value), key


def test_both_roles_of_a_pair_have_the_same_cache() -> None:
    pairs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in settings():
        if row["settings"].get("disaggregation-mode"):
            pairs[row["model"], row["settings"]["kv-cache-dtype"]].append(row["settings"])
    assert pairs
    for both in pairs.values():
        assert sorted(one["disaggregation-mode"] for one in both) == ["decode", "prefill"]
        assert [both[0].get(key) for key in OF_A_PAIR] == [both[1].get(key) for key in OF_A_PAIR]


@pytest.mark.parametrize(("key", "value"), [("tp_size", "2"), ("no-such-flag", "1"), ("moe-runner-backend", "none")])
def test_a_wrong_key_or_value_is_refused(tmp_path: Any, key: str, value: str) -> None:
    """The checks above can fail."""
    row = settings()[0]
    path = tmp_path / "wrong.yaml"
    path.write_text(f"{key}: {value}\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        engine.server_args("--config", str(path), "--model-path", row["model"])
