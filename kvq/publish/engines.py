"""What differs between the engine versions that kvq writes configurations for. The one table of it.

Each cell was read in the wheel of that version (paths below `sglang/srt`); 0.5.17 and 0.5.23 are also run by
tests/contract. Between two versions of the table nothing is guessed: a version without a row is refused.

alias_dsa_keys      `arg_groups` / `server_args.py:add_cli_args`: while `--nsa-prefill-backend` is an alias of
                    `--dsa-prefill-backend`, the config parser refuses the new name as a YAML key and takes the old one
                    (`server_args_config_parser.py:ConfigArgumentMerger.__init__`, `unsupported_actions` by dest).
kv_checksum         `disaggregation/checksum.py`, `--disaggregation-enable-kv-checksum`.
triton_int4_sm100   `layers/quantization/compressed_tensors/compressed_tensors.py:get_moe_scheme`: INT4 experts by the
                    Triton kernel on SM100 for groups of 32 and 128; before, Marlin.
reads_kv_scheme     the same file: `kv_cache_scheme` of the checkpoint is honoured; `--kv-cache-dtype auto` is FP8 then.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvq.errors import RecipeError


@dataclass(frozen=True, slots=True)
class SglangVersion:
    """A row."""

    name: str
    alias_dsa_keys: bool
    kv_checksum: bool
    triton_int4_sm100: bool
    reads_kv_scheme: bool

    def dsa_key(self, stage: str) -> str:
        """YAML key of the sparse attention's backend; `stage` is prefill or decode."""
        return f"{'nsa' if self.alias_dsa_keys else 'dsa'}-{stage}-backend"


SGLANG_VERSIONS: Mapping[str, SglangVersion] = {
    row.name: row
    for row in (
        SglangVersion("0.5.17", True, False, False, False),
        SglangVersion("0.5.18", True, False, False, False),
        SglangVersion("0.5.19", True, False, True, True),
        SglangVersion("0.5.20", False, False, True, True),
        SglangVersion("0.5.21", False, True, True, True),
        SglangVersion("0.5.22", False, True, True, True),
        SglangVersion("0.5.23", False, True, True, True),
    )
}
NEWEST_SGLANG = "0.5.23"


def sglang_version(name: str | None) -> SglangVersion:
    """The newest without a name. Raises RecipeError for a version whose flags were not read."""
    row = SGLANG_VERSIONS.get(name or NEWEST_SGLANG)
    if row is None:
        raise RecipeError(
            f"--engine-version {name}: kvq knows SGLang {', '.join(SGLANG_VERSIONS)}; flags of other versions were not "
            f"checked. Give the nearest of these and compare its help."
        )
    return row
