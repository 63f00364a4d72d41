"""Recipes are strict, and their hash identifies a result."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from kvq.errors import RecipeError
from kvq.recipes.schema import Gates, Recipe, library_names, load_recipe, override

INT4_SHA256 = "4028974d24dd5530815d858906caf2df85162bec20f9fde5a46ea1c5dfa21d3d"

OTHER_VALUES: dict[str, Any] = {
    "name": "other", "solver": "rtn", "group_size": 64, "scale_search": "minmax", "actorder": None, "block_size": 64,
    "dampening_frac": 0.5, "dampening_steps": 8, "refinement_passes": 16, "hessian_blend_tokens": 1,
    "propagate_error": False, "max_fallback_frac": 0.5, "mtp": "rtn", "rest": "bf16", "num_calibration_samples": 8,
    "max_seq_length": 64, "hessian": "layer", "drift_correction": False, "drift_dampening_tokens": 8,
    "kv_scales": "calibrate", "sweep": "llmcompressor",
}  # fmt: skip
ONLY_VALUE = {"num_bits", "symmetric"}


def write_recipe(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def refused(place: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(place)
    assert place in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


# The library.


def test_library_is_what_the_manual_says() -> None:
    assert library_names() == ["int4", "int4-awq", "int4-g32", "int4-g64", "int4-rtn"]


@pytest.mark.parametrize("name", library_names())
def test_name_equals_the_file_name(name: str) -> None:
    assert load_recipe(name).name == name


def test_library_recipes_do_what_their_names_say() -> None:
    assert [load_recipe(name).group_size for name in library_names()] == [128, 128, 32, 64, 128]
    assert [load_recipe(name).needs_calibration for name in library_names()] == [True, True, True, True, False]
    assert load_recipe("int4-rtn").mtp == "rtn"


def test_library_wins_over_a_file_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("int4").write_text("name: impostor\n")
    assert load_recipe("int4").name == "int4"


def test_unknown_recipe_names_the_library(tmp_path: Path) -> None:
    assert "no such recipe or file. The library has int4, int4-awq, int4-g32" in refused("int5")
    assert "no such recipe or file" in refused(str(tmp_path))


def test_recipe_from_a_file(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, "name: mine\ngroup_size: 64\ndampening_frac: 5e-2\n"))
    assert recipe == Recipe(name="mine", group_size=64, dampening_frac=0.05)


# Strictness.


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "groupsize: 64",
            "groupsize: there is no such field; there are name, solver, num_bits, group_size, symmetric,",
        ),
        ("gates: {max_kl: 1}", "gates.max_kl: there is no such field; there are max_mean_kl, min_same_top, max_ppl_"),
        ("group_size: 48", "group_size: Input should be 32, 64 or 128 (found 48)"),
        ("group_size: '64'", "group_size: Input should be 32, 64 or 128 (found '64')"),
        ("num_bits: 8", "num_bits: Input should be 4"),
        ("symmetric: false", "symmetric: Input should be True"),
        ("solver: best", "solver: Input should be 'gptq', 'awq' or 'rtn'"),
        ("actorder: group", "actorder: Input should be 'static'"),
        ("dampening_frac: 0", "dampening_frac: Input should be greater than or equal to 0.000000001"),
        ("dampening_frac: 1.0e-300", "dampening_frac: Input should be greater than or equal to 0.000000001"),
        ("hessian_blend_tokens: 1.0e+308", "hessian_blend_tokens: Input should be less than or equal to 1000000000"),
        ("drift_dampening_tokens: 1.0e+308", "drift_dampening_tokens: Input should be less than or equal to 10000000"),
        ("num_calibration_samples: 99999999999999999999", "Input should be less than or equal to 10000000"),
        ("max_seq_length: 10000001", "max_seq_length: Input should be less than or equal to 10000000"),
        ("gates: {max_mean_kl: 1.0e+308}", "max_mean_kl: Input should be less than or equal to 1000000"),
        ("gates: {max_ppl_ratio: 1.0e+308}", "max_ppl_ratio: Input should be less than or equal to 1000000"),
        ("gates: {min_recovery: {gsm8k: 1.0e+308}}", "min_recovery.gsm8k: Input should be less than or equal to 1000"),
        ("dampening_frac: .nan", "dampening_frac: Input should be a finite number"),
        ("hessian_blend_tokens: .inf", "hessian_blend_tokens: Input should be a finite number"),
        ("dampening_steps: 1.5", "dampening_steps: Input should be a valid integer"),
        ("max_fallback_frac: 1.01", "max_fallback_frac: Input should be less than or equal to 1"),
        ("num_calibration_samples: 0", "num_calibration_samples: Input should be greater than or equal to 1"),
        ("max_seq_length: 7", "max_seq_length: Input should be greater than or equal to 8"),
        ("rest: fp8", "rest: Input should be 'keep' or 'bf16'"),
        ("solver: null", "solver: Input should be 'gptq', 'awq' or 'rtn'"),
        ("1: 2", "1: Keys should be strings"),
    ],
)
def test_unknown_field_and_wrong_value_are_named(tmp_path: Path, line: str, expected: str) -> None:
    assert expected in refused(write_recipe(tmp_path, f"name: mine\n{line}\n"))


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "-x", "a b", "a\\nb"])
def test_name_must_do_as_part_of_a_folder_name(tmp_path: Path, name: str) -> None:
    assert "name: String should match pattern" in refused(write_recipe(tmp_path, f'name: "{name}"\n'))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("group_size: 64", "name: Field required"),
        ("", "expected a mapping of recipe fields, found NoneType"),
        ("- name", "expected a mapping of recipe fields, found list"),
        ("name: [", "not valid YAML"),
        ("name: !!python/object:os.system x", "not valid YAML"),
        ("name: 2024-99-99", "not valid YAML"),
        ("[" * 2_000, "not valid YAML"),
    ],
)
def test_text_that_is_no_recipe(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refused(write_recipe(tmp_path, text))


def test_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"name: \xff\xfe")
    assert "cannot be read" in refused(str(tmp_path / "mine.yaml"))


def test_recipe_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_recipe("int4").group_size = 64


@pytest.mark.parametrize("schema", [Recipe, Gates])
def test_every_number_has_bounds(schema: type[BaseModel]) -> None:
    """A value that no run can use is refused before the run, not by an overflow in it."""
    for name, field in schema.model_json_schema()["properties"].items():
        for part in [field, *field.get("anyOf", ()), field.get("additionalProperties", {})]:
            if isinstance(part, dict) and part.get("type") in ("number", "integer") and "const" not in part:
                assert "enum" in part or ({"minimum", "exclusiveMinimum"} & part.keys() and "maximum" in part), name


def test_every_field_is_documented() -> None:
    assert [name for name, field in Recipe.model_fields.items() if not field.description] == []


# The hash.


def test_hash_of_int4_is_pinned() -> None:
    assert load_recipe("int4").sha256 == INT4_SHA256


def test_hash_changes_with_every_field() -> None:
    judges_only = {"gates"}  # tests/verify/test_gates.py
    assert set(OTHER_VALUES) | ONLY_VALUE | judges_only == set(Recipe.model_fields)
    base = load_recipe("int4")
    hashes = {Recipe.model_validate({**base.model_dump(), key: value}).sha256 for key, value in OTHER_VALUES.items()}
    assert len(hashes | {base.sha256}) == len(OTHER_VALUES) + 1


def test_hash_does_not_depend_on_how_values_are_written(tmp_path: Path) -> None:
    text = "hessian_blend_tokens: 64\ndampening_frac: 5.0e-2\ngroup_size: 128\nname: x\n"
    expected = Recipe(name="x", dampening_frac=0.05, hessian_blend_tokens=64.0).sha256
    assert load_recipe(write_recipe(tmp_path, text)).sha256 == expected
    recipe = load_recipe("int4")
    assert Recipe.model_validate(recipe.model_dump(mode="json")).sha256 == recipe.sha256


# Changes from the command line.


def test_override_marks_the_name() -> None:
    changed = override(load_recipe("int4"), ["group_size=64", "actorder=null", "dampening_frac=5e-1"])
    assert (changed.name, changed.group_size, changed.actorder) == ("int4-modified", 64, None)
    assert changed.dampening_frac == 0.5 and changed.sha256 != load_recipe("int4").sha256


def test_override_of_a_changed_recipe_is_marked_once() -> None:
    changed = override(override(load_recipe("int4"), ["group_size=64"]), ["group_size=32"])
    assert changed.name == "int4-modified"


@pytest.mark.parametrize("settings", [[], ["group_size=128"], ["dampening_frac=5e-2", "hessian_blend_tokens=64"]])
def test_override_that_changes_nothing_keeps_the_name(settings: list[str]) -> None:
    recipe = Recipe(name="x", dampening_frac=0.05, hessian_blend_tokens=64)
    assert override(recipe, settings) == recipe


def test_last_setting_counts() -> None:
    assert override(load_recipe("int4"), ["group_size=32", "group_size=64"]).group_size == 64


@pytest.mark.parametrize("setting", ["group_size", "groupsize=64", "name=x", "", "=64", "group-size=64"])
def test_setting_of_no_field_names_the_fields(setting: str) -> None:
    with pytest.raises(RecipeError, match="expected key=value with one of solver, num_bits, group_size"):
        override(load_recipe("int4"), [setting])


@pytest.mark.parametrize("setting", ["group_size=[", "group_size=2024-99-99", "group_size=!!python/name:os x"])
def test_setting_that_is_no_yaml(setting: str) -> None:
    with pytest.raises(RecipeError, match="is not a YAML value"):
        override(load_recipe("int4"), [setting])


@pytest.mark.parametrize("setting", ["group_size=48", "solver=best", "symmetric=false", "num_bits=3", "rest="])
def test_setting_with_a_wrong_value(setting: str) -> None:
    with pytest.raises(RecipeError, match=f"--set: {setting.partition('=')[0]}: Input should be"):
        override(load_recipe("int4"), [setting])


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("num_calibration_samples=true", "a valid integer (found True)"),
        ("num_calibration_samples=5.0", "a valid integer (found 5.0)"),
        ("num_calibration_samples='5'", "a valid integer (found '5')"),
        ("propagate_error=1", "a valid boolean (found 1)"),
        ("group_size=32.0", "expected a whole number (found 32.0)"),
        ("num_bits=4.0", "expected a whole number"),
        ("symmetric=1", "expected true"),
        ("dampening_frac=1e999", "finite number"),
        ("dampening_frac='0.1'", "a valid number"),
    ],
)
def test_values_must_be_of_their_own_type(setting: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        override(load_recipe("int4"), [setting])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "name: a\nname: b\n", "name: a\nsolver: gptq\nsolver: rtn\n", "name: &a a\n", "name: a\nsolver: *a\n",
        "name: !!python/object:os.system ls\n", "name: !!bool x\n", "name: a\n<<: {solver: rtn}\n",
        "name: 2001-99-99\n", "name: 0b_\n", "a: &a [x]\nb: &b [*a, *a]\nname: *b\n", "name: a\n#" + "x" * 70_000,
    ],
)  # fmt: skip
def test_recipe_files_are_plain_yaml(tmp_path: Path, text: str) -> None:
    """No name twice, and no alias, which a few lines of could stand for a billion values."""
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"r\.yaml"):
        load_recipe(str(tmp_path / "r.yaml"))
