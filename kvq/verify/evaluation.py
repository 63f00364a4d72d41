"""`kvq evaluate`: the distance of a checkpoint from its source, where it comes from, and what an FP8 KV cache adds.

Shape suffixes: N = sequences, S = tokens, H = hidden size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq.calibration.forward import ModelRunner
from kvq.checkpoint.reader import CheckpointReader
from kvq.errors import RecipeError, VerificationError
from kvq.verify.base_logits import fingerprint, open_base, save_base
from kvq.verify.damage import LayerDamage, damage_report
from kvq.verify.documents import Cut, EvaluationSet, load_evaluation_set
from kvq.verify.figures import Figures, by_position, summarize
from kvq.verify.kv_simulation import KvSimulation, SimulatedDtype, make_simulation
from kvq.verify.logits import Head, HiddenRows, Positions, compare_group
from kvq.verify.streaming import Stage, StreamedModel, final_hidden, run_both
from kvq.verify.structure import load_manifest


@dataclass(frozen=True, slots=True)
class Request:
    """What to compare, and how. `base_logits` spares the source's run, and with it goes the report of damage."""

    folder: Path
    source: Path
    source_id: str
    data: Sequence[Path]
    cut: Cut
    kv_dtype: SimulatedDtype | None = None
    kv_scales: Path | None = None
    base_logits: Path | None = None
    save_base_logits: Path | None = None
    damage: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """`distance`, `damage` and `kv` are the contents of the report files; docs/reports.md has their fields."""

    figures: Figures
    distance: dict[str, Any]
    damage: dict[str, Any] | None
    kv: list[dict[str, Any]] | None


def evaluate_checkpoint(request: Request, device: torch.device, stage: Stage) -> Evaluation:
    """Compare two checkpoint folders. Raises RecipeError for a request that makes no sense, and the errors of
    `load_evaluation_set`, `open_base`, `save_base` and `ModelRunner`."""
    _refuse_inside(request.save_base_logits, (request.source, request.folder))
    base, other = (ModelRunner(CheckpointReader(folder), device) for folder in (request.source, request.folder))
    expect_comparable(base, other)
    kv = make_simulation(request.kv_dtype, request.kv_scales, other.facts) if request.kv_dtype else None
    vocab_size = int(base.facts.text_config["vocab_size"])
    data = load_evaluation_set(request.source, request.folder, vocab_size, request.data, request.cut)
    damage: list[LayerDamage] | None = [] if request.damage and request.base_logits is None else None
    with _hidden_states(request, (base, other), data, (kv, damage), stage) as (base_hidden, other_hidden):
        stage("comparing")
        heads = Head(base.lm_head(), str(request.source)), Head(other.lm_head(), str(request.folder))
        parts = [
            compare_group(group, (ours, theirs), heads, len(data.documents))
            for group, ours, theirs in zip(data.groups(), base_hidden, other_hidden, strict=True)
        ]
    documents, long = _split(data, parts)
    figures, manifest = summarize(documents), load_manifest(request.folder) or {}
    distance = {
        **_described(request, base, other, manifest),
        "data": [file.as_dict() for file in data.files],
        "notes": [*_other_source(manifest, base), *data.notes],
        "figures": figures.as_dict(),
        "domains": _domains(data, documents),
        "positions": by_position(documents),
        "long_context": None if long is None else _long_context(data, long),
    }
    report = damage_report(damage) if damage is not None else None
    return Evaluation(figures, distance, report, kv.rows() if kv is not None else None)


def _refuse_inside(file: Path | None, checkpoints: Sequence[Path]) -> None:
    """Raise RecipeError for a file of kept states that would lie among a checkpoint's shards and be read as one."""
    for folder in checkpoints:
        if file is not None and file.resolve().is_relative_to(folder.resolve()):
            raise RecipeError(f"--save-base-logits {file}: lies inside the checkpoint {folder}. Choose another place.")


def expect_comparable(base: ModelRunner, other: ModelRunner) -> None:
    """Two forms of one model, the quantized one second. Raises VerificationError."""
    sizes = [int(runner.facts.text_config["vocab_size"]) for runner in (other, base)]
    if sizes[0] != sizes[1]:
        raise VerificationError(
            f"{other.reader.folder} and {base.reader.folder} have vocabularies of different size ({sizes[0]} and "
            f"{sizes[1]}); they cannot be compared."
        )
    ours, theirs = ((r.facts.arch.model_type, r.facts.num_layers, r.facts.hidden_size) for r in (other, base))
    if ours != theirs:
        raise VerificationError(
            f"{other.reader.folder} {ours} and {base.reader.folder} {theirs} are not forms of one model "
            "(model_type, layers, hidden size)."
        )
    if base.source.kind == "int4-packed" and other.source.kind != "int4-packed":
        raise VerificationError(
            f"{base.reader.folder} is quantized and {other.reader.folder} is not: "
            "are the folder and --source exchanged?"
        )


@contextmanager
def _hidden_states(
    request: Request,
    runners: tuple[ModelRunner, ModelRunner],
    data: EvaluationSet,
    watch: tuple[KvSimulation | None, list[LayerDamage] | None],
    stage: Stage,
) -> Iterator[tuple[Sequence[HiddenRows], Sequence[HiddenRows]]]:
    """Final hidden states of both models; the base's from a file where there is one."""
    base, other = runners
    kv, damage = watch
    groups = [group.tokens_NS for group in data.groups()]
    depends_on = fingerprint(base, data) if request.base_logits or request.save_base_logits else {}
    if request.base_logits is not None:
        with open_base(request.base_logits, depends_on, len(groups)) as kept:
            yield kept, _flat(final_hidden(other, groups, stage, kv))
        return
    first, second = StreamedModel.begin(base, groups), StreamedModel.begin(other, groups, kv)
    run_both(first, second, damage, stage)
    base_hidden = first.finish()
    if request.save_base_logits is not None:
        save_base(request.save_base_logits, base_hidden, depends_on)
    yield _flat(base_hidden), _flat(second.finish())


def _flat(hidden: Sequence[Tensor]) -> list[Tensor]:
    return [hidden_NSH.flatten(0, 1) for hidden_NSH in hidden]


def _split(data: EvaluationSet, parts: list[Positions]) -> tuple[Positions, Positions | None]:
    """Positions of documents, and of long sequences."""
    if data.long_NS is None:
        return Positions.join(parts), None
    return Positions.join(parts[:-1]), parts[-1]


def _domains(data: EvaluationSet, positions: Positions) -> dict[str, Any]:
    """Figures of every domain, in the order of the data."""
    names = list(dict.fromkeys(document.domain for document in data.documents))
    domain_D = torch.tensor([names.index(document.domain) for document in data.documents])
    found = domain_D[positions.document_P]
    return {name: summarize(positions.pick(found == number)).as_dict() for number, name in enumerate(names)}


def _long_context(data: EvaluationSet, positions: Positions) -> dict[str, Any]:
    assert data.long_NS is not None
    count, length = data.long_NS.shape
    figures = summarize(positions).as_dict()
    return {"num_sequences": count, "length": length, "figures": figures, "positions": by_position(positions)}


def _other_source(manifest: Mapping[str, Any], base: ModelRunner) -> list[str]:
    """A sentence where the checkpoint was made from something else than what it is compared with: the distance may be
    meant to another form of the model, but no reader should take it for the one that the manifest names."""
    recorded = manifest.get("source")
    if not isinstance(recorded, dict):
        return []
    named, found = (recorded.get("format"), recorded.get("bytes")), (base.source.title, base.reader.index.total_bytes)
    if named == found:
        return []
    return [
        f"compared with a model in {found[0]} of {found[1]} bytes; the manifest says that this one was made from "
        f"{named[0]} of {named[1]} bytes"
    ]


def _recipe(manifest: Mapping[str, Any]) -> dict[str, str | None]:
    """Name and hash of the recipe that made a checkpoint, if kvq did."""
    recipe = manifest.get("recipe")
    name = recipe.get("name") if isinstance(recipe, dict) else None
    return {"recipe": name, "recipe_sha256": manifest.get("recipe_sha256")}


def _described(request: Request, base: ModelRunner, other: ModelRunner, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Both models and the settings, without the paths of this machine."""
    return {
        "source": {"id": request.source_id, "format": base.source.title, "model_type": base.facts.arch.model_type},
        "checkpoint": {
            "format": other.source.title, "is_source": request.folder.samefile(request.source),
            **_recipe(manifest),
        },
        "settings": {
            "max_rows": request.cut.max_rows, "max_seq_length": request.cut.max_seq_length,
            "long_context": request.cut.long_context, "kv_dtype": request.kv_dtype,
            "kv_scales": request.kv_scales.name if request.kv_scales else None,
            "base_logits": request.base_logits.name if request.base_logits else None,
            "device": base.device.type, "dtype": str(base.dtype).removeprefix("torch."),
        },
    }  # fmt: skip
