"""The names of lpq that the pages name: in imports and code, in prose, and in the reference.

``published.txt`` has those of the last release. Run this when a release is made, and at no other time: a name that a
page named is somebody's import, which a rename must not break without a word.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from reference_page import resolve
from snippets import PAGES, ROOT, blocks

LIST = Path(__file__).with_name("published.txt")
DIRECTIVE = re.compile(r"^::: (lpq[\w.]+)$", re.MULTILINE)
IN_PROSE = re.compile(r"`(lpq(?:\.[A-Za-z]\w*)+)")


def in_code(code: str) -> Iterator[str]:
    """The dotted names of lpq in Python code; none in what is no Python by itself."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lpq":
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("lpq."))
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"lpq(\.\w+)+", name := ast.unparse(node)):
            yield name


def is_there(name: str) -> bool:
    try:
        resolve(name)
    except (AssertionError, AttributeError):
        return is_in_source(name)
    except ModuleNotFoundError as error:  # the module is there, and the framework that it serves is not installed
        return not str(error.name).startswith("lpq")
    return True


def is_in_source(name: str) -> bool:
    """Whether this is a module that cannot be imported, as the framework that it serves is not installed, or a name
    that such a module defines."""
    for module, _, attribute in ((name, "", ""), name.rpartition(".")):
        path = ROOT / f"{module.replace('.', '/')}.py"
        if path.exists():
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                defined = {getattr(node, "name", "") for node in ast.parse(path.read_text(encoding="utf-8")).body}
                return not str(error.name).startswith("lpq") and attribute in {"", *defined}
    return False


def published() -> list[str]:
    """The names in the pages as they are. What is no name, as that of a file, is left out."""
    found = {name for page in PAGES for block in blocks(page) for name in in_code(block.code)}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found |= {*DIRECTIVE.findall(text), *IN_PROSE.findall(text)}
    return sorted(filter(is_there, found))


if __name__ == "__main__":
    LIST.write_text("\n".join(published()) + "\n", encoding="utf-8")
