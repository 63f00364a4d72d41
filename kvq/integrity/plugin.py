"""What SGLang's plugin loader calls, in the server's main process and in each scheduler's: `install`.

Entry point group `sglang.srt.plugins`, name `kvq_kv_tags`. With KVQ_KV_TAGS unset or `off` it returns at once: nothing
is imported, nothing is hooked. SGLang's loader swallows exceptions and would go on without the plugin, so a refusal is
a SystemExit: a server that was asked for page tags does not start without them.
"""

import os

from kvq.errors import RecipeError
from kvq.integrity.settings import read_settings


def install() -> None:
    """Checks the running SGLang and hooks it, all of it or nothing."""
    try:
        settings = read_settings(os.environ)
    except RecipeError as error:
        raise SystemExit(f"kvq: {error}") from error
    if settings.mode == "off":
        return
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvq.integrity import compat

    if found := compat.problems(sglang.__version__):
        raise SystemExit(compat.refusal(found))
    from kvq.integrity import hooks

    hooks.use(settings)
    for name, (kind, function) in hooks.HOOKS.items():
        HookRegistry.register(name, function, HookType(kind))
    HookRegistry.apply_hooks()
    if unhooked := sorted(set(hooks.HOOKS) - HookRegistry._patched):
        raise SystemExit(compat.refusal([f"SGLang could not hook {name}" for name in unhooked]))
