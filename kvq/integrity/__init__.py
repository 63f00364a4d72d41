"""KV page tags: no request reads a cache page that has passed to another request.

`table` and `kernels` know pages, rows and tags and nothing of a serving engine; `plugin` and what it imports fit them
to SGLang. `docs/integrity.md` argues the design. Only torch is needed, and not even that until the plugin is on.
"""
