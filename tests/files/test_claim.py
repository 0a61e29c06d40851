"""One job at a time writes to a place, and a lock of the system says which."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lpq.files import claim
from lpq.files.claim import Claim, whole_file
from lpq.files.errors import CheckpointError


def test_a_second_job_is_refused_and_named(tmp_path: Path) -> None:
    first = Claim.take(tmp_path / "x")
    with pytest.raises(CheckpointError, match=rf"^process {os.getpid()} on .* is saving it at this moment"):
        Claim.take(tmp_path / "x")
    (refused,) = first.refused()
    assert refused.startswith(f"process {os.getpid()} on ")
    assert not claim.left_behind(first.partial)
    first.release()
    assert not first.partial.exists()
    Claim.take(tmp_path / "x").release()


def test_where_the_file_system_has_no_locks_all_counts_as_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(claim, "lock_descriptor", without)
    monkeypatch.setattr(claim, "unlock_descriptor", without)
    first = Claim.take(tmp_path / "x")
    (first.partial / "half").touch()
    assert claim.left_behind(first.partial)
    second = Claim.take(tmp_path / "x")
    assert not (second.partial / "half").exists()
    second.release()
    assert not second.partial.exists()


@pytest.mark.parametrize(("first", "told"), [(ValueError("a NaN"), RuntimeError), (OSError("disk full"), OSError)])
def test_an_error_that_is_not_of_the_file_is_told_as_it_is(first: Exception, told: type, tmp_path: Path) -> None:
    """A run that fails may save in its handler. Control: an error of the system behind torch's is raised instead."""

    def save() -> None:
        with whole_file(tmp_path / "x"):
            try:
                raise first
            except type(first):
                raise RuntimeError("out of memory")  # noqa: B904

    with pytest.raises(told):
        save()
