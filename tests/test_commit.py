"""A run of tests says which commit it tested."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from commit import commit


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_the_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message=a")
    git(tmp_path, "tag", "v1")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    assert commit(tmp_path) == head
    (tmp_path / "file").write_text("b")
    assert commit(tmp_path) == f"{head}-dirty"


def test_a_copy_without_a_repository_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "--quiet")
    copy = tmp_path / "copy"
    copy.mkdir()
    monkeypatch.delenv("LPQ_COMMIT", raising=False)
    assert commit(copy) == "unknown"
    monkeypatch.setenv("LPQ_COMMIT", "abc123")
    assert commit(copy) == "abc123"


def test_no_link_is_kept() -> None:
    """It would name a place of one machine, as a link to an environment does."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        pytest.skip("a copy without a repository")
    kept = git(root, "ls-files", "--stage").splitlines()
    assert any(line.startswith("100644") for line in kept)
    assert [line for line in kept if line.startswith("120000")] == []
