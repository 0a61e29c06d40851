"""Public functions refuse a first argument that is no model, in the same words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lpq
from lpq import calibration, observe, optim
from lpq.calibration import CalibrationError
from lpq.checkpoint import CheckpointError
from lpq.integrations import peft, transformers

NET = lpq.convert(nn.Sequential(nn.Linear(32, 32)), "mxfp8")
BATCHES = [torch.ones(4, 32)]
CALLS: dict[str, Callable[[], Any]] = {
    "convert": lambda: lpq.convert("mxfp8", NET),
    "report": lambda: lpq.report("net"),
    "set_step": lambda: lpq.set_step(3, NET),
    "replan": lambda: lpq.replan("net", steps=3),
    "hold_weights": lambda: lpq.hold_weights("net").__enter__(),
    "calibrate": lambda: lpq.calibrate(BATCHES, NET),
    "layer_noise": lambda: calibration.layer_noise(BATCHES, NET),
    "stream": lambda: lpq.export.stream("modelopt", NET),
    "memory": lambda: observe.memory(4, NET),
    "load_high_precision": lambda: optim.load_high_precision(NET.state_dict(), NET),
    "resume": lambda: transformers.resume("checkpoint", NET),
    "attach": lambda: transformers.attach("net"),
    "merge_aware": lambda: peft.merge_aware("net"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_model_is_refused(name: str) -> None:
    words = r"model must be a torch\.nn\.Module, got (str|int|list|OrderedDict): pass .* as the first argument"
    with pytest.raises((TypeError, CheckpointError, CalibrationError), match=words):
        CALLS[name]()


def test_no_layers_and_no_path_are_refused() -> None:
    with pytest.raises(TypeError, match="layers must be a converted model or layers of it, got int"):
        observe.observing(3, NET).__enter__()
    with pytest.raises(CheckpointError, match="checkpoint must be str or Path, got Sequential: the model is the first"):
        transformers.resume(NET, NET)
    with pytest.raises(CheckpointError, match=r"model must be .* or the directory .*, got OrderedDict"):
        lpq.export(NET.state_dict(), "files")
