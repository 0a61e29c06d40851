"""The table of docs/export.md: what engines read, of what schemes declare and of what vLLM made of the files.

``PYTHONPATH=tests python tests/engines/engines_table.py`` brings the page up to date.
"""

from __future__ import annotations

from pathlib import Path

import served
from served import MODELS, Served

import lpq
from lpq.engines.layouts import layout_named, schemes_for, summaries
from lpq.registry import Group, Inputs, LayoutError, Scheme

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
BEGIN, END = "<!-- made by tests/engines/engines_table.py -->\n\n", "\n<!-- until here -->"
RECIPES = ("fp8-current", "fp8-row", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "nvfp4-row-fwd-mxfp8-bwd")
BY_TESTS, BY_SOURCE = {"transformers": "5.24"}, {"SGLang": "0.5.23", "TensorRT-LLM": "1.2"}
"""The versions of other programs: those that tests run, and those that were read."""


def scheme_of(recipe: str, layout: str) -> Scheme | None:
    """The scheme by which weights of a recipe are written."""
    side = lpq.recipe(recipe).w.side("row")
    found = next((scheme for scheme in schemes_for(side, layout) if scheme.serves(side)), None)
    return found if found is not None and found.unwritten is None else None


def ways(recipe: str, layout: str) -> list[Group]:
    """How layers with a recipe lie: as they are, and with scales of inputs."""
    scheme, x = scheme_of(recipe, layout), lpq.recipe(recipe).x.side("row")
    if scheme is None:
        return []
    fitting = [one for one in scheme.inputs if one.serves(x)]
    measured = next((one for one in fitting if one.part is None), None)
    found: list[Inputs | None] = [measured, *(one for one in fitting if one.part is not None)]
    groups = [Group(scheme, inputs, ("layer",)) for inputs in found]
    return [group for group in groups if _described(layout, group)]


def _described(layout: str, group: Group) -> bool:
    try:
        layout_named(layout).files([group], [])
    except LayoutError:
        return False
    return True


def rows() -> list[list[str]]:
    """One for each way; recipes that lie alike share it."""
    kept = served.results()
    outcomes = {Served(*(one[key] for key in ("model", "layout", "weights", "inputs"))): one for one in kept["cases"]}
    found: dict[tuple[str, ...], list[str]] = {}
    for layout in summaries():
        for recipe in RECIPES:
            for group in ways(recipe, layout):
                scheme, inputs = group.scheme, group.inputs
                text = "bf16" if inputs is None else inputs.quantizer
                theirs = [outcomes[Served(model, layout, scheme.quantizer, text)]["outcome"] for model in MODELS]
                experts = {name: ", no experts" if name in group.not_experts else "" for name in BY_TESTS}
                tested = [f"read{experts[name]}" if name in group.readers else "no" for name in BY_TESTS]
                said = ["by its source" if name in group.readers else "no" for name in BY_SOURCE]
                how = "bf16" if inputs is None else "scales in files" if inputs.part else "measured"
                found.setdefault((f"`{layout}`", how, *theirs, *tested, *said, str(scheme.quantizer)), []).append(
                    recipe
                )
    return [[key[0], ", ".join(f"`{name}`" for name in recipes), *key[1:-1]] for key, recipes in found.items()]


def table() -> str:
    kept = served.results()
    engine = f"{kept['engine']} {kept['version']}"
    others = [f"{name} {version}" for name, version in (BY_TESTS | BY_SOURCE).items()]
    head = ["layout", "recipe", "inputs", f"{engine}, dense layers", f"{engine}, experts", *others]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows()))


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, PAGE
    assert end, PAGE
    PAGE.write_text(before + begin + table() + end + after, encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
