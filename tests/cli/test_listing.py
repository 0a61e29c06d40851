"""``lpq formats``, ``recipes``, ``plugins``: what is installed is listed, and what is broken is explained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lpq import registry
from lpq.cli.listing import predicted_gains
from lpq.registry import shipped

BROKEN = "import a_library_that_is_not_there\n"
GOOD = """
    from lpq.registry import FormatSpec, RecipeSpec, hookimpl

    @hookimpl
    def lpq_register_formats():
        return FormatSpec(name="tiny", summary="a [bold] format", effective_bits=3.5,
                          quantizer="a:B", storage="a:C")

    @hookimpl
    def lpq_register_recipes():
        return RecipeSpec(name="tiny-all", summary="tiny everywhere", recipe={"fprop": {"x": "tiny"}})
"""


@pytest.mark.parametrize("command", ["formats", "recipes", "plugins"])
def test_everything_is_listed_as_a_table_and_as_json(command: str, lpq: Callable) -> None:
    names = {
        "formats": set(registry.formats()),
        "recipes": {*registry.recipes(), *shipped.policies()},
        "plugins": {p.name for p in registry.plugins()},
    }[command]
    table = lpq(command)
    assert (table.status, table.err) == (0, "")
    assert names <= set(table.out.split())
    listed = lpq(command, "--json")
    assert (listed.status, listed.err) == (0, "")
    assert {entry["name"] for entry in json.loads(listed.out)} == names
    if command == "recipes":
        assert {entry["name"] for entry in json.loads(listed.out) if entry["kind"] == "policy"} == {*shipped.policies()}


@pytest.mark.parametrize(("gpu", "second"), [("h100", "fp8-delayed"), ("B200", "nvfp4")])
def test_recipes_are_ordered_for_a_gpu(gpu: str, second: str, lpq: Callable) -> None:
    """The recipe to begin with, then others by the numbers of ``lpq advise``; the same are listed as without."""
    listed, plain = (json.loads(lpq("recipes", *more, "--json").out) for more in (("--for", gpu), ()))
    gains, of_policies = ([entry["gain"] for entry in listed if entry["kind"] == kind] for kind in ("recipe", "policy"))
    assert gains[1:] == sorted(gains[1:], reverse=True)
    assert listed[0]["name"] == "fp8-current"
    assert listed[1]["name"].startswith(second)
    assert gains[1] > gains[0] > 1 > gains[-1]
    assert of_policies == sorted(of_policies, reverse=True)
    assert {entry["name"] for entry in listed} == {entry["name"] for entry in plain}
    assert all(entry["gain"] is None for entry in plain)
    ended = lpq("recipes", "--for", gpu)
    assert f"{gains[0]:.2f}" in ended.out.splitlines()[4]
    assert "is predicted to be" in ended.out
    assert "gain of a policy" in ended.out
    assert "is predicted to be" not in lpq("recipes").out


def test_a_policy_gains_what_its_layers_gain_over_a_run() -> None:
    """Of 32 blocks, 30 are in FP8 and two are not; of the steps of the late switch, 82 % have forward in NVFP4."""
    half = "fprop=bf16, dgrad=nvfp4, wgrad=nvfp4"
    gains, *_ = predicted_gains(["fp8-current", "nvfp4", half], ["fp8-current-edges-bf16", "nvfp4-late-switch"], "b200")
    assert 1 / gains["fp8-current-edges-bf16"] == pytest.approx(30 / 32 / gains["fp8-current"] + 2 / 32)
    assert 1 / gains["nvfp4-late-switch"] == pytest.approx(0.82 / gains["nvfp4"] + 0.18 / gains[half])


def test_what_was_compared_with_no_measured_layer_is_told() -> None:
    names = ["mxfp8", "mxfp8-one-copy", "nvfp4", "nvfp4-eden"]
    *_, words = predicted_gains(names, ["nvfp4-late-switch", "nvfp4-pretrain"], "h100")
    assert " mxfp8-one-copy, nvfp4-eden, nvfp4-pretrain: predicted from counts of bytes and operations" in words
    *_, words = predicted_gains(["mxfp8", "nvfp4"], ["nvfp4-late-switch"], "h100")
    assert "no such layer was measured" not in words


def test_a_gpu_that_nobody_knows_orders_nothing(lpq: Callable) -> None:
    ended = lpq("recipes", "--for", "h10")
    assert (ended.status, ended.out) == (2, "")
    assert "--for h10: did you mean 'h100'" in ended.err


def test_what_is_said_of_a_format(lpq: Callable) -> None:
    found = {entry["name"]: entry for entry in json.loads(lpq("formats", "--json").out)}
    assert found["nvfp4"]["effective_bits"] == 4.5
    assert found["hybrid"]["effective_bits"] is None
    assert found["nvfp4"]["distribution"] == found["nvfp4"]["plugin"].replace("nvfp4", "lpq")
    line = next(line for line in lpq("formats").out.splitlines() if line.split()[:1] == ["mxfp8"])
    assert "8.25" in line


def test_a_third_party_is_listed_and_its_words_are_no_markup(install: Callable, lpq: Callable) -> None:
    install("tiny", "2.0", GOOD)
    line = next(line for line in lpq("formats").out.splitlines() if line.split()[:1] == ["tiny"])
    assert "a [bold] format" in line
    assert "lpq-tiny 2.0" in line
    recipe = next(r for r in json.loads(lpq("recipes", "--json").out) if r["name"] == "tiny-all")
    assert recipe["recipe"] == {"fprop": {"x": "tiny"}}


@pytest.mark.parametrize("command", ["formats", "recipes", "plugins"])
def test_a_broken_plugin_is_explained_and_breaks_nothing_else(command: str, install: Callable, lpq: Callable) -> None:
    before = json.loads(lpq(command, "--json").out)
    install("sad", "1.3", BROKEN)
    after = lpq(command, "--json")
    assert after.status == 0
    entries = [e for e in json.loads(after.out) if e["name"] != "sad"]
    assert entries == before
    if command != "plugins":
        for word in ("sad", "lpq-sad", "1.3", "a_library_that_is_not_there", "pip install"):
            assert word in after.err
    table = lpq(command)
    for word in ("sad", "lpq-sad", "1.3", "a_library_that_is_not_there", "pip install"):
        assert word in table.err


def test_the_plugin_list_has_cause_and_remedy(install: Callable, lpq: Callable) -> None:
    install("sad", "1.3", BROKEN)
    found = {entry["name"]: entry for entry in json.loads(lpq("plugins", "--json").out)}
    assert found["sad"]["status"] == "broken"
    assert "a_library_that_is_not_there" in found["sad"]["cause"]
    assert "pip install" in found["sad"]["remedy"]
    assert found["fp8"]["status"] == "ok"
    assert found["fp8"]["cause"] is None
    assert found["fp8"]["builtin"]
    assert not found["sad"]["builtin"]


def test_a_hidden_plugin_is_listed_as_hidden(install: Callable, lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    install("tiny", "2.0", GOOD)
    monkeypatch.setenv("LPQ_LOAD_PLUGINS", "")
    registry.refresh()
    found = {entry["name"]: entry for entry in json.loads(lpq("plugins", "--json").out)}
    assert found["tiny"]["status"] == "hidden"
    assert "tiny" not in {entry["name"] for entry in json.loads(lpq("formats", "--json").out)}


def test_listing_imports_no_torch() -> None:
    assert "torch" not in imported_by(["formats"], ["recipes"], ["plugins"], ["--help"], ["--version"])


def test_it_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in, as torch itself takes seconds."""
    (tmp_path / "torch.py").write_text("import noticed\nraise SystemExit\n")
    (tmp_path / "noticed.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert "noticed" in imported_by(["explain", "mxfp8"])


def imported_by(*commands: list[str]) -> set[str]:
    """The modules that are imported once ``lpq`` has run with each of these arguments, in a fresh process."""
    code = f"""
import sys
from lpq.__main__ import main
for arguments in {commands!r}:
    try:
        main(arguments)
    except SystemExit as ended:
        assert not ended.code
print("\\n", *sorted(name for name in sys.modules if "." not in name))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


TIDY = """
    from lpq.registry import RecipeSpec, hookimpl

    class Odd:
        def __str__(self):
            return "an odd thing"

    @hookimpl
    def lpq_register_recipes():
        recipes = {"tidy": "mxfp8", "tidy-sad": "fprop=sad, dgrad=bf16, wgrad=bf16", "tidy-odd": {"fprop": Odd()}}
        return [RecipeSpec(name=name, summary=f"[{name}]", recipe=recipe) for name, recipe in recipes.items()]
"""


def test_a_recipe_that_cannot_be_built_is_marked_and_the_others_are_not(install: Callable, lpq: Callable) -> None:
    before = json.loads(lpq("recipes", "--json").out)
    assert {recipe["broken"] for recipe in before} == {None}
    assert "what is wrong" not in lpq("recipes").out
    install("tidy", "1.0", TIDY)
    install("sad", "1.3", BROKEN)
    listed = lpq("recipes", "--json")
    assert listed.status == 0
    found = {recipe["name"]: recipe for recipe in json.loads(listed.out)}
    assert [recipe for name, recipe in found.items() if not name.startswith("tidy")] == before
    assert found["tidy"]["broken"] is None
    for words in (
        "recipe tidy-sad of plugin tidy (lpq-tidy 1.0) cannot be built: fprop: plugin sad (lpq-sad 1.3)",
        "emedy",
    ):
        assert words in found["tidy-sad"]["broken"]
    assert "expected the name of a recipe or a quantizer" in found["tidy-odd"]["broken"]
    assert found["tidy-odd"]["recipe"] == {"fprop": "an odd thing"}
    table = lpq("recipes")
    assert table.status == 0
    assert table.out.count("cannot be built") == 2
    assert "[tidy-sad]" in table.out


def test_it_is_what_the_doctor_says(install: Callable, lpq: Callable) -> None:
    install("tidy", "1.0", TIDY)
    told = {recipe["name"]: recipe["broken"] for recipe in json.loads(lpq("recipes", "--json").out) if recipe["broken"]}
    ended = lpq("doctor", "--device", "cpu", "--json")
    assert ended.status == 1
    assert json.loads(ended.out)["broken_recipes"] == told


def test_recipes_of_lpq_are_tried_where_one_of_its_plugins_is_out_of_order(
    lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lpq.registry import loader
    from lpq.registry import registry as loading

    real = loader.load

    def load(source, manager):
        if source.name == "nvfp4":
            raise source.error("its file is damaged", "install lpq again")
        return real(source, manager)

    monkeypatch.setattr(loading, "load", load)
    registry.refresh()
    assert next(plugin for plugin in registry.plugins() if plugin.name == "nvfp4").error is not None
    found = {recipe["name"]: recipe["broken"] for recipe in json.loads(lpq("recipes", "--json").out)}
    monkeypatch.undo()
    registry.refresh()
    assert found["mxfp8"] is None
    assert "its file is damaged" in found["mxfp8-fwd-nvfp4-bwd"]
