"""The page on the design has the floors, operations, hooks and attributes that the code has."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from snippets import ROOT
from test_house import BESIDE, FLOORS, files, parsed
from torch import nn

import lpq
import lpq.operations.operators
from lpq.registry import hookspecs
from lpq.registry.operations import TABLE

PAGE = (ROOT / "docs" / "design.md").read_text()
NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
"""The numbers in words."""


def told(pattern: str) -> int:
    """The number in the sentence that this pattern finds on the page."""
    (word,) = re.findall(pattern, " ".join(PAGE.split()))
    return NUMBERS[word.lower()]


def floors(page: str) -> dict[str, int]:
    """The floor of each part in the picture of the imports."""
    picture = page.partition("```text\nlpq/\n")[2].partition("```")[0]
    return {name: int(floor) for name, floor in re.findall(r"^  (\w+)/? .* floor (\d+)$", picture, re.MULTILINE)}


def beside(page: str) -> set[tuple[str, str]]:
    """The parts of one floor of which the first may import the second."""
    (sentence,) = re.findall(r"Within a floor, (.*?)\. A plugin", " ".join(page.split()))
    found: list[tuple[str, str]] = []
    for clause in re.split(r", (?:and )?", sentence.replace("may import ", "")):
        first, *others = re.findall(r"`(\w+)`", clause)
        found += [(first, other) for other in others or found[-1]]  # "these two": both parts of the clause before
    return {*found}


def test_the_picture_of_the_imports_is_the_rule_that_imports_keep() -> None:
    assert floors(PAGE) == FLOORS
    assert beside(PAGE) == BESIDE


def test_the_rules_for_contributors_name_the_same_floors() -> None:
    """But for modules of lpq itself that others do not import."""
    page = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    named = page.partition("**Imports point down.** ")[2].partition(". Plugins")[0].replace("`", "")
    told = [{*floor.split(", ")} for floor in named.split(" ← ")]
    parts = {name: floor for name, floor in FLOORS.items() if name not in ("importing", "moved")}
    assert told == [{name for name in parts if parts[name] == floor} for floor in sorted({*parts.values()})]


def test_the_table_for_contributors_has_each_folder_of_tests() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    folders = {path.parent.name for path in files("tests/*/test_*.py")}
    assert len(folders) > 20
    assert [name for name in sorted(folders) if f"`tests/{name}`" not in page] == []


def test_a_picture_with_another_floor_is_noticed() -> None:
    assert floors(PAGE.replace("floor 7", "floor 8")) != FLOORS
    assert beside(PAGE.replace("`train` `cli`", "`cli` `train`")) != BESIDE


def test_it_counts_the_operations() -> None:
    (own,) = re.findall(r"operations on operands: (.*?)\. Each is", " ".join(PAGE.split()))
    operators = {name.removeprefix("lpq::") for name in torch._C._dispatch_get_all_op_names() if name[:5] == "lpq::"}
    assert {*re.findall(r"`(\w+)`", own)} == operators & {*TABLE}
    assert told(r"There are (\w+) operations on operands") == len(operators & {*TABLE})
    assert told(r"(\w+) operations have no operator") == len({*TABLE} - operators)
    optional = PAGE.partition("operations have no operator")[2].partition("\n\n")[0]
    assert {*re.findall(r"`(\w+)`", optional)} == {*TABLE} - operators


def test_it_counts_hooks_and_the_attributes_of_a_layer() -> None:
    own = vars(lpq.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8")[0]).keys() - vars(nn.Linear(64, 64)).keys()
    tree = parsed((ROOT / "lpq" / "registry" / "hookspecs.py").read_text())
    hooks = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert all(hasattr(hookspecs, name) for name in hooks)
    assert told(r"carries the hooks\. There are (\w+)") == len(hooks)
    assert told(r"Beside its module's own attributes a layer has (\w+):") == len(own)
    table = PAGE.partition("Beside its module's own attributes")[2].partition("Under tensor parallelism")[0]
    assert {*re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)} == own


def test_it_names_the_files_that_read_frames() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in files("lpq/**/*.py") if "_getframe" in path.read_text()}
    (paragraph,) = re.findall(r"^(\w+ files read frames of the stack\..*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    assert {*re.findall(r"`(lpq/[\w/]+\.py)`", paragraph)} == found
    assert told(r"(\w+) files read frames of the stack") == len(found)


def test_a_wrong_number_is_noticed() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        told(r"There are (\w+) planets")
