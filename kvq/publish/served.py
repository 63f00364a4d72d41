"""A checkpoint as an engine will meet it: kvq's own output, the FP8 source of a prefill role, a native INT4 model."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvq.checkpoint.architecture import ModelFacts, model_facts
from kvq.checkpoint.formats import detect_format
from kvq.checkpoint.index import MANIFEST_NAME, expect_folder, load_index, load_json
from kvq.publish.parallel import GROUPS, Cut
from kvq.recipes.plan import QuantPlan
from kvq.recipes.tally import Kind, tally

Experts = Literal["INT4", "FP8", "BF16"]
# SGLang 0.5.23 parser/template_detection.py:_is_glm47: GLM-4.7 and GLM-5 write the name right behind the tag.
GLM47_CALL = re.compile(r"\{\{[-\s]*['\"]<tool_call>['\"]\s*[+~]\s*tc\.name")


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names of SGLang's parsers (function_call/function_call_parser.py, parser/reasoning_parser.py), or None."""

    tool_call: str | None
    reasoning: str | None


@dataclass(frozen=True, slots=True)
class Served:
    """`kinds` are the stored tensors; `name` is what clients will call the model."""

    name: str
    cut: Cut
    kinds: tuple[Kind, ...]
    experts: Experts
    template: str
    trust_remote_code: bool
    kv_scheme: bool = False

    @property
    def facts(self) -> ModelFacts:
        return self.cut.facts

    @property
    def has_mtp(self) -> bool:
        """Whether the draft layer that the config promises is stored."""
        return self.facts.num_mtp_layers > 0 and any(kind.mtp for kind in self.kinds)

    @property
    def draft_problem(self) -> str | None:
        """What keeps SGLang from running the draft layer. Its kernel for those of MLA and DSA models takes certain
        widths only, and the server ends when the draft layer first runs (0.5.17 and 0.5.23: models/deepseek_nextn.py,
        kernels/ops/layernorm/fused_eh_norm.py; seen on an H200 with 0.5.17)."""
        hidden = self.facts.hidden_size
        if not self.has_mtp:
            return "the checkpoint has none"
        if self.facts.arch.attention != "gqa" and not (256 < hidden <= 8192 and hidden % 256 == 0):
            return f"not used: SGLang's kernel wants a hidden size above 256, up to 8192, in 256s, and this is {hidden}"
        return None

    @property
    def parsers(self) -> Parsers:
        """By the model's family and, where one family has two formats, by its chat template."""
        thinks = "<think>" in self.template
        if self.facts.arch.title.startswith("GLM"):
            newer = GLM47_CALL.search(self.template) or (not self.template and self.facts.arch.attention == "dsa")
            return Parsers("glm47" if newer else "glm45", "glm45" if thinks or not self.template else None)
        if self.facts.arch.title.startswith("Kimi"):
            return Parsers("kimi_k2", "kimi_k2" if thinks else None)
        return Parsers(None, None)


def served_from_plan(plan: QuantPlan, kinds: list[Kind], source: Path, config: Mapping[str, Any], name: str) -> Served:
    """The output of a run that is about to be published; side files are the source's."""
    experts: Experts = "INT4"
    described = plan.quantization_config or {}
    scheme = described.get("kv_cache_scheme") is not None
    return Served(name, Cut.of(plan), tuple(kinds), experts, *_traits(source, config), scheme)


def served_from_folder(folder: Path) -> Served:
    """Any checkpoint folder that kvq reads. Raises CheckpointError for others."""
    expect_folder(folder)
    config = load_json(folder / "config.json")
    index = load_index(folder)
    facts, stored = model_facts(config, folder), detect_format(config, index)
    block = None if stored.block is None else stored.block[0]
    kinds = tuple(tally(index.tensors.values(), facts))
    rest_is_fp8 = any(kind.dtype == "F8_E4M3" and kind.tensor_class != "routed experts" for kind in kinds)
    if stored.kind == "int4-packed":
        experts: Experts = "INT4"
        step, step_name = int(stored.group_size or 1), GROUPS
    else:
        experts = "BF16" if stored.kind == "bf16" else "FP8"
        step, step_name = block or 1, "FP8 blocks"
    cut = Cut(facts, step, step_name, block if rest_is_fp8 else None)
    quantization = config.get("quantization_config") or {}
    scheme = isinstance(quantization, dict) and quantization.get("kv_cache_scheme") is not None
    return Served(_name_of(folder), cut, kinds, experts, *_traits(folder, config), scheme)


def _name_of(folder: Path) -> str:
    """As the run called it, where there is a manifest; else the folder's name."""
    path = folder / MANIFEST_NAME
    if path.exists():
        manifest = load_json(path)
        source, recipe = manifest.get("source"), manifest.get("recipe")
        if isinstance(source, dict) and isinstance(recipe, dict):
            return served_name(str(source.get("id")), str(recipe.get("name")))
    return folder.resolve().name


def served_name(source: str, recipe: str) -> str:
    """For example `GLM-5.2-FP8-int4`; depends on no path, so that the same run writes the same bytes."""
    name = f"{source.rstrip('/').rsplit('/', 1)[-1]}-{recipe}"
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _traits(folder: Path, config: Mapping[str, Any]) -> tuple[str, bool]:
    """Chat template, and whether the folder brings code of its own that config or tokenizer name."""
    path = folder / "tokenizer_config.json"
    tokenizer = load_json(path) if path.exists() else {}
    template: Any = tokenizer.get("chat_template") or ""
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    text = template if isinstance(template, str) else json.dumps(template)
    return text, bool(config.get("auto_map") or tokenizer.get("auto_map"))
