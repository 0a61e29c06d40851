"""The model is the first argument; the earlier order, with the path first, is understood, with a warning."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lpq
from lpq import checkpoint
from lpq.checkpoint import CheckpointError


def net(value: float) -> nn.Module:
    model = lpq.convert(nn.Sequential(nn.Linear(32, 32, bias=False)), "mxfp8", weights="quantized")
    with torch.no_grad():
        model[0].weight.fill_(value)
    return model


def saved(folder: Path) -> Path:
    return checkpoint.save(net(1.0), folder / "saved")


def one_file(folder: Path) -> Path:
    return lpq.export(net(1.0), folder / "one.pt", layout="lpq").path


def for_engines(folder: Path) -> Path:
    return lpq.export(net(1.0), folder / "files").path


def nothing(folder: Path) -> Path:
    return folder / "new"


CALLS: dict[str, tuple[Callable[..., Any], Callable[[Path], Path]]] = {
    "lpq.checkpoint.save(model, directory)": (checkpoint.save, nothing),
    "lpq.checkpoint.save_async(model, directory)": (checkpoint.save_async, nothing),
    "lpq.checkpoint.load(model, path)": (checkpoint.load, saved),
    "lpq.checkpoint.import_file(model, path)": (checkpoint.import_file, one_file),
    "lpq.engines.load_quantized(model, path)": (lpq.load_quantized, for_engines),
}


def did(model: nn.Module, result: object, place: Path) -> float:
    """Return a value that was saved or loaded, of which every model but this one has 1."""
    if isinstance(result, checkpoint.Saving):
        result.wait()
    if place.name == "new":
        checkpoint.load(model := net(0.0), place)
    return float(model[0].weight.row.decode()[0, 0])


@pytest.mark.parametrize("call", CALLS)
def test_both_orders_do_the_same(call: str, tmp_path: Path) -> None:
    function, place_of = CALLS[call]
    place, value = place_of(tmp_path), 2.0 if place_of is nothing else 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        model = net(2.0)
        assert did(model, function(model, place), place) == value
        assert did(model, function(model, str(place)), place) == value
        *_, named = call.rstrip(")").split(", ")
        assert did(model, function(**{named: place, "model": model}), place) == value
    earlier: tuple[Callable[[nn.Module], object], ...] = (
        lambda model: function(place, model), lambda model: function(str(place), model=model)
    )  # fmt: skip
    for old in earlier:
        model = net(2.0)
        with pytest.warns(DeprecationWarning, match=rf"first argument, call {re.escape(call)}$") as found:
            result = old(model)
        assert did(model, result, place) == value
        # torch may warn meanwhile, in the thread that writes for save_async.
        ours = [warning.filename for warning in found if issubclass(warning.category, DeprecationWarning)]
        assert ours == [__file__]


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_path_or_no_model_is_refused_in_words(call: str, tmp_path: Path) -> None:
    function, place_of = CALLS[call]
    model, place = net(1.0), place_of(tmp_path)
    *_, named = call.rstrip(")").split(", ")
    with pytest.raises(CheckpointError, match=rf"{named} must be str or Path, got Sequential: the model is the first"):
        function(model, model)
    with pytest.raises(CheckpointError, match=rf"{named} must be str or Path, got int$"):
        function(model, 3)
    with pytest.raises(CheckpointError, match=r"model must be a torch\.nn\.Module, got PosixPath: pass the model"):
        function(place, place)
    assert not (tmp_path / "new").exists()


def test_an_export_refuses_a_path_first() -> None:
    with pytest.raises(CheckpointError, match="path must be str or Path, got Sequential: the model is the first"):
        lpq.export("files", net(1.0))
