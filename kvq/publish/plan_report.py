"""Everything that `kvq plan` says, as plain data: classes, sizes to the byte, serving, cost of the run."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvq.checkpoint.header import file_bytes
from kvq.checkpoint.metadata import Metadata
from kvq.publish.run_cost import DeviceType, run_cost
from kvq.publish.serving import serving_notes
from kvq.publish.sizing import Deployment, combinations, serving_sizes
from kvq.recipes.plan import REASONS, QuantPlan
from kvq.recipes.tally import Kind, tally

CLASS_ORDER = tuple(REASONS)


def source_kinds(metadata: Metadata, plan: QuantPlan) -> list[Kind]:
    return tally(metadata.index.tensors.values(), plan.facts)


def output_kinds(plan: QuantPlan) -> list[Kind]:
    return tally(plan.tensors.values(), plan.facts)


def class_table(plan: QuantPlan, before: Sequence[Kind], after: Sequence[Kind]) -> list[dict[str, Any]]:
    """A row for each tensor class; `mtp_bytes` is the part that lies in multi-token-prediction layers."""
    rows = []
    for title in CLASS_ORDER:
        old, new = ([kind for kind in kinds if kind.tensor_class == title] for kinds in (before, after))
        if old or new:
            rows.append(
                {
                    "class": title,
                    "tensors": sum(kind.tensors for kind in old),
                    "output_tensors": sum(kind.tensors for kind in new),
                    "parameters": sum(kind.parameters for kind in old),
                    "source_dtypes": _bytes_by_dtype(old),
                    "source_bytes": sum(kind.nbytes for kind in old),
                    "output_dtypes": _bytes_by_dtype(new),
                    "output_bytes": sum(kind.nbytes for kind in new),
                    "mtp_bytes": sum(kind.nbytes for kind in new if kind.mtp),
                    "planned": _planned(plan, title, old, new),
                    "reason": REASONS[title],
                }
            )
    return rows


def _bytes_by_dtype(kinds: Iterable[Kind]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for kind in kinds:
        totals[kind.dtype] = totals.get(kind.dtype, 0) + kind.nbytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _planned(plan: QuantPlan, title: str, old: Sequence[Kind], new: Sequence[Kind]) -> str:
    if title == "routed experts" and not plan.pass_through:
        return f"INT4 g{plan.recipe.group_size}, {plan.recipe.solver}"
    changed = sum(kind.nbytes for kind in old) != sum(kind.nbytes for kind in new)
    return ("BF16" if plan.recipe.rest == "bf16" else "kept, FP8 indexer.wk to BF16") if changed else "kept"


def output_files(metadata: Metadata, plan: QuantPlan) -> dict[str, Any]:
    """Shards as they will be written. `file_bytes` counts their headers; None where the source's files are unknown."""
    shards = plan.shard_tensors()
    if not plan.pass_through:
        sizes = {
            shard: file_bytes((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
            for shard, tensors in shards.items()
        }
    elif metadata.origin == "facts":
        return {"shards": None, "tensor_bytes": plan.output_bytes, "file_bytes": None, "largest_shard_bytes": None}
    else:  # shards are copied; their layout was checked to fill the file
        sizes = {}
        for info in metadata.index.tensors.values():
            sizes[info.shard] = max(sizes.get(info.shard, 0), info.offset + info.nbytes)
    return {
        "shards": len(sizes),
        "tensor_bytes": plan.output_bytes,
        "file_bytes": sum(sizes.values()),
        "largest_shard_bytes": max(sizes.values()),
    }


def bits(plan: QuantPlan, after: Sequence[Kind]) -> dict[str, float]:
    """Bits per weight, scales included: of all tensors and of the routed experts."""
    experts = [kind for kind in after if kind.tensor_class == "routed experts"]
    return {
        name: round(8 * sum(kind.nbytes for kind in kinds) / max(1, sum(kind.parameters for kind in kinds)), 4)
        for name, kinds in (("all", after), ("routed_experts", experts))
    }


def plan_report(
    metadata: Metadata, plan: QuantPlan, deployment: Deployment, device: DeviceType, target: str
) -> dict[str, Any]:
    """One object, JSON-able, in the order in which it is shown."""
    before, after = source_kinds(metadata, plan), output_kinds(plan)
    files = output_files(metadata, plan)
    download = None if metadata.origin == "folder" else plan.source_bytes
    return {
        "model": metadata.id,
        "origin": metadata.origin,
        "revision": metadata.revision,
        "sources": list(metadata.sources),
        "title": plan.facts.arch.title,
        "model_type": plan.facts.arch.model_type,
        "source_format": plan.source.title,
        "recipe": plan.recipe.model_dump(mode="json"),
        "recipe_sha256": plan.recipe.sha256,
        "pass_through": plan.pass_through,
        "classes": class_table(plan, before, after),
        "source": {
            "tensors": len(metadata.index.tensors),
            "parameters": sum(kind.parameters for kind in before),
            "tensor_bytes": plan.source_bytes,
        },
        "output": {"tensors": len(plan.tensors), **files, "bits_per_weight": bits(plan, after)},
        "ranks": plan.rank_rows(),
        "serving": {
            **serving_sizes(plan, before, after, deployment),
            "notes": serving_notes(plan, target),
            "combinations": list(combinations(plan)),
        },
        "run": run_cost(plan, after, device, files["file_bytes"] or plan.output_bytes, download),
        "warnings": list(plan.warnings),
    }


def comparison_row(report: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a report that differ between recipes."""
    recipe, output, serving = report["recipe"], report["output"], report["serving"]
    return {
        "recipe": recipe["name"],
        "group_size": recipe["group_size"],
        "rest": recipe["rest"],
        "solver": recipe["solver"],
        "tensor_bytes": output["tensor_bytes"],
        "file_bytes": output["file_bytes"],
        "bits_per_weight": output["bits_per_weight"],
        "weights_per_gpu": serving["after"]["weights_per_gpu"],
        "kv": serving["after"]["kv"],
        "problems": serving["problems"],
        "tensor_parallel_sizes": serving["notes"]["tensor_parallel_sizes"],
        "host_bytes": report["run"]["host_bytes"],
        "device_bytes": report["run"]["device_bytes"],
    }
