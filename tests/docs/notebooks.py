"""The notebooks of docs/notebooks, made of pages. Run this to bring them up to date.

A page has the text and the code. Its notebook has a cell for each block that runs; a block that is a file writes it.
"""

from __future__ import annotations

import re
from pathlib import Path

import jupytext  # type: ignore[import-untyped]
import nbformat
from snippets import NOTEBOOKS, ROOT, blocks

FOLDER = ROOT / "docs" / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def made(name: str) -> str:
    """Return the notebook of a page as the text of its file."""
    page = ROOT / "docs" / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        if block.language == "python" and block.title is not None:
            old, new = f'```python title="{block.title}"\n', f"```python\n%%writefile {block.title}\n"
        elif block.language == "python" and block.reason is not None:
            old, new = f"<!-- not run: {block.reason} -->\n```python\n{block.code}", f"```python .noeval\n{block.code}"
        else:
            continue
        assert text.count(old) == 1, block.place
        text = text.replace(old, new)
    text = re.sub(r"\]\((?!http|#)([\w/.-]+)", r"](../\1", text)
    notebook = jupytext.reads(text, fmt="md")
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{name}-{number}"
    return nbformat.writes(notebook) + "\n"


def file(name: str) -> Path:
    return FOLDER / f"{name}.ipynb"


def main() -> None:
    for name in NOTEBOOKS:
        file(name).write_text(made(name), encoding="utf-8")
        print(file(name))


if __name__ == "__main__":
    main()
