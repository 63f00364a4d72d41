"""What a quantization run will need: disk, memory, time, and how thinly the calibration tokens are spread.

Memory is an estimate from the sizes of what `quantize/experts.py` and `calibration/forward.py` hold at once
(docs/plan.md lists the terms). Time is a stored measurement scaled by the number of expert matrices, for a model of
the same matrix sizes only; otherwise there is no figure.
"""

import json
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any, Literal

from kvq.calibration.batches import BATCH_TOKENS
from kvq.checkpoint.architecture import ModelFacts
from kvq.quantize.chunks import KEPT_BYTES, chunk_bytes_per_expert, experts_per_chunk
from kvq.recipes.plan import QuantPlan
from kvq.recipes.tally import Kind

PROFILES = resources.files("kvq.publish") / "profiles"
COMPUTE_BYTES = {"cpu": 4, "cuda": 2}
FLOAT_BYTES = 4
CODE_BYTES, SCALE_BYTES = 0.5, 2  # of a weight that is kept as its code, and of its group
BASE_BYTES = 10**9  # interpreter, torch and its libraries

DeviceType = Literal["cpu", "cuda"]


Phase = Literal["always", "forward", "solving", "output"]
SOLVED: tuple[Phase, ...] = ("solving", "output")


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """Something held at once with the others of its phase. `where`: `host` or `device`; on a CPU both are the host."""

    phase: Phase
    what: str
    where: Literal["host", "device"]
    nbytes: int


def memory_terms(plan: QuantPlan, after: list[Kind], device: DeviceType) -> list[MemoryTerm]:
    """What a rank holds while a layer runs, while its experts are solved and while their output is computed: the
    candidates for the peak of a run.

    Of several ranks the one that has most; a layer's own weights and the rest are held by each.
    """
    if plan.pass_through:
        return [MemoryTerm("always", "copying files", "host", BASE_BYTES)]
    facts, recipe = plan.facts, plan.recipe
    rows, hidden, width = 2 * facts.moe_intermediate_size, facts.hidden_size, COMPUTE_BYTES[device]
    experts = -(-facts.num_experts // plan.num_ranks)
    chunk = min(experts, experts_per_chunk(device, rows, hidden))
    everything = sum(kind.nbytes for kind in after if kind.tensor_class == "routed experts") // len(facts.moe_layers)
    packed = everything * experts // facts.num_experts
    solving = f"{chunk} experts being solved"
    terms = [
        MemoryTerm("always", "interpreter and libraries", "host", BASE_BYTES),
        MemoryTerm("solving", "packed experts of a layer", "host", packed),
        MemoryTerm("solving", solving, "device", chunk * chunk_bytes_per_expert(rows, hidden)),
    ]
    if not recipe.needs_calibration:
        return terms
    tokens, inner = _own_sequences(plan) * recipe.max_seq_length, facts.moe_intermediate_size
    inputs = tokens * hidden * width
    downs = (3 if recipe.drift_correction else 2) * experts * inner * inner * FLOAT_BYTES
    weight_bytes = CODE_BYTES + SCALE_BYTES / recipe.group_size if recipe.propagate_error else width
    held = int(experts * rows * hidden * weight_bytes)
    kept = min(KEPT_BYTES[device], tokens * int(facts.text_config["num_experts_per_tok"]) * inner * width)
    return [
        *terms,
        MemoryTerm("output", "packed experts of a layer", "host", packed),
        *(MemoryTerm(phase, "inputs of down that are kept", "device", kept) for phase in SOLVED if kept),
        MemoryTerm("always", "hidden states of all tokens", "host", inputs),
        MemoryTerm("always", "inputs of the experts", "device", inputs),
        MemoryTerm("forward", "the same while they are joined", "device", inputs),
        MemoryTerm("forward", "attention of a batch", "device", _attention_bytes(plan, device)),
        *(MemoryTerm(phase, "solved gate and up of all experts", "device", held) for phase in SOLVED),
        MemoryTerm("solving", "down Hessians, once more while summed, and drift", "device", downs),
        MemoryTerm("output", "solved down of all experts", "device", held // 2),
        MemoryTerm("output", "output of the experts, float32", "device", tokens * hidden * FLOAT_BYTES),
    ]


def _own_sequences(plan: QuantPlan) -> int:
    return -(-plan.recipe.num_calibration_samples // plan.num_ranks)


def _attention_bytes(plan: QuantPlan, device: DeviceType) -> int:
    """Scores of all heads and positions of a batch, and their softmax in float32."""
    length, heads = plan.recipe.max_seq_length, int(plan.facts.text_config["num_attention_heads"])
    sequences = min(_own_sequences(plan), max(1, BATCH_TOKENS[device] // length))
    return sequences * heads * length * length * (COMPUTE_BYTES[device] + FLOAT_BYTES)


def peak_bytes(terms: list[MemoryTerm], where: tuple[str, ...]) -> int:
    """The largest of the phases."""
    phases = [
        sum(term.nbytes for term in terms if term.where in where and term.phase in ("always", phase))
        for phase in ("forward", *SOLVED)
    ]
    return max(phases)


def calibration_tokens(plan: QuantPlan) -> int:
    """Tokens that the recipe asks for; the data may hold fewer."""
    return plan.recipe.num_calibration_samples * plan.recipe.max_seq_length


def coverage(plan: QuantPlan) -> dict[str, Any] | None:
    """Tokens that an expert sees if the router spread them evenly, which it never does; None without calibration."""
    if plan.pass_through or not plan.recipe.needs_calibration:
        return None
    facts = plan.facts
    tokens = calibration_tokens(plan)
    mean = tokens * int(facts.text_config["num_experts_per_tok"]) / facts.num_experts
    warning = None
    if mean < facts.hidden_size:
        warning = (
            f"thin: {mean:.0f} tokens an expert on average, fewer than the {facts.hidden_size} columns of its gate and "
            "up matrices, so its statistics lean on those of the whole layer. Raise num_calibration_samples or "
            "max_seq_length with --set."
        )
    return {"tokens": tokens, "mean_tokens_per_expert": round(mean, 1), "warning": warning}


def load_profiles() -> list[dict[str, Any]]:
    """Dated measurements that ship with kvq."""
    files = sorted((item for item in PROFILES.iterdir() if item.name.endswith(".json")), key=lambda item: item.name)
    return [
        {"profile": item.name.removesuffix(".json"), **json.loads(item.read_text(encoding="utf-8"))} for item in files
    ]


def estimated_time(plan: QuantPlan, device: DeviceType) -> dict[str, Any]:
    """`seconds` from the profile with these matrix sizes, this solver and device; None, and why, without one."""
    if plan.pass_through:
        return {"seconds": None, "profile": None, "note": "no solving: the time of copying the files"}
    if plan.num_ranks > 1:
        return {"seconds": None, "profile": None, "note": f"no profile: nobody has timed {plan.num_ranks} ranks"}
    wanted = profile_key(plan.facts, plan.recipe.solver, device)
    for profile in load_profiles():
        if tuple(profile[key] for key in PROFILE_KEYS) == wanted:
            seconds = profile["seconds"] * plan.num_modules / profile["num_modules"]
            note = (
                f"measured {profile['date']} on {profile['hardware']}: {profile['seconds']:.0f} s for "
                f"{profile['num_modules']} matrices with {profile['tokens']} tokens; scaled by the number of matrices"
            )
            if plan.recipe.needs_calibration and calibration_tokens(plan) != profile["tokens"]:
                note += f", not by the {calibration_tokens(plan)} tokens asked for"
            return {"seconds": round(seconds, 1), "profile": profile["profile"], "note": note}
    hidden, inner, solver, _ = wanted
    return {
        "seconds": None,
        "profile": None,
        "note": f"no profile for this size: nobody has timed {solver} on {device} with experts of {inner}x{hidden}",
    }


PROFILE_KEYS = ("hidden_size", "moe_intermediate_size", "solver", "device")


def profile_key(facts: ModelFacts, solver: str, device: str) -> tuple[int, int, str, str]:
    """What a measurement must share with a run to say anything about it."""
    return facts.hidden_size, facts.moe_intermediate_size, solver, device


def run_cost(
    plan: QuantPlan, after: list[Kind], device: DeviceType, output_bytes: int, source_bytes: int | None
) -> dict[str, Any]:
    """`source_bytes`: what a download would add to the disk; None where the source is there already.

    `host_bytes` is for all ranks on one host, `device_bytes` and the terms are for one rank.
    """
    terms = memory_terms(plan, after, device)
    host = peak_bytes(terms, ("host", "device") if device == "cpu" else ("host",))
    return {
        "device": device,
        "num_ranks": plan.num_ranks,
        "disk_bytes": output_bytes + (source_bytes or 0),
        "disk_output_bytes": output_bytes,
        "disk_source_bytes": source_bytes,
        "host_bytes": host * plan.num_ranks,
        "host_bytes_per_rank": host,
        "device_bytes": None if device == "cpu" else peak_bytes(terms, ("device",)),
        "memory_terms": [asdict(term) for term in terms],
        "time": estimated_time(plan, device),
        "calibration": coverage(plan),
    }
