"""Each notebook equals what is made of its page, and runs in a kernel of Jupyter."""

from __future__ import annotations

from pathlib import Path

import pytest

for needed in ("jupytext", "nbclient", "ipykernel"):
    pytest.importorskip(needed, reason=f"needs {needed}, which `make install` brings")

import nbclient  # noqa: E402
import nbformat  # noqa: E402
from notebooks import file, made  # noqa: E402
from snippets import NOTEBOOKS  # noqa: E402


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_its_page(name: str) -> None:
    assert file(name).read_text() == made(name), "it is out of date: run python tests/docs/notebooks.py"


SHORTER = {"tutorial": ("for _ in range(100):", "for _ in range(5):")}
"""What a reader waits for and no test: that layers learn, others show."""


@pytest.mark.starts
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "tutorial":
        pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, which `make install` brings")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = file(name).read_text()
    if name in SHORTER:
        long, short = SHORTER[name]
        assert text.count(long) == 1
        text = text.replace(long, short)
    notebook = nbformat.reads(text, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [out for cell in notebook.cells for out in cell.get("outputs", ()) if out.get("name") == "stdout"]
    assert len(printed) >= 2
