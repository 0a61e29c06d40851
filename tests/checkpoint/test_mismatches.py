"""A checkpoint that does not fit a model or an optimizer is refused in words, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import as_bytes, equal
from torch import nn

import lpq
from lpq import checkpoint
from lpq.checkpoint import CheckpointError


def stored(text: str, rows: int = 64, dtype: torch.dtype = torch.float32, **sides: bool) -> nn.Module:
    net = nn.Sequential(nn.Linear(32, rows))
    quantized = lpq.quantizer(text).quantize(torch.randn(rows, 32, dtype=dtype), **sides)
    net[0].weight = nn.Parameter(quantized, requires_grad=False)
    return net


def plain(rows: int = 64, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(32, rows, dtype=dtype, **options))


class Counted(nn.Linear):
    """A layer with a state of its own beside its tensors."""

    seen = torch.tensor(0)

    def get_extra_state(self) -> torch.Tensor:
        return self.seen

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = state


CASES: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = [
    (lambda: stored("mxfp8"), lambda: stored("nvfp4"), "0.weight was saved as mxfp8, and the model stores it as nvfp4"),
    (lambda: stored("nvfp4"), lambda: stored("nvfp4(rht=true)"), r"saved as nvfp4, .* stores it as nvfp4\(rht=true\)"),
    (lambda: stored("fp8"), plain, "0.weight was saved as fp8, and the model stores it in high precision"),
    (lambda: stored("mxfp8"), lambda: stored("mxfp8", 96), r"shape \[64, 32\] and is \[96, 32\]"),
    (lambda: stored("mxfp8", col=False), lambda: stored("mxfp8"), "its col operand.*or move its values"),
    (plain, lambda: stored("mxfp8", 96), r"0.weight was saved with shape \[64, 32\] and is \[96, 32\]"),
    (plain, lambda: plain(96), r"0.weight was saved with shape \[64, 32\] and is \[96, 32\] in the model"),
    (plain, lambda: plain(dtype=torch.bfloat16), r"0.weight was saved in torch.float32 and is torch.bfloat16"),
    (plain, lambda: plain(bias=False), "it has tensors for which the model has no place: 0.bias"),
    (
        lambda: nn.Sequential(*plain(32), *stored("mxfp8")), lambda: plain(32),
        r"the model has no place: 1\.bias, 1\.weight\. Make the model as it was",
    ),
    (lambda: plain(bias=False), plain, "it has nothing for these tensors of the model: 0.bias"),
    (plain, lambda: stored("mxfp8").to("meta"), r"0.weight is on the meta device"),
    (plain, lambda: plain(device="meta"), r"0.weight is on the meta device.*to_empty"),
    (lambda: plain(dtype=torch.float64), lambda: stored("mxfp8"), "0.weight was saved in torch.float64, and no format"),
    (lambda: nn.Linear(32, 64), lambda: Counted(32, 64), r"states of modules: _extra_state\. Make the model"),
    (lambda: Counted(32, 64), lambda: nn.Linear(32, 64), r"has no place: _extra_state\. Make the model of"),
]  # fmt: skip


def test_a_state_that_is_a_tensor_is_imported(tmp_path: Path) -> None:
    counted, other = Counted(32, 64), Counted(32, 64)
    counted.seen = torch.tensor(7)
    torch.save(counted.state_dict(), tmp_path / "state.pt")
    checkpoint.import_file(other, tmp_path / "state.pt")
    assert other.seen == 7
    other.seen = torch.tensor(1)
    checkpoint.import_file(other, lpq.export(counted, tmp_path / "file.pt", layout="lpq").path)
    assert other.seen == 7
    with pytest.raises(CheckpointError, match="states of modules for which the model has no place: _extra_state"):
        checkpoint.import_file(nn.Linear(32, 64), tmp_path / "state.pt")


@pytest.mark.parametrize(("saved", "given", "words"), CASES)
def test_another_model_is_refused(
    tmp_path: Path, saved: Callable[[], nn.Module], given: Callable[[], nn.Module], words: str
) -> None:
    checkpoint.save(saved(), tmp_path)
    net = given()
    before = bytes_of(net)
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(net, tmp_path)
    assert equal(bytes_of(net), before)


def bytes_of(net: nn.Module) -> list[torch.Tensor]:
    if any(p.is_meta for p in net.parameters()):
        return []
    return [as_bytes(p.dequantize() if hasattr(p, "quantizer") else p).clone() for p in net.parameters()]


def test_what_is_no_model_and_no_optimizer_is_refused_at_once(tmp_path: Path) -> None:
    """Before a file is written or read: nothing is saved at the place that is loaded from."""
    net = plain()
    no_model: Any = net.state_dict()
    no_optimizer: Any = {"a": torch.optim.SGD(net.parameters(), 0.1)}
    for call in (checkpoint.save, checkpoint.save_async, checkpoint.load):
        with pytest.raises(
            CheckpointError, match=r"model must be a torch\.nn\.Module, got OrderedDict: pass the model"
        ):
            call(no_model, tmp_path / "none")
        with pytest.raises(CheckpointError, match=r"optimizer must be .*, got dict: pass .* list\(optimizers\.values"):
            call(net, tmp_path / "none", no_optimizer)
    with pytest.raises(CheckpointError, match=r"model must be a torch\.nn\.Module, got OrderedDict"):
        checkpoint.import_file(no_model, tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match=r"model must be a torch\.nn\.Module, got OrderedDict"):
        lpq.export(no_model, tmp_path / "none.pt", layout="lpq")
    assert not list(tmp_path.iterdir())


def test_one_operand_is_enough_for_a_model_that_stores_one(tmp_path: Path) -> None:
    checkpoint.save(net := stored("mxfp8"), tmp_path)
    one = stored("mxfp8", col=False)
    checkpoint.load(one, tmp_path)
    assert torch.equal(as_bytes(one[0].weight.row.data), as_bytes(net[0].weight.row.data))


def stepped(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), **options)
    net(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    return optimizer


def test_an_optimizer_is_not_cast_to_its_parameters(tmp_path: Path) -> None:
    """As ``Optimizer.load_state_dict`` casts it: an fp32 master of a bf16 weight would be lost."""
    net = plain(dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    master = torch.randn(64, 32)
    optimizer.state[net[0].weight] = {"master": master.clone(), "nested": {"a": [master + 1, 2]}}
    checkpoint.save(net, tmp_path, optimizer)
    resumed = torch.optim.SGD(net.parameters(), 0.1)
    checkpoint.load(net, tmp_path, resumed)
    state = resumed.state[net[0].weight]
    assert torch.equal(state["master"], master)
    assert torch.equal(state["nested"]["a"][0], master + 1)
    assert state["nested"]["a"][1] == 2
    assert net[0].bias not in resumed.state


def test_the_state_of_an_optimizer_is_filled_in_place(tmp_path: Path) -> None:
    net = plain()
    checkpoint.save(net, tmp_path, optimizer := stepped(net, lr=0.5))
    other = stepped(net, lr=0.1, amsgrad=True)
    before = other.state[net[0].weight]["exp_avg"]
    checkpoint.load(net, tmp_path, other)
    state = other.state[net[0].weight]
    assert state["exp_avg"] is before
    assert torch.equal(before, optimizer.state[net[0].weight]["exp_avg"])
    assert "max_exp_avg_sq" not in state, "it is the state that was saved, and no other"
    assert other.param_groups[0]["lr"] == 0.5
    checkpoint.save(net, tmp_path, torch.optim.AdamW(net.parameters()))
    checkpoint.load(net, tmp_path, other)
    assert not other.state, "it was saved before its first step"


def test_several_optimizers_of_one_model(tmp_path: Path) -> None:
    def pair(net: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([net[0].weight], lr, momentum=0.9), torch.optim.AdamW([net[0].bias], lr)]

    net = plain()
    optimizers = pair(net, 0.5)
    net(torch.randn(4, 32)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    checkpoint.save(net, tmp_path, optimizers)
    resumed = pair(net, 0.1)
    checkpoint.load(net, tmp_path, list(reversed(resumed)))
    assert [o.param_groups[0]["lr"] for o in resumed] == [0.5, 0.5]
    found, expected = (o[0].state[net[0].weight]["momentum_buffer"] for o in (resumed, optimizers))
    assert torch.equal(found, expected)


def test_an_optimizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    net = plain()
    checkpoint.save(net, tmp_path / "none")
    with pytest.raises(CheckpointError, match="it was saved without an optimizer"):
        checkpoint.load(net, tmp_path / "none", stepped(net))
    checkpoint.save(net, tmp_path / "one", stepped(net))
    checkpoint.load(net, tmp_path / "one")  # a model for evaluation
    groups = [{"params": [p]} for p in net.parameters()]
    with pytest.raises(CheckpointError, match=r"no group of the saved optimizer has the parameters .*0\.weight"):
        checkpoint.load(net, tmp_path / "one", torch.optim.AdamW(groups))
    before = bytes_of(net)
    for other in (torch.optim.SGD(net.parameters(), 0.1), torch.optim.Adam(net.parameters())):
        name = type(other).__name__
        with pytest.raises(CheckpointError, match=rf"the state of AdamW was saved, and this optimizer is {name}, "):
            checkpoint.load(net, tmp_path / "one", other)
        assert not other.state
        assert equal(bytes_of(net), before)
    stranger = torch.optim.SGD([*net.parameters(), nn.Parameter(torch.zeros(5))], 0.1)
    with pytest.raises(CheckpointError, match=r"a parameter of shape \[5\] that is none of the model's"):
        checkpoint.save(net, tmp_path / "one", stranger)
