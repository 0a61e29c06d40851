"""The names of each section of the reference pages, with signatures and first sentences, made from the code.

The site renders all docstrings; who reads the repository has these lists. The first page of the Python API links to all
names of its pages. Run this to bring the pages up to date.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from lpq.formats.options import Declared

PROPERTIES = property, Declared
DOCS = Path(__file__).parents[2] / "docs"
INDEX = DOCS / "api.md"
API = tuple(
    DOCS / "api" / f"{name}.md"
    for name in ("models", "recipes", "distributed", "checkpoints", "engines", "observe", "integrations", "errors")
)
"""The pages of the Python API, in the order in which the index has them."""
PAGES = (*API, DOCS / "plugins" / "reference.md")
DIRECTIVE = re.compile(r"^::: (\S+)\n((?:^ {4}.*\n)*)", re.MULTILINE)
BEGIN, END = "<!-- made from the code -->", "<!-- end -->"
MADE = re.compile(rf"{BEGIN}\n.*?{END}\n\n", re.DOTALL)


def resolve(path: str) -> Any:
    """Return the object of a dotted path: the longest module, then attributes."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        return attrgetter(".".join(parts[cut:]))(found) if parts[cut:] else found
    raise AssertionError(f"{path} is not there")


def is_own(name: str, value: Any, module: str) -> bool:
    """Whether a module defines this, and for everybody."""
    return not name.startswith("_") and getattr(value, "__module__", None) == module


def made(page: str) -> str:
    """Return the page with a list below each heading that has directives."""
    found = []
    for section in re.split(r"^(?=##? )", MADE.sub("", page), flags=re.MULTILINE)[1:]:
        heading, _, rest = section.partition("\n\n")
        lines = [line for match in DIRECTIVE.finditer(rest + "\n") for line in described(match[1], match[2])]
        text = f"{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}\n\n" if lines else ""
        found.append(f"{heading}\n\n{text}{rest}")
    return "".join(found)


def index(text: str) -> str:
    """Return the page of all pages of the API: below each of their headings, links to the names that they render.

    Each link is the anchor that the name had when all of them were on one page.
    """
    lines = []
    for page in API:
        own = page.read_text(encoding="utf-8")
        title = own.partition("\n")[0].removeprefix("# ")
        for section in re.split(r"^(?=##? )", own, flags=re.MULTILINE):
            paths = [path for match in DIRECTIVE.finditer(section + "\n") for path in members(match[1], match[2])]
            if paths:
                place = page.relative_to(DOCS)
                links = (f'<a id="{path}"></a>[`{path.rpartition(".")[2]}`]({place}#{path})' for path in paths)
                heading = section.partition("\n")[0].lstrip("# ")
                lines += [f"## {heading}", "", f"[{title}]({place}): " + ",\n".join(links), ""]
    return f"{text.partition(BEGIN)[0]}{BEGIN}\n\n" + "\n".join(lines) + f"\n{END}\n"


def members(path: str, options: str) -> list[str]:
    """List what a directive renders with a heading of its own: the object or, of a module, what it names."""
    if not inspect.ismodule(resolve(path)):
        return [path]
    return [f"{path}.{name}" for name in re.findall(r"^ +- (\w+)$", options, re.MULTILINE)]


def rendered(path: str, options: str) -> list[str]:
    """List what a directive renders: the object or, of a module, what it names, or else all that the module defines."""
    target = resolve(path)
    if not inspect.ismodule(target):
        return [path]
    own = [name for name, value in vars(target).items() if is_own(name, value, path) and not isinstance(value, TypeVar)]
    return members(path, options) or [f"{path}.{name}" for name in own]


def described(path: str, options: str) -> list[str]:
    """Return the lines of one directive: the object, and under it the members that are rendered."""
    target, members = resolve(path), re.findall(r"^ +- (\w+)$", options, re.MULTILINE)
    if path == "lpq.registry.hookspecs":
        return []  # the page has a table of the hooks
    if inspect.ismodule(target):
        return [line for name in rendered(path, options) for line in described(name, "")]
    lines = [f"- {signed(target, path.rpartition('.')[2])}{first_sentence(target)}"]
    if inspect.isclass(target) and not is_error(target):
        own = members or [name for name, value in vars(target).items() if is_method(name, value, target.__module__)]
        for name in own:
            value = inspect.getattr_static(target, name, None)
            if name.startswith("_") or value is None:
                continue
            inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            inner = inner.fget if isinstance(inner, PROPERTIES) else inner
            if not inner.__doc__:
                continue
            shown = signed(inner, name) if not isinstance(value, PROPERTIES) else f"`{name}`"
            lines.append(f"    - {shown}{first_sentence(inner)}")
    return lines


def is_error(target: Any) -> bool:
    return inspect.isclass(target) and issubclass(target, BaseException)


def is_protocol(target: Any) -> bool:
    """Whether a class is a Protocol of functions, which is shown as one."""
    return bool(getattr(target, "_is_protocol", False)) and "__call__" in vars(target)


def is_method(name: str, value: Any, module: str) -> bool:
    """Whether a class defines this method, or property, for everybody; others may be given to it at run time."""
    if isinstance(value, PROPERTIES):
        value = value.fget
    value = getattr(value, "__func__", value)
    return not name.startswith("_") and inspect.isfunction(value) and value.__module__ == module


def signed(target: Any, name: str) -> str:
    """Return the name with its parameters and their types, as code."""
    if not (inspect.isfunction(target) or inspect.isclass(target)) or is_error(target):
        return f"`{name}`"
    signature = inspect.signature(target.__call__ if is_protocol(target) else target)
    kept = [p for p in signature.parameters.values() if p.name not in ("self", "cls") or p.annotation is not p.empty]
    text = str(signature.replace(parameters=kept, return_annotation=signature.return_annotation))
    if inspect.isclass(target) and not is_protocol(target):
        text = text.removesuffix(" -> None").removesuffix(" -> 'None'")
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text)  # annotations of a NamedTuple
    text = re.sub(r"Union\[((?:[^\[\]]|\[[^\[\]]*\])*)\]", _union, text)  # as torch 2.11 wrote them
    text = re.sub(r"<function (\w+) at 0x\w+>", r"\1", text)
    text = re.sub(r"<function [\w.<>]+ at 0x\w+>", "…", text)
    plain = re.sub(r"'([^']*)'", _unquoted, text)
    return f"`{name}{plain.replace(' -> ', ' → ')}`"  # which no line ends within


def _union(match: re.Match[str]) -> str:
    """The types of a union as they are written today."""
    return " | ".join(re.split(r", (?![^\[]*\])", match[1]))


def _unquoted(match: re.Match[str]) -> str:
    """An annotation is a string where its module says so; a default that is one stays as it is."""
    before = match.string[: match.start()]
    return match[1] if before.endswith((": ", "-> ")) else match[0]


def first_sentence(target: Any) -> str:
    """Return ``: `` and the first sentence of what its docstring has, in one line."""
    if isinstance(target, int | str | tuple):
        return f" = `{target!r}`"
    if not callable(target) or isinstance(target, functools.partial):  # whose docstring is functools'
        return ""
    text = " ".join(inspect.cleandoc(target.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")
    sentence = re.split(r"(?<=[^.…][.!?]) (?=[A-Z`])", text)[0].rstrip(".")
    return f": {sentence}." if sentence else ""


def main() -> None:
    for page in PAGES:
        page.write_text(made(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page)
    INDEX.write_text(index(INDEX.read_text(encoding="utf-8")), encoding="utf-8")
    print(INDEX)


if __name__ == "__main__":
    main()
