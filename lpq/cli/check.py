"""``lpq check``: run the conformance kit of ``lpq.testing`` on formats, by pytest in this process."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

import lpq.testing
from lpq.registry.errors import LpqError, OptionError

NEEDED = ("pytest", "hypothesis")


def check(
    formats: Annotated[
        list[str],
        typer.Argument(metavar="FORMAT", help="nvfp4: in all its options; 'nvfp4(block=16x16)': in this way only."),
    ],
    select: Annotated[
        str, typer.Option("-k", metavar="EXPRESSION", help="Only the tests whose names match, as for pytest.")
    ] = "",
    first: Annotated[bool, typer.Option("--first", "-x", help="Stop at the first failure.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Name every test that is run.")] = False,
) -> None:
    """Run the conformance kit on formats. The exit status is 0 if all of it passed, known failures aside.

    It needs pytest, hypothesis and, where Triton interprets kernels, numpy: `pip install 'lpq[check]'`.
    """
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise LpqError(f"the conformance kit needs {' and '.join(absent)}: pip install 'lpq[check]'")
    import pytest  # neither comes with lpq itself
    from hypothesis.configuration import set_hypothesis_home_dir

    from lpq.testing.options import family  # with torch, which `lpq check --help` can do without

    for text in formats:
        family(text)  # an error in one is reported here, once, and not by every module of the kit
    here = str(Path(lpq.testing.__file__).parent)
    options = [
        "--pyargs", "lpq.testing.conformance", *(f"--lpq-format={text}" for text in formats),
        "-c", os.devnull, "--rootdir", here, "--noconftest",  # nothing of where we are
        "-p", "lpq.testing.plugin", "-p", "hypothesispytest", "-p", "no:cacheprovider",
        "-p", "no:unraisableexception",  # which collects garbage at the end, for half a second
        "-p", "no:logging",  # which adds handlers to all of torch's loggers, six times for each test
        "--tb=short", "--no-header", "--show-capture=no", "-rfEsx", "-v" if verbose else "-q",
        *(["-k", select] if select else []), *(["-x"] if first else []),
    ]  # fmt: skip
    with TemporaryDirectory() as folder:
        set_hypothesis_home_dir(folder)  # and not where we are
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins that are installed may fail it, or take time
            with redirect_stderr(StringIO()) as said:
                status = pytest.main(options)
    if status == pytest.ExitCode.USAGE_ERROR:
        raise OptionError(said.getvalue().strip().removeprefix("ERROR: "))
    sys.stderr.write(said.getvalue())
    if status:
        raise typer.Exit(int(status))
