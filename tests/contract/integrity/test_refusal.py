"""A SGLang that the plugin does not fit is refused, whole."""

import pytest

pytest.importorskip("tests.contract.engine", reason="make contract")
import sglang
from sglang.srt.plugins.hook_registry import HookRegistry

from kvq.integrity import compat, plugin


@pytest.mark.skipif(sglang.__version__ in compat.SUPPORTED_VERSIONS, reason="this one is supported")
def test_an_sglang_that_is_not_supported_is_refused_and_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_KV_TAGS", "abort")
    with pytest.raises(SystemExit, match=f"this is SGLang {sglang.__version__}.* support SGLang 0.5.17"):
        plugin.install()
    assert not any("kvq" in str(hook) for hooks in HookRegistry._hooks.values() for hook in hooks)
