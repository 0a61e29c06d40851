"""``lpq new-plugin``: write a package with a number format that installs, is listed and passes the kit.

The templates are the INT8 format of the design, with ``NAME`` for its name and ``Name`` for its classes.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from lpq import registry
from lpq.files.outputs import writable
from lpq.registry.errors import LpqError, OptionError
from lpq.registry.plugin_faults import why_no_name
from lpq.registry.showing import brief

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The format's name: lower-case letters, digits and _.")],
    directory: Annotated[Path, typer.Option("--dir", help="Where to make the folder lpq-NAME.")] = Path(),
) -> None:
    """Write the folder lpq-NAME: a package with a new number format, ready to install and to change."""
    check_name(name)
    if not directory.is_dir():
        raise LpqError(f"--dir {directory} is not a folder that exists: make it first, or choose another --dir")
    target = directory / f"lpq-{name}"
    if target.exists():
        raise LpqError(f"{target} exists already: remove it, or choose another --dir")
    for path, text in rendered(name).items():
        with writable(target / path, "choose another --dir") as file:
            file.write_text(text)
    typer.echo(f"{target}: the format {name}, for now symmetric INT8. To go on:")
    typer.echo(
        f"  pip install -e {shlex.quote(str(target))}\n  python -m lpq check {name}\n"
        f"  edit {target}/lpq_{name}/format.py"
    )


def check_name(name: str) -> None:
    """Refuse a name that cannot be a format's, that is of a package, or that is taken."""
    if name.startswith(("lpq_", "lpq-")):
        own = name[4:] if NAME.fullmatch(name[4:]) else "NAME"
        raise OptionError(
            f"{brief(name)} is a package's name, and a format's is without {name[:4]}: lpq new-plugin {own} makes "
            f"lpq-{own}"
        )
    if not NAME.fullmatch(name):
        raise OptionError(
            f"{brief(name)} cannot be the name of a format: use lower-case letters, digits and _, a letter first, "
            "64 at most"
        )
    if meant_otherwise := why_no_name(name):
        raise OptionError(meant_otherwise)
    for plugin in registry.plugins():
        if name == plugin.name or name in plugin.formats or name in plugin.recipes:
            raise OptionError(f"{name!r} is taken by {plugin.title}: choose another name")


def rendered(name: str) -> dict[str, str]:
    """The files of the package, by path. Templates of Python files end in ``.txt``, being no code of lpq."""
    camel = "".join(part.capitalize() for part in name.split("_"))
    templates, texts = Path(__file__).with_name("templates"), dict[str, str]()
    for path in sorted(path for path in templates.rglob("*") if path.is_file()):
        target = path.relative_to(templates).as_posix().removesuffix(".txt").replace("NAME", name)
        texts[target] = path.read_text(encoding="utf-8").replace("NAME", name).replace("Name", camel)
    return texts
