"""Settings, the compatibility probe and the entry point, without SGLang."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvq.errors import RecipeError
from kvq.integrity import compat, hooks, plugin
from kvq.integrity.counters import COUNTERS, Counters
from kvq.integrity.guard import unsupported
from kvq.integrity.settings import Settings, read_settings

ROOT = Path(__file__).parents[2]


def test_off_imports_nothing_and_hooks_nothing() -> None:
    code = "import sys; from kvq.integrity import plugin; plugin.install(); print(*sys.modules)"
    for mode in ({}, {"KVQ_KV_TAGS": "off"}):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=mode, cwd=ROOT
        )
        assert not {"torch", "sglang", "pydantic", "kvq.integrity.hooks"} & set(done.stdout.split())


def test_the_entry_point_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    module, _, name = declared["kvq_kv_tags"].partition(":")
    assert getattr(import_module(module), name) is plugin.install


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Settings()),
        ({"KVQ_KV_TAGS": ""}, Settings()),
        ({"KVQ_KV_TAGS": "abort"}, Settings("abort", 60.0)),
        ({"KVQ_KV_TAGS": "log", "KVQ_KV_TAGS_SWEEP_SECONDS": "0"}, Settings("log", 0.0)),
        ({"KVQ_KV_TAGS": "log", "KVQ_KV_TAGS_FAULTS": "rate=1"}, Settings("log", 60.0, "rate=1")),
    ],
)
def test_settings_from_the_environment(environment: dict[str, str], expected: Settings) -> None:
    assert read_settings(environment) == expected
    assert read_settings(expected.environment()).mode == expected.mode


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVQ_KV_TAGS", "on"), ("KVQ_KV_TAGS_SWEEP_SECONDS", "often"), ("KVQ_KV_TAGS_SWEEP_SECONDS", "-1"),
        ("KVQ_KV_TAGS_FAULTS", "seed=1"), ("KVQ_KV_TAGS_FAULTS", "rate=2"),
        ("KVQ_KV_TAGS_FAULTS", "rate=0.1,kind=free"),
    ],
)  # fmt: skip
def test_a_setting_that_means_nothing_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match=f"{name} is '{value}'"):
        read_settings({name: value})
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=name):
        plugin.install()


@pytest.mark.parametrize("name", ["KVQ_KV_TAG", "KVQ_KV_TAGS_SWEEP"])
def test_a_misspelt_variable_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a server that was asked for tags would run without."""
    monkeypatch.setenv(name, "abort")
    with pytest.raises(SystemExit, match=f"{name}: there is no such variable; there are KVQ_KV_TAGS, "):
        plugin.install()


def fake_sglang(monkeypatch: pytest.MonkeyPatch, version: str) -> list[str]:
    """Modules that stand for SGLang; returns the list of targets that get hooked."""
    registered: list[str] = []
    registry = SimpleNamespace(
        register=lambda name, *_: registered.append(name), apply_hooks=lambda: None, _patched=set(), _hooks={}
    )
    modules: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": version},
        "sglang.srt": {},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": lambda kind: kind},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return registered


def test_another_version_is_refused_with_the_list_and_nothing_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = fake_sglang(monkeypatch, "0.5.23")
    monkeypatch.setenv("KVQ_KV_TAGS", "abort")
    with pytest.raises(SystemExit, match=r"this is SGLang 0\.5\.23.* support SGLang 0\.5\.17"):
        plugin.install()
    assert registered == []


def test_a_supported_version_with_a_changed_name_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = fake_sglang(monkeypatch, "0.5.17")
    monkeypatch.setenv("KVQ_KV_TAGS", "log")
    with pytest.raises(SystemExit, match="alloc_for_extend is missing"):
        plugin.install()
    assert registered == []


def test_a_hook_that_was_not_applied_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sglang(monkeypatch, "0.5.17")
    monkeypatch.setenv("KVQ_KV_TAGS", "log")
    monkeypatch.setattr(compat, "problems", lambda version: [])
    with pytest.raises(SystemExit, match=f"could not hook {next(iter(hooks.HOOKS))}"):
        plugin.install()


def test_a_name_that_is_hooked_already_is_refused_before_anything_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = fake_sglang(monkeypatch, "0.5.17")
    monkeypatch.setenv("KVQ_KV_TAGS", "abort")
    monkeypatch.setattr(compat, "problems", lambda version: [])
    sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry._patched.add(next(iter(hooks.HOOKS)))
    with pytest.raises(SystemExit, match=f"another plugin has hooked {next(iter(hooks.HOOKS))} already"):
        plugin.install()
    assert registered == []


def test_whatever_goes_wrong_the_server_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's loader logs exceptions and goes on."""
    fake_sglang(monkeypatch, "0.5.17")
    monkeypatch.setenv("KVQ_KV_TAGS", "abort")

    def broken(version: str) -> list[str]:
        raise OSError("a disk went away")

    monkeypatch.setattr(compat, "problems", broken)
    with pytest.raises(SystemExit, match=r"cannot be switched on: OSError: a disk went away\. Unset KVQ_KV_TAGS"):
        plugin.install()


def resolver(**changed: Any) -> Any:
    """Names with the parameters and fields that the probe expects, but for the changed ones."""

    def resolve(name: str) -> Any:
        short = name.rpartition(".")[2]
        if short in changed:
            if changed[short] is None:
                raise AttributeError(name)
            return changed[short]
        if name in compat.FIELDS:
            return type(short, (), dict.fromkeys(compat.FIELDS[name]))
        namespace: dict[str, Any] = {}
        exec(f"def target({', '.join(compat.HOOKED[name])}): ...", namespace)
        return namespace["target"]

    return resolve


def test_the_probe_names_what_is_missing_or_changed() -> None:
    assert compat.problems("0.5.17", resolver()) == []
    (found,) = compat.problems("0.5.17", resolver(insert=None))
    assert found == "sglang.srt.mem_cache.radix_cache.RadixCache.insert is missing, or is no function"
    (found,) = compat.problems("0.5.17", resolver(insert=7))
    assert found == "sglang.srt.mem_cache.radix_cache.RadixCache.insert is missing, or is no function"
    (found,) = compat.problems("0.5.17", resolver(insert=lambda self, params, node: None))
    assert found.endswith("RadixCache.insert takes (params, node), not (params)")
    fields = dict.fromkeys(set(compat.FIELDS["sglang.srt.managers.schedule_batch.Req"]) - {"to_finish"})
    (found,) = compat.problems("0.5.17", resolver(Req=type("Req", (), fields)))
    assert found.endswith("Req has no field to_finish")


def test_hooks_and_probe_list_the_same_names() -> None:
    assert set(hooks.HOOKS) == set(compat.HOOKED)


def fake_scheduler(allocator: str = "PagedTokenToKVPoolAllocator", cache: str = "RadixCache", **arguments: Any) -> Any:
    return SimpleNamespace(
        server_args=SimpleNamespace(**arguments),
        token_to_kv_pool_allocator=type(allocator, (), {})(),
        tree_cache=type(cache, (), {})(),
        model_config=SimpleNamespace(is_encoder_decoder=False),
    )


@pytest.mark.parametrize(
    ("scheduler", "found"),
    [
        (fake_scheduler(), []),
        (fake_scheduler(pp_size=2), ["pp_size is 2"]),
        (fake_scheduler(attn_cp_size=2), ["attn_cp_size is 2"]),
        (fake_scheduler(disaggregation_mode="decode"), ["disaggregation_mode is 'decode'"]),
        (
            fake_scheduler(cache="HiRadixCache", enable_hierarchical_cache=True),
            ["enable_hierarchical_cache", "HiRadix"],
        ),
        (fake_scheduler("SWATokenToKVPoolAllocator"), ["allocated by SWATokenToKVPoolAllocator"]),
    ],
)
def test_a_server_that_the_plugin_does_not_fit_is_refused(scheduler: Any, found: list[str]) -> None:
    sentences = unsupported(scheduler)
    assert len(sentences) == len(found)
    assert all(part in sentence for part, sentence in zip(found, sentences, strict=True))
    if found:
        with pytest.raises(SystemExit, match="unset KVQ_KV_TAGS"):
            hooks.after_scheduler_init(None, scheduler)


def test_an_encoder_decoder_is_refused() -> None:
    scheduler = fake_scheduler()
    scheduler.model_config.is_encoder_decoder = True
    (sentence,) = unsupported(scheduler)
    assert "encoder-decoder" in sentence


def test_metrics_carry_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, int] = {}

    class Counter:
        def __init__(self, name: str, text: str, labelnames: list[str]) -> None:
            self.name = name

        def labels(self, **labels: str) -> "Counter":
            assert labels == {"tp_rank": "0"}
            return self

        def inc(self, count: int) -> None:
            values[self.name] = values.get(self.name, 0) + count

    module = ModuleType("prometheus_client")
    monkeypatch.setattr(module, "Counter", Counter, raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", module)
    counters = Counters()
    counters.connect({"tp_rank": "0"})
    counters.checks = 5
    counters.export()
    counters.checks, counters.violations = 7, 1
    counters.export()
    assert values["kvq:kv_tag_checks"] == 7 and values["kvq:kv_tag_violations"] == 1
    assert set(values) == {f"kvq:kv_tag_{name}" for name in COUNTERS} and set(COUNTERS) < set(counters.as_json())
