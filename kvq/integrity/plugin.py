"""What SGLang's plugin loader calls, in the server's main process and in each scheduler's: `install`.

Entry point group `sglang.srt.plugins`, name `kvq_kv_tags`. With KVQ_KV_TAGS unset or `off` it returns at once: nothing
is imported, nothing is hooked. SGLang's loader swallows exceptions and would go on without the plugin, so a refusal is
a SystemExit: a server that was asked for page tags does not start without them.
"""

import os

from kvq.errors import RecipeError
from kvq.integrity.settings import Settings, read_settings


def install() -> None:
    """Checks the running SGLang and hooks it, all of it or nothing. `hooks.after_scheduler_init` looks again."""
    try:
        settings = read_settings(os.environ)
    except RecipeError as error:
        raise SystemExit(f"kvq: {error}") from error
    if settings.mode == "off":
        return
    try:
        _hook_everything(settings)
    except Exception as error:  # whatever it is: the loader would log it and serve without the plugin
        raise SystemExit(
            f"kvq: KV page tags cannot be switched on: {type(error).__name__}: {error}. Unset KVQ_KV_TAGS to serve "
            "without them."
        ) from error


def _hook_everything(settings: Settings) -> None:
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvq.integrity import compat

    if found := compat.problems(sglang.__version__):
        raise SystemExit(compat.refusal(found))
    from kvq.integrity import hooks

    functions = {name: function for name, (_, function) in hooks.HOOKS.items()}
    hooks.use(settings)
    if not compat.unhooked(functions):
        return  # a second call in this process
    if taken := sorted(functions.keys() & HookRegistry._patched):
        # SGLang applies the hooks of a name once, and passes over those that come later.
        raise SystemExit(compat.refusal([f"another plugin has hooked {name} already" for name in taken]))
    for name, (kind, function) in hooks.HOOKS.items():
        HookRegistry.register(name, function, HookType(kind))
    HookRegistry.apply_hooks()
    if found := compat.unhooked(functions):
        raise SystemExit(compat.refusal(found))
