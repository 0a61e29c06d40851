"""torch's advice to load without ``weights_only`` stands nowhere in what a user sees: a message, or a traceback."""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from opcodes import put
from torch import nn

import lpq
from lpq import checkpoint
from lpq.registry import LpqError


class Own:
    """A class that ``weights_only=True`` does not read."""


def model() -> Any:
    return lpq.convert(nn.Sequential(nn.Linear(32, 64)), "fp8-current")


def content() -> bytes:
    file = io.BytesIO()
    torch.save({name: Own() for name in ("extra", "model", "optimizer")}, file)
    return file.getvalue()


def edited(folder: Path) -> Path:
    put(path := checkpoint.save(model(), folder / "saved"), "extra.pt", content())
    return path


def loaded(folder: Path) -> object:
    return checkpoint.load(model(), edited(folder))


def known(folder: Path) -> object:
    return checkpoint.info(edited(folder))


def imported(folder: Path) -> object:
    (folder / "model.pt").write_bytes(content())
    return checkpoint.import_file(model(), folder / "model.pt")


def calibrated(folder: Path) -> object:
    (folder / "state.pt").write_bytes(content())
    return lpq.calibrate(model(), [torch.randn(4, 32)], state=folder / "state.pt")


def saved(folder: Path) -> object:
    return checkpoint.save(model(), folder / "saved", extra={"mine": Own()})


def advice(error: BaseException) -> bool:
    return "`weights_only`" in "".join(traceback.format_exception(error))


@pytest.mark.parametrize("way", [loaded, known, imported, calibrated, saved])
def test_it_is_not_passed_on(way: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(UnpicklingError) as control:
        torch.load(io.BytesIO(content()), weights_only=True)
    assert advice(control.value)
    with pytest.raises(LpqError, match=r"plain data|would not read") as ours:
        way(tmp_path)
    assert not advice(ours.value)
