"""Commands given names of any kind, and packages with anything in their metadata."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from lpq import registry
from lpq.train.loop import say
from lpq.train.report import plain


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("explain", "foo=1"), 2, "lpq: unknown key 'foo'"),
        (("explain", "wgard=mxfp8, fprop=bf16"), 2, "unknown key 'wgard': did you mean 'wgrad'"),
        (("explain", "*=mxfp8"), 2, ""),
        (("explain", "fprop=mxfp9, dgrad=bf16, wgrad=bf16"), 2, "fprop: there is no recipe and no format 'mxfp9'"),
        (("explain", "x" * 300), 2, "there is no recipe and no format"),
        (("explain", "hybrid(row=" * 3000), 2, "a recipe or a quantizer has at most"),
        (("doctor", "x" * 300), 2, "there is no format"),
        (("check", "x" * 300), 2, "there is no format"),
        (("new-plugin", "x" * 300), 1, "cannot be the name of a format: use lower-case letters"),
        (("explain", "fprop=mxfp8"), 1, "nothing is said of dgrad and wgrad"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_names_that_do_not_exist_end_with_2(
    arguments: tuple[str, ...], status: int, words: str, lpq: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = lpq(*arguments)
    assert ended.status == status, ended.err
    assert words in ended.err
    assert len(ended.err) < 2500
    assert not list(tmp_path.iterdir())


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
    assert plain("[b]\x1b") == r"\[b]\x1b"
