"""kvq-manifest.json: what was asked, what was done to each tensor, what came of it, and the hash of every file.

It holds no time of day and no path of this machine, so the same run gives the same bytes.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import mean
from typing import Any

from kvq import __version__
from kvq.calibration.dataset import TokenSet
from kvq.checkpoint.formats import CODES_PER_WORD
from kvq.checkpoint.source import Source
from kvq.publish.serving import serving_notes
from kvq.quantize.types import FALLBACKS, ModuleResult
from kvq.recipes.plan import QuantPlan

MANIFEST_VERSION = 1
NUMERIC_PACKAGES = ("torch", "transformers", "compressed-tensors", "llmcompressor", "safetensors")
FEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What the plan does not know: where the source came from, for which engine, on what device, with which data."""

    source: Source
    target: str
    device: str
    tokens: TokenSet | None


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """JSON with a line for each tensor, module and file: large checkpoints have hundreds of thousands of them."""
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {_value_text(value)}" for key, value in manifest.items()) + "\n}\n"


def _value_text(value: Any) -> str:
    def line(item: Any) -> str:
        return json.dumps(item, ensure_ascii=False, allow_nan=False)

    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"    {line(key)}: {line(item)}" for key, item in value.items()) + "\n  }"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"    {line(item)}" for item in value) + "\n  ]"
    return line(value)


def build_manifest(
    plan: QuantPlan, record: RunRecord, results: Iterable[ModuleResult], sha256: Mapping[str, str]
) -> dict[str, Any]:
    """The whole manifest as plain data."""
    results = list(results)
    return {
        "manifest_version": MANIFEST_VERSION,
        "kvq_version": __version__,
        "versions": package_versions(),
        "source": {
            "id": record.source.id if record.source.revision else printable(record.source.name),
            "revision": record.source.revision,
            "format": plan.source.title,
            "model_type": plan.facts.arch.model_type,
            "bytes": plan.source_bytes,
        },
        "target": record.target,
        "device": record.device,
        "recipe": plan.recipe.model_dump(mode="json"),
        "recipe_sha256": plan.recipe.sha256,
        "pass_through": plan.pass_through,
        "calibration": _calibration(record.tokens),
        "summary": summarize(plan, results),
        "serving": serving_notes(plan, record.target),
        "warnings": list(plan.warnings),
        "tensors": {
            name: {
                "dtype": tensor.dtype, "shape": list(tensor.shape), "action": tensor.action,
                "class": tensor.tensor_class,
                "shard": tensor.shard, "sources": list(tensor.sources),
            }
            for name, tensor in plan.tensors.items()
        },
        "modules": [asdict(result) for result in results],
        "files": dict(sorted(sha256.items())),
    }  # fmt: skip


def printable(name: str) -> str:
    """A file name that UTF-8 can hold, whatever bytes the file system had."""
    return name.encode("utf-8", "backslashreplace").decode()


def package_versions() -> dict[str, str | None]:
    """Versions of the packages that the numbers depend on."""
    return {name: _version(name) for name in NUMERIC_PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package).split("+")[0]
    except PackageNotFoundError:
        return None


def _calibration(tokens: TokenSet | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    count, length = tokens.tokens_NS.shape
    return {
        "name": printable(tokens.title), "sha256": tokens.sha256, "rendered_sha256": tokens.rendered_sha256,
        "num_sequences": count,
        "num_sequences_asked": tokens.num_asked,
        "sequence_length": length, "num_tokens": tokens.num_tokens, "num_rows": tokens.num_rows,
    }  # fmt: skip


def summarize(plan: QuantPlan, results: list[ModuleResult]) -> dict[str, Any]:
    """The figures of the closing table."""
    packed = [tensor for tensor in plan.tensors.values() if tensor.action == "pack"]
    words = sum(math.prod(tensor.shape) for tensor in packed if tensor.name.endswith(".weight_packed"))
    weights = words * CODES_PER_WORD
    packed_bits = 8 * sum(tensor.nbytes for tensor in packed)
    measured = [result for result in results if result.relative_output_error is not None]
    worst = sorted(measured, key=lambda result: (-(result.relative_output_error or 0.0), result.name))[:5]
    experts = {result.name.rsplit(".", 1)[0]: result.num_tokens for result in results if result.num_tokens is not None}
    few = {name: tokens for name, tokens in experts.items() if tokens < FEW_TOKENS}
    return {
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "num_quantized_modules": len(results),
        "bits_per_weight": round(packed_bits / weights, 4) if weights else None,
        "mean_relative_weight_error": mean_of_known([result.relative_weight_error for result in results]),
        "mean_relative_output_error": mean_of_known([result.relative_output_error for result in measured]),
        "worst_modules": [
            {"name": r.name, "relative_output_error": r.relative_output_error, "num_tokens": r.num_tokens}
            for r in worst
        ],
        "num_experts": len(experts),
        "num_experts_below_64_tokens": len(few),
        "experts_with_fewest_tokens": dict(sorted(few.items(), key=lambda item: (item[1] or 0, item[0]))[:10]),
        "num_fallbacks": sum(result.outcome in FALLBACKS for result in results),
        "fallbacks": [{"name": r.name, "outcome": r.outcome} for r in results if r.outcome in FALLBACKS],
    }


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """To six digits; None where nothing was measured."""
    known = [value for value in values if value is not None]
    return round(mean(known), 6) if known else None
