"""An SGLang plugin that makes static FP8 KV scales right where SGLang drops or half uses them.

Off unless `KVQ_KV_SCALES` names a `kv_cache_scales.json`. SGLang finds it through the entry point group
`sglang.srt.plugins`; it needs none of kvq's dependencies, so `pip install --no-deps kvq` is enough there.

What it does, and nothing else:

    GLM-4.x    gives each attention SGLang's own KV-cache method, whose parameters the model never creates, and hands
               the file's scales to the model's own loader under the names of these parameters.
    Kimi, MLA  the same for the latent's attention, and the pool's own reads and writes of latents divide and multiply
               by the scale, as SGLang's Triton backend does with its reads and writes.

Either all of it works or the engine does not start: SGLang only logs what a plugin raises, so problems end the process.
"""

import os
import sys

__all__ = ["install"]

ENVIRONMENT = "KVQ_KV_SCALES"


def install() -> None:
    """Called by SGLang in each of its processes before a model is loaded. Ends the process (SystemExit) where the file
    or this SGLang is not what it must be; an exception would be logged, and the engine would serve without the scales.
    """
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return
    from kvq.kv_plugin.hooks import register
    from kvq.kv_plugin.probe import check_engine
    from kvq.kv_plugin.scale_file import PluginError, read_scales

    try:
        scales = read_scales(path)
        check_engine(scales.attention)
    except PluginError as error:
        sys.exit(
            f"kvq ({ENVIRONMENT}={path}): {error} The engine was not started; unset {ENVIRONMENT} to serve without."
        )
    register(scales)
