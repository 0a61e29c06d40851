"""Commands given names of any kind, and packages with anything in their metadata."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import lpq
from lpq import registry
from lpq.__main__ import COMMANDS
from lpq.registry.tables import drawn
from lpq.train.loop import say

HOSTILE = """
from lpq.registry import RecipeSpec, hookimpl

@hookimpl
def lpq_register_recipes():
    return RecipeSpec(name="acme", summary="[red]fast\\x1b[2J\\x07[/red]", recipe="mxfp8")
"""


def test_what_packages_say_of_themselves_steers_no_terminal(lpq: Callable, install: Callable, tmp_path: Path) -> None:
    install("acme", "1.0", HOSTILE)
    install("evil", "1.0", "raise ValueError('\\x1b]0;owned\\x07')")
    (metadata,) = tmp_path.glob("lpq_evil*/METADATA")
    metadata.write_text("Metadata-Version: 2.1\nName: evil; curl x | sh\x1b[8m\nVersion: 1\x1b[2J\n")
    registry.refresh()
    for command in ("recipes", "plugins", "formats"):
        ended = lpq(command)
        assert ended.status == 0
        assert "\x1b" not in ended.out + ended.err
        assert "\x07" not in ended.out + ended.err
        assert "pip" not in ended.err
        assert r"evil; curl x | sh\x1b[8m" in ended.err
    assert r"[red]fast\x1b[2J\x07[/red]" in lpq("recipes").out


def test_training_prints_names_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    say(console, "no layer matches '[bold]x[/bold]\x1b[2J'", style="yellow")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == r"no layer matches '[bold]x[/bold]\x1b[2J'" + "\n"
    assert drawn("[b]\x1b", ["[i]"], [["[u]\x07"]]).split() == [r"[b]\x1b", "[i]", "─" * 7, r"[u]\x07"]


UNKNOWN = {
    "train": ("--recipe", "nope"),
    "compare": ("nope", "--out", "run"),
    "bench": ("--recipe", "nope"),
    "advise": ("tiny", "--gpu", "nope"),
    "search": ("run", "--gpu", "nope", "--time", "0.5", "--out", "there/policy.toml"),
    "report": ("--nope",),
    "formats": ("--nope",),
    "recipes": ("--nope",),
    "plugins": ("--nope",),
    "doctor": ("nope",),
    "explain": ("nope",),
    "memory": ("nope",),
    "calibrate": ("run", "out", "--method", "nope"),
    "export": ("run", "out", "--layout", "nope"),
    "check": ("nope",),
    "new-plugin": ("mine", "--nope"),
}
"""Arguments of each command among which is a name that does not exist."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the directory of a run that ended."""
    folder = tmp_path_factory.mktemp("run")
    lpq.checkpoint.save(lpq.convert(nn.Sequential(nn.Linear(32, 32)), "mxfp8"), folder / "recipe", step=1)
    torch.save([torch.zeros(2, 32)], folder / "batches.pt")
    (folder / "config.toml").touch()
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_with_2_for_a_name_that_is_not_there(command: str, lpq: Callable, run: Path) -> None:
    ended = lpq(command, *(str(run) if word == "run" else word for word in UNKNOWN[command]))
    assert (ended.status, ended.out) == (2, "")
    assert "nope" in ended.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("export", "run", "out", "--leave", "nope"), "leave has nope, and the model has no quantized layer"),
        (("export", "run", "out", "--dtype", "nope"), "there is no dtype 'nope'"),
        (("calibrate", "run", "out", "--data", "run/batches.pt", "--model", "nope:f"), "--model: 'nope:f' cannot be"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_so_do_values_of_options(options: tuple[str, ...], words: str, lpq: Callable, run: Path) -> None:
    ended = lpq(*(word.replace("run", str(run), 1) if word[:3] == "run" else word for word in options))
    assert ended.status == 2, ended.err
    assert words in ended.err
