"""The README and the project's addresses as the package index shows them, where a relative link would lead nowhere.

With ``LPQ_REPO_URL``, the address of the repository, links and pictures of the README become absolute, at the tag of
the version, and the metadata name the repository. Without it the README stays as it is, and there are no addresses.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ADDRESS = "LPQ_REPO_URL"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s]+)(?=\))")
PICTURE = re.compile(r'(?<=src=")(?![a-z]+:|/)([^"]+)(?=")')


class CustomMetadataHook(MetadataHookInterface):
    """Gives ``project.readme`` and ``project.urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = os.environ.get(ADDRESS, "").rstrip("/")
        if address:
            tag = f"v{metadata['version']}"
            text = absolute(text, address, tag)
            metadata["urls"] = {
                "Source": address, "Documentation": f"{address}/blob/{tag}/docs/index.md",
                "Changelog": f"{address}/blob/{tag}/CHANGELOG.md", "Issues": f"{address}/issues",
            }  # fmt: skip
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, address: str, tag: str) -> str:
    """The text with links to pages of the repository and pictures of it; those to a heading of the text stay."""
    code = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    for i in range(0, len(code), 2):
        code[i] = LINK.sub(rf"{address}/blob/{tag}/\1", PICTURE.sub(rf"{address}/raw/{tag}/\1", code[i]))
    return "".join(code)
