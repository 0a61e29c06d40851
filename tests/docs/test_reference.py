"""The reference has every hook with its signature, every public name, every option and every command."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import cli_page
import pytest
import reference_page
from reference_page import DIRECTIVE, is_own, resolve
from snippets import PAGES, ROOT

from lpq import registry
from lpq.__main__ import COMMANDS
from lpq.registry import hookspecs
from lpq.registry.loader import HOOKS

REFERENCE = ROOT / "docs" / "plugins" / "reference.md"
PUBLIC = (
    "lpq", "lpq.checkpoint", "lpq.core", "lpq.distributed", "lpq.engines", "lpq.nn", "lpq.observe", "lpq.kernels",
    "lpq.optim", "lpq.recipes", "lpq.registry",
)  # fmt: skip
NOT_RENDERED = {"Include", "PolicyLike", "RecipeLike", "Steps", "Described", "hookimpl"}
"""Words for a function's arguments, which its own text explains; and a marker, of which the text speaks throughout."""


def signature(hook: str) -> str:
    """A hook as a plugin writes it."""
    return f"{hook}({', '.join(inspect.signature(getattr(hookspecs, hook)).parameters)})"


@cache
def rendered() -> dict[str, Any]:
    """List the objects that mkdocstrings renders, by dotted path."""
    found: dict[str, Any] = {}
    for page in PAGES:
        for match in DIRECTIVE.finditer(page.read_text() + "\n"):
            path, options = match[1], match[2]
            target = resolve(path)
            members = re.findall(r"^ +- (\w+)$", options, re.MULTILINE)
            if not inspect.ismodule(target):
                found[path] = target
                attributes = {f for base in getattr(target, "__mro__", ()) for f in inspect.get_annotations(base)}
                members = [f for f in members if f not in attributes]
            elif not members:
                members = [name for name, value in vars(target).items() if is_own(name, value, path)]
            found |= {f"{path}.{member}": getattr(target, member) for member in members}
    return found


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_documented_with_its_signature(hook: str) -> None:
    assert f"`{signature(hook)}`" in REFERENCE.read_text()
    assert getattr(hookspecs, hook).__doc__
    assert f"lpq.registry.hookspecs.{hook}" in rendered()


def test_no_page_writes_a_hook_otherwise() -> None:
    for page in PAGES:
        for written in re.findall(r"`(lpq_\w+\([^)`]*\))`", page.read_text()):
            assert written in {signature(hook) for hook in HOOKS}, f"{page}: {written}"
        for name in re.findall(r"\blpq_(?:register|convert)_\w+", page.read_text()):
            assert name in HOOKS, f"{page}: {name}"


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_documented(module: str) -> None:
    home = importlib.import_module(module)
    assert [name for name in set(home.__all__) - NOT_RENDERED if not is_documented(home, name)] == []


def is_documented(home: Any, name: str) -> bool:
    """Whether a page renders this very class or function, or a constant of this name."""
    value = getattr(home, name)
    if isinstance(value, int | str):
        return name in {path.rpartition(".")[2] for path in rendered()}
    return any(value is shown for shown in rendered().values())


def test_a_public_name_that_no_page_has_is_noticed() -> None:
    assert not is_documented(importlib.import_module("lpq.formats.blocks"), "torch")
    assert not is_documented(importlib.import_module("lpq.registry.loader"), "GROUP")


def test_what_is_documented_has_a_docstring() -> None:
    for path, value in rendered().items():
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), path


@pytest.mark.parametrize("page", reference_page.PAGES, ids=lambda page: page.name)
def test_who_reads_the_repository_has_each_name_with_its_signature(page: Path) -> None:
    text = page.read_text()
    assert text == reference_page.made(text), f"{page} is out of date: run python tests/docs/reference_page.py"


def test_the_lists_have_names_and_signatures() -> None:
    lists = "".join(found for page in reference_page.PAGES for found in reference_page.MADE.findall(page.read_text()))
    assert lists.count("\n- `") > 100
    assert ") → " in lists
    assert "`format_of(cls: type) → FormatSpec`" in lists, "a parameter of a function, which is no method"


def test_one_page_leads_to_every_name() -> None:
    text = reference_page.INDEX.read_text()
    assert text == reference_page.index(text), "docs/api.md is out of date: run python tests/docs/reference_page.py"
    assert set(reference_page.API) == set((ROOT / "docs" / "api").glob("*.md"))
    assert text.count('<a id="lpq.') > 80


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_documented_as_it_is(command: str) -> None:
    page = cli_page.PAGE.read_text()
    assert cli_page.sections(page).get(command) == cli_page.section(command), (
        "docs/cli.md is out of date: run python tests/docs/cli_page.py"
    )


def test_the_page_has_no_command_that_is_gone() -> None:
    page = cli_page.PAGE.read_text()
    assert set(cli_page.sections(page)) == set(COMMANDS)
    assert re.findall(r"^## lpq (\S+)$", page, re.MULTILINE) == list(cli_page.sections(page))


def test_the_readme_starts_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.index("make train\nmake test") < text.index("\n## ")


def lost(page: Path, text: str) -> list[str]:
    """The links of a text to files, or to headings of pages, that are not there."""
    found = []
    for path, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", text):
        target = page.parent / path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(f"{path}#{anchor}")
    return found


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}


def test_every_link_from_the_top_of_the_repository_leads_somewhere() -> None:
    """The site's own build looks at the pages in ``docs`` alone."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"):
        assert lost(page, page.read_text()) == [], page.name


def test_a_link_that_leads_nowhere_is_noticed() -> None:
    text = "[a](docs/recipes.md#names) [b](docs/recipes.md#nowhere) [c](docs/nowhere.md)"
    assert lost(ROOT / "README.md", text) == ["docs/recipes.md#nowhere", "docs/nowhere.md#"]


def test_files_that_prose_names_are_there() -> None:
    """``tests/golden`` and its like, in inline code."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for name in re.findall(r"`((?:tests|lpq|plugins|docs|examples)/[\w./-]+)`", text):
            assert (ROOT / Path(name)).exists(), f"{page}: {name}"


def missing_tests(text: str) -> list[str]:
    """The files that a text names, and the tests in ``file::test``, that are not there."""
    missing = []
    for name, test in re.findall(r"`((?:tests|lpq)/[\w./]+\.py)(?:::(\w+))?`", text):
        file = ROOT / name
        if not file.exists() or (test and f"def {test}(" not in file.read_text()):
            missing.append(f"{name}::{test}")
    return missing


def test_tests_that_stand_for_others_are_there() -> None:
    page = ROOT / "tests" / "GONE.md"
    text = page.read_text()
    assert text.count("::test_") > 15
    assert missing_tests(text) + lost(page, text) == []
    assert missing_tests(text.replace("test_remembered", "a")) == ["tests/distributed/test_masters.py::a"]
    assert missing_tests(text.replace("test_zero_loop", "a")) == ["tests/distributed/a.py::"]


OPTION = re.compile(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|", re.MULTILINE)


@pytest.mark.parametrize("name", sorted(registry.formats()))
def test_a_format_page_has_every_option_with_its_default(name: str) -> None:
    page = (ROOT / "docs" / "formats" / f"{name}.md").read_text()
    options = {f.name: f for f in dataclasses.fields(registry.quantizer_class(name))}
    table = page.partition("| option |")[2].partition("\n\n")[0]
    documented = {option: default.strip() for option, default in OPTION.findall(table)}
    assert documented == {option: default_of(field) for option, field in options.items()}


def default_of(field: dataclasses.Field[Any]) -> str:
    """A default as the page writes it: as the grammar does."""
    if field.default is dataclasses.MISSING:
        return ""
    return "none" if field.default is None else f"`{str(field.default).lower()}`"


def test_the_recipe_page_has_every_recipe_that_ships() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    shipped = {name for p in registry.plugins() if p.builtin for name in p.recipes}
    table = page.partition("| recipe |")[2].partition("\n\n")[0]
    first_column = "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE))
    assert set(re.findall(r"`([\w-]+)`", first_column)) == shipped
