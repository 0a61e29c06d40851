"""The text on each command in docs/cli.md, rendered from the command. Run it to bring the page up to date."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from lpq.__main__ import COMMANDS, load

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
SECTION = re.compile(r"<!-- help of lpq ([\w-]+) -->\n.*?<!-- end of help -->", re.DOTALL)


def rendered(name: str) -> str:
    """The help of one command in Markdown: its text, its usage and a table of its options."""
    command = load(name)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(["python -m lpq", name, *(f"{_metavar(a)}" for a in arguments), "[OPTIONS]"])
    rows = [f"| {_names(p)} | {_default(p)} | {_cell(p.help or '')} |" for p in (*arguments, *options)]
    rows += ["| `--help` | | Show this message and exit. |"]
    table = "\n".join(["| option | default | |", "|---|---|---|", *rows])
    return f"{inspect.cleandoc(command.help or '')}\n\n```text\n{usage}\n```\n\n{table}"


def _metavar(argument: Any) -> str:
    name = argument.metavar or str(argument.name).upper()
    name += "..." if argument.nargs == -1 and not name.endswith("...") else ""
    return name if argument.required else f"[{name}]"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_metavar(parameter)}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _default(parameter: Any) -> str:
    shown = getattr(parameter, "show_default", None)
    value = shown if isinstance(shown, str) else parameter.default
    if value is None or value in ((), [], "", False) or parameter.required:
        return ""
    if value is True:
        return f"`{parameter.opts[0]}`"
    return _cell(f"`{value}`")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def sections(page: str) -> dict[str, str]:
    """The parts of the page that are rendered, by command."""
    return {match[1]: match[0] for match in SECTION.finditer(page)}


def section(name: str) -> str:
    return f"<!-- help of lpq {name} -->\n{rendered(name)}\n<!-- end of help -->"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(SECTION.sub(lambda match: section(match[1]), page), encoding="utf-8")
    print(f"{PAGE}: {', '.join(sections(page))}")
    if missing := set(COMMANDS) - set(sections(page)):
        print(f"no section for {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
