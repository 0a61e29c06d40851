"""On a GPU that multiplies FP8, a run that names no size has one at which FP8 saves time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lpq.train import TrainConfig, gpu_size, machine, resolve

CPU = {"device": "cpu"}


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let PyTorch report one GPU of some compute capability."""

    def make(found: tuple[int, int], cuda: str | None = "13.0") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return make


def test_the_size_is_the_gpus_where_none_is_named(capability: Any) -> None:
    capability((9, 0))
    found = resolve({})
    assert (found.recipe, found.width, found.layers, found.seq * found.batch) == ("fp8-current", 4096, 2, 8192)
    assert "4096 wide" in str(gpu_size.note(found, torch.device("cuda")))
    assert resolve({"recipe": "mxfp8"}).recipe == "mxfp8"
    assert resolve({"recipe": "mxfp8"}).width == 4096
    assert resolve({"policy": "p.toml"}) == TrainConfig(policy="p.toml", **gpu_size.SIZE, **gpu_size.BESIDE)
    assert resolve({"checkpoint_every": 7}).checkpoint_every == 7


def test_one_option_of_the_size_keeps_all_of_it(capability: Any) -> None:
    capability((8, 9))
    found = resolve({"width": 256})
    assert found == TrainConfig(recipe="fp8-current", width=256)
    assert "from a width of about 4096" in str(gpu_size.note(found, torch.device("cuda")))


def test_elsewhere_nothing_changes(capability: Any) -> None:
    capability((9, 0))
    assert resolve(CPU) == TrainConfig(**CPU)
    assert gpu_size.note(TrainConfig(**CPU), torch.device("cpu")) is None
    capability((8, 0))
    assert resolve({}) == TrainConfig()
    assert "save no time" in str(gpu_size.note(TrainConfig(), torch.device("cuda")))
    capability((9, 4), cuda=None)  # what AMD's GPUs report
    assert not machine.multiplies_fp8(torch.device("cuda"))
