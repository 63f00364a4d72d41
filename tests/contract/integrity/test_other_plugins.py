"""Other plugins beside ours, through SGLang's own loader: what it would pass over in silence is refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tests.contract.engine", reason="make contract")
import sglang
from sglang.srt import plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvq.integrity import compat, hooks, plugin
from tests.contract.engine import in_child

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
if sglang.__version__ not in compat.SUPPORTED_VERSIONS:
    pytest.skip("not the SGLang that the plugin fits", allow_module_level=True)


def load(*functions: Callable[[], None]) -> list[str]:
    """Loads plugins in this order, in a child; what then keeps the server from starting, now or with its scheduler."""

    def in_a_process_of_its_own() -> list[str]:
        points = [
            SimpleNamespace(name=one.__name__, value="", dist=None, load=lambda one=one: one) for one in functions
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plugins, "entry_points", lambda group: points if group.endswith("plugins") else [])
            patch.setattr(plugins, "_plugins_loaded", False)
            patch.setenv("KVQ_KV_TAGS", "abort")
            try:
                plugins.load_plugins()
            except SystemExit as refused:
                return ["at once", str(refused)]
            from sglang.srt.managers.scheduler import Scheduler

            assert set(hooks.HOOKS) <= HookRegistry._patched
            return hooks._hooked_otherwise(object.__new__(Scheduler))

    found: list[str] = in_child(in_a_process_of_its_own)
    return found


def theirs(*_args: Any, **_kwargs: Any) -> None:
    """A hook that changes nothing."""


def hooks_late() -> None:
    HookRegistry.register(f"{SCHEDULER}.run_batch", theirs, HookType.BEFORE)


def hooks_at_once() -> None:
    hooks_late()
    HookRegistry.apply_hooks()


def hooks_something_else() -> None:
    HookRegistry.register(f"{SCHEDULER}.flush_cache", theirs, HookType.BEFORE)


def replaces_the_scheduler() -> None:
    from sglang.srt.managers import scheduler

    class Theirs(scheduler.Scheduler):  # type: ignore[misc]
        def run_batch(self, *_args: Any, **_kwargs: Any) -> Any: ...

    HookRegistry.register(SCHEDULER, Theirs, HookType.REPLACE)


def test_a_plugin_that_hooks_something_else_is_no_trouble() -> None:
    assert load(hooks_something_else, plugin.install) == [] == load(plugin.install, hooks_something_else)


def test_hooks_of_another_plugin_that_come_first_are_applied_with_ours() -> None:
    assert load(hooks_late, plugin.install) == []


def test_a_name_that_another_plugin_has_hooked_already() -> None:
    """SGLang would not apply ours to it, and the server would run without a check."""
    when, refusal = load(hooks_at_once, plugin.install)
    assert when == "at once" and f"another plugin has hooked {SCHEDULER}.run_batch already" in refusal


def test_a_plugin_whose_hook_would_be_passed_over() -> None:
    assert load(plugin.install, hooks_late) == [
        f"hooks_late hooks {SCHEDULER}.run_batch as well, and SGLang passes over its hook"
    ]


def test_a_scheduler_that_was_replaced_afterwards() -> None:
    (found,) = load(plugin.install, replaces_the_scheduler)
    assert found == f"SGLang could not hook {SCHEDULER}.run_batch, or another plugin has replaced it"


def test_a_part_of_kvq_that_cannot_be_imported() -> None:
    """The loader would log the ImportError and serve without tags."""

    def broken(*_args: Any) -> list[str]:
        raise ImportError("half an installation")

    def install() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compat, "problems", broken)
            plugin.install()

    when, refusal = load(install)
    assert when == "at once" and "cannot be switched on: ImportError: half an installation" in refusal
