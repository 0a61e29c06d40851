"""The contents of a checkpoint, saved and loaded: the policy, recipes of the step, memories, options, and the rest."""

from __future__ import annotations

import io
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpointed import POLICY, STEPS, Net, model_differences, random
from support.comparing import as_bytes
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.nn.parallel import DistributedDataParallel

import lpq
from lpq import checkpoint
from lpq.checkpoint import CheckpointError, CheckpointWarning
from lpq.optim import MasterWeights, load_high_precision

SMALL = {"mx": "mxfp8"}


class Counter(nn.Module):
    """A module with a state of its own beside its tensors."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen = {"seen": seen}

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state


def gpt(policy: Any = "fp8-delayed", steps: int | None = None, **how: Any) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64))
    return lpq.convert(net, policy, steps=steps, **how)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        lpq.set_step(net, step)
        net(random((16, 64), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


DELAYED_THEN_BLOCKS = {
    "rules": [
        {"match": "2", "until": 0.4, "recipe": "skip"}, {"match": "*", "until": 0.6, "recipe": "fp8-delayed"},
        {"match": "*", "recipe": "mxfp8()"},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "saved_at"),
    [
        *((torch.optim.AdamW, step) for step in (2, 4, 6, 8)),
        (torch.optim.SGD, 4), (torch.optim.Adafactor, 6), (torch.optim.NAdam, 8),
    ],
)  # fmt: skip
def test_a_run_that_goes_on_is_the_uninterrupted_run(tmp_path: Path, make: Any, saved_at: int) -> None:
    """At the steps where the recipe changes, too, and with an optimizer that took no step yet."""
    net = gpt(DELAYED_THEN_BLOCKS, 10)
    optimizer = make([{"params": list(net[0].parameters())}, {"params": list(net[2:].parameters()), "lr": 0.01}], 0.02)
    train(net, optimizer, range(saved_at))
    checkpoint.save(net, tmp_path, optimizer, step=saved_at)
    train(net, optimizer, range(saved_at, 10))

    other = gpt(DELAYED_THEN_BLOCKS, 10)
    groups = [{"params": list(other[2:].parameters())}, {"params": list(other[0].parameters())}]
    resumed = make(groups, 0.5)
    info = checkpoint.load(other, tmp_path, resumed)
    assert [g["lr"] for g in resumed.param_groups] == [0.01, 0.02]
    train(other, resumed, range(info.step or 0, 10))
    assert model_differences(other, net) == {}


class InBf16(torch.optim.Optimizer):
    """Its moments are in bf16, whatever the weights are in."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            moment = self.state[p].setdefault("moment", torch.zeros_like(p, dtype=torch.bfloat16))
            moment.mul_(0.9).add_(p.grad)
            p.sub_(moment, alpha=0.1)


@pytest.mark.parametrize("masters", [False, True])
def test_moments_keep_their_dtype(tmp_path: Path, masters: bool) -> None:
    """``load_state_dict`` of torch's optimizers would give them that of the parameters."""

    def begun() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        net = lpq.convert(nn.Sequential(nn.Linear(64, 64)), "fp8-current", weights="quantized" if masters else None)
        return net, lpq.optim.MasterWeights(InBf16(net.parameters())) if masters else InBf16(net.parameters())

    def run(net: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for number in range(3):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number))
            loss = (net(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    net, optimizer = begun()
    run(net, optimizer)
    checkpoint.save(net, tmp_path, optimizer, step=3)
    other, its = begun()
    checkpoint.load(other, tmp_path, its)
    states = (its.optimizer if masters else its).state.values()
    assert [state["moment"].dtype for state in states] == [torch.bfloat16] * 2
    assert run(other, its) == run(net, optimizer)


def test_the_policy_and_the_length_of_the_run_come_back(tmp_path: Path) -> None:
    policy = lpq.policy(POLICY)
    checkpoint.save(Net(1, 64, SMALL), tmp_path, step=3)
    info = checkpoint.info(tmp_path)
    assert (info.policy, info.steps, info.step) == (policy, STEPS, 3)
    assert info.policies == {"": policy}
    assert checkpoint.info(tmp_path / "step-00000003").policy == policy
    said = json.loads((tmp_path / "step-00000003" / "lpq.json").read_text())
    assert lpq.policy(said["conversions"][""]["policy"]) == policy
    assert said["quantized"]["model.stored.mx.weight"]["quantizer"] == "mxfp8"
    assert said["formats"]["mxfp8"]["distribution"] == "lpq"


def test_another_policy_is_refused_with_the_remedy(tmp_path: Path) -> None:
    checkpoint.save(gpt("mxfp8"), tmp_path, step=3)
    for other in (gpt("nvfp4"), nn.Sequential(*gpt("mxfp8"))):  # the latter is a model that nobody converted
        before = [as_bytes(p).clone() for p in other.parameters()]
        with pytest.raises(CheckpointError, match=r"(?s)another policy.*mxfp8.*lpq\.checkpoint\.info\(path\)\.policy"):
            checkpoint.load(other, tmp_path)
        assert all(torch.equal(as_bytes(p), b) for p, b in zip(other.parameters(), before, strict=True))
    info = checkpoint.info(tmp_path)
    net = lpq.convert(nn.Sequential(*gpt("bf16")), info.policy, steps=info.steps)
    assert checkpoint.load(net, tmp_path).step == 3


@pytest.mark.parametrize(("steps", "same"), [(10, True), (20, False)])
def test_the_length_of_a_run_is_part_of_a_policy_with_fractions(tmp_path: Path, steps: int, same: bool) -> None:
    checkpoint.save(gpt(DELAYED_THEN_BLOCKS, 10), tmp_path)
    checkpoint.save(gpt("mxfp8", 10), tmp_path / "no fractions")
    checkpoint.load(gpt("mxfp8", steps), tmp_path / "no fractions")
    if same:
        checkpoint.load(gpt(DELAYED_THEN_BLOCKS, steps), tmp_path)
    else:
        with pytest.raises(CheckpointError, match=r"(?s)for 10 steps.*for 20 steps"):
            checkpoint.load(gpt(DELAYED_THEN_BLOCKS, steps), tmp_path)


def test_going_on_under_another_policy_on_purpose(tmp_path: Path) -> None:
    net = gpt("fp8-delayed")
    train(net, torch.optim.SGD(net.parameters(), 0.1), range(3))
    checkpoint.save(net, tmp_path)
    blocks = gpt("mxfp8")
    with pytest.raises(CheckpointError, match="load: any_policy='no': it is True or False"):
        checkpoint.load(blocks, tmp_path, any_policy="no")  # type: ignore[arg-type]  # which counted as true
    checkpoint.load(blocks, tmp_path, any_policy=True)
    assert torch.equal(blocks[0].weight, net[0].weight)
    checkpoint.save(blocks, tmp_path)
    back = gpt("fp8-delayed")
    train(back, torch.optim.SGD(back.parameters(), 0.1), range(3))
    assert back[0].x_amax_history.any()
    checkpoint.load(back, tmp_path, any_policy=True)
    assert not back[0].x_amax_history.any(), "what another run remembered is forgotten"
    assert torch.equal(back[0].weight, net[0].weight)


def test_layers_made_by_hand_must_have_the_recipes_that_they_had(tmp_path: Path) -> None:
    checkpoint.save(nn.Sequential(lpq.nn.Linear(8, 8, recipe="mxfp8")), tmp_path)
    checkpoint.load(nn.Sequential(lpq.nn.Linear(8, 8, recipe="mxfp8")), tmp_path)
    with pytest.raises(CheckpointError, match=r"other recipes when they were saved: 0 \(mxfp8\(\), and x=nvfp4"):
        checkpoint.load(nn.Sequential(lpq.nn.Linear(8, 8, recipe="nvfp4")), tmp_path)


def test_buffers_of_users_are_no_memories(tmp_path: Path) -> None:
    net, other = gpt(), gpt()
    checkpoint.save(net, tmp_path / "without")
    for found, value in ((net, 3.0), (other, 1.0)):
        found[0].register_buffer("temperature", torch.tensor([value]))
    with pytest.raises(CheckpointError, match=r"it has nothing for these tensors of the model: 0\.temperature"):
        checkpoint.load(other, tmp_path / "without")
    assert other[0].temperature == 1
    checkpoint.load(other, checkpoint.save(net, tmp_path / "with"))
    assert other[0].temperature == 3
    lpq.export(net, tmp_path / "decoded.pt", layout="lpq", decode=True)
    assert torch.load(tmp_path / "decoded.pt", weights_only=True)["model"]["0.temperature"] == 3


def test_loading_that_fails_leaves_recipes_and_memories(tmp_path: Path) -> None:
    rules = [{"match": ["*"], "recipe": "fp8-delayed", "until": 2}, {"match": ["*"], "recipe": "mxfp8"}]
    later, net = gpt({"rules": rules}, 10), gpt({"rules": rules}, 10)
    adam, sgd = torch.optim.Adam(later.parameters()), torch.optim.SGD(net.parameters(), lr=0.1)
    train(later, adam, range(3, 4))
    checkpoint.save(later, tmp_path, adam)
    train(net, sgd, range(1))
    before = {name: memory.clone() for name, memory in net[0].memories().items()}
    assert any(memory.any() for memory in before.values())
    with pytest.raises(CheckpointError):
        checkpoint.load(net, tmp_path, sgd)
    assert net[0].recipe.title == "fp8-delayed"
    assert all(torch.equal(memory, before[name]) for name, memory in net[0].memories().items())
    train(net, sgd, range(1, 2))


def test_modules_bring_state_of_their_own(tmp_path: Path) -> None:
    checkpoint.save(nn.Sequential(nn.Linear(4, 4), Counter(7)), tmp_path)
    net = nn.Sequential(nn.Linear(4, 4), Counter(0))
    checkpoint.load(net, tmp_path)
    assert net[1].seen == {"seen": 7}


def test_extra_is_what_can_be_read_without_running_code(tmp_path: Path) -> None:
    extra = {"rng": torch.get_rng_state(), "scheduler": {"last_lr": [0.1]}, "position": (3, None), "text": "ü"}
    checkpoint.save(nn.Linear(2, 2), tmp_path, extra=extra)
    found = checkpoint.load(nn.Linear(2, 2), tmp_path).extra
    assert torch.equal(found.pop("rng"), extra.pop("rng"))
    assert found == extra
    for wrong, words in (
        (Path, "extra holds a type"),
        ({"hooks": [1, lambda: 2]}, r"extra holds a function at \['hooks'\]\[1\]"),
        ({"path": tmp_path}, r"extra holds a PosixPath at \['path'\]"),
        ({"bag": {1, 2}, "made": Fraction(1, 2)}, r"extra holds a Fraction at \['made'\]"),
    ):
        with pytest.raises(CheckpointError, match=rf"saved.*: {words}, which torch.load.*would not read: save numbers"):
            checkpoint.save(nn.Linear(2, 2), tmp_path, extra=wrong)
    assert checkpoint.load(nn.Linear(2, 2), tmp_path).extra["text"] == "ü"


def test_what_is_known_of_a_checkpoint_reads_well(tmp_path: Path) -> None:
    path = checkpoint.save(Net(1, 64, SMALL), tmp_path, step=3, extra={"epoch": 2, "rng": torch.zeros(10_000)})
    (tmp_path / "step-00000004.partial").mkdir()
    with pytest.warns(checkpoint.CheckpointWarning):
        info = checkpoint.info(tmp_path)
    first, *lines = str(info).splitlines()
    assert first == f"{path}, after step 3"
    assert "  1 tensors stored as mxfp8" in lines
    assert "  1 layer with mxfp8()" in lines
    assert any(line.startswith("  extra: {'epoch': 2, ") for line in lines)
    assert "refused: it was never finished" in lines[-1]
    assert len(lines) < 12
    assert max(map(len, lines)) < 200
    assert "quantized=" in repr(info)
    assert str(checkpoint.info(checkpoint.save(nn.Linear(2, 2), tmp_path / "plain"))) == str(tmp_path / "plain")


def test_wrappers_leave_no_trace_in_the_names(tmp_path: Path) -> None:
    net = Net(1, 64, SMALL)
    net.plain.compile()
    net.stored["mx"] = torch.compile(net.stored["mx"])  # type: ignore[assignment]
    checkpoint.save(torch.compile(net), tmp_path)
    loaded = Net(2, 64, SMALL)
    checkpoint.load(loaded, tmp_path)
    assert model_differences(loaded, Net(1, 64, SMALL)) == {}


def test_a_replicated_model_is_saved_as_itself(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        net, bare, replicated = (nn.Linear(4, 4) for _ in range(3))
        checkpoint.save(DistributedDataParallel(net), tmp_path / "replicated")
        checkpoint.load(bare, tmp_path / "replicated")
        checkpoint.save(net, tmp_path / "bare")
        checkpoint.load(DistributedDataParallel(replicated), tmp_path / "bare")
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(bare.weight, net.weight)
    assert torch.equal(replicated.weight, net.weight)


def test_others_read_it_without_lpq(tmp_path: Path) -> None:
    """Its tensors are DCP's, each plain, and ``weights_only=True`` reads the rest."""
    net = Net(1, 64, SMALL)
    path = checkpoint.save(net, tmp_path, step=1)
    weight = net.stored["mx"].weight
    index = FileSystemReader(path).read_metadata().state_dict_metadata
    assert index["model.stored.mx.weight.col.data"].size == (96, 64)
    assert "model.stored.mx.weight" not in index
    data = torch.empty(64, 96, dtype=torch.float8_e4m3fn)
    dcp.load({"model": {"stored.mx.weight.row.data": data}}, checkpoint_id=path)
    assert torch.equal(as_bytes(data), as_bytes(weight.row.data))
    torch.load(io.BytesIO((path / "extra.pt").read_bytes()), weights_only=True)


def test_what_was_derived_from_a_weight_is_known_to_be_out_of_date(tmp_path: Path) -> None:
    checkpoint.save(net := Net(1, 64, SMALL), tmp_path)
    versions = {name: p._version for name, p in net.named_parameters()}
    checkpoint.load(net, tmp_path)
    assert all(p._version > versions[name] for name, p in net.named_parameters())
    checkpoint.save(plain := gpt("mxfp8"), tmp_path)
    with pytest.raises(RuntimeError, match="the weight was changed while its encoded form is held"):
        _load_into_a_held_model(tmp_path, plain)


def _load_into_a_held_model(path: Path, model: nn.Module) -> None:
    with lpq.hold_weights(model):
        checkpoint.load(model, path)
        model(torch.zeros(32, 64))
        pytest.fail("the pass must say it")


def test_a_checkpoint_of_a_later_lpq_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(nn.Linear(2, 2), tmp_path, step=1)
    with monkeypatch.context() as later:
        later.setattr(checkpoint.description.Description, "json", lambda self: json.dumps({"version": 99}).encode())
        newest = checkpoint.save(nn.Linear(2, 2), tmp_path, step=2)
    with pytest.raises(
        CheckpointError, match="version 99 of the format, and this lpq reads versions up to 2: pip install"
    ):
        checkpoint.load(nn.Linear(2, 2), newest)


@pytest.mark.parametrize("wrong", [{"step": -1}, {"step": True}, {"keep": 1}, {"step": 1, "keep": 0}])
def test_arguments_are_judged(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"save: step=(-1|True): it is a whole number from 0 on|keep="):
        checkpoint.save(nn.Linear(2, 2), tmp_path, **wrong)


def test_a_refused_checkpoint_is_a_warning_of_its_own_kind() -> None:
    assert issubclass(CheckpointWarning, UserWarning)


def test_a_half_of_what_a_quantizer_remembers_starts_anew(tmp_path: Path) -> None:
    def net() -> nn.Module:
        return lpq.convert(nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)), "fp8-delayed")

    remembers, other = net(), net()
    for each in (remembers, other):
        for memory in [*each[0].memories().values(), *each[1].memories().values()]:
            memory.fill_(3.0)
    remembers[0]._non_persistent_buffers_set.add("x_amax")
    path = checkpoint.save(remembers, tmp_path / "half")
    torch.save(remembers.state_dict(), tmp_path / "half.pt")
    for load in (lambda: checkpoint.load(other, path), lambda: checkpoint.import_file(other, tmp_path / "half.pt")):
        other[0].x_amax.fill_(3.0)
        with pytest.warns(CheckpointWarning, match=r"lacks 0\.x_amax, and has other states .* start anew"):
            load()
        assert not other[0].x_amax.any()
        assert not other[0].x_amax_history.any()
        assert other[0].w_amax_history.any()
        assert other[1].x_amax_history.any()


# ---------------------------------------------------------------------------------------------- shared layers


def twice(recipe: str | None = None, **how: Any) -> nn.Sequential:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    net = nn.Sequential(layer, nn.ReLU(), layer)
    return lpq.convert(net, recipe, **how) if recipe is not None else net


def test_memories_come_and_go(tmp_path: Path) -> None:
    remembers = twice("fp8-delayed")
    remembers(torch.randn(8, 64)).sum().backward()
    checkpoint.save(twice(), tmp_path / "without")
    checkpoint.load(remembers, tmp_path / "without", any_policy=True)
    assert not remembers[0].x_amax_history.any()
    remembers(torch.randn(8, 64)).sum().backward()
    checkpoint.save(remembers, tmp_path / "with")
    checkpoint.load(twice("fp8-current"), tmp_path / "with", any_policy=True)
    lpq.export(remembers, tmp_path / "decoded.pt", layout="lpq", decode=True)
    names = torch.load(tmp_path / "decoded.pt", weights_only=True)["model"]
    assert list(names) == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize("given", [False, True])
def test_a_weight_takes_its_master(given: bool, tmp_path: Path) -> None:
    net = twice("mxfp8", weights="quantized")
    optimizer = MasterWeights(torch.optim.SGD(net.parameters(), lr=0.1))
    load_high_precision(net, twice().state_dict(), optimizer)
    net(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    checkpoint.save(net, tmp_path, optimizer)
    plain = twice()
    checkpoint.load(plain, tmp_path, torch.optim.SGD(plain.parameters(), lr=0.1) if given else None, any_policy=True)
    assert torch.equal(plain[0].weight, optimizer.masters[net[0].weight])
    assert not torch.equal(plain[0].weight, net[0].weight.dequantize())


def test_the_package_names_the_files_that_lpq_adds(tmp_path: Path) -> None:
    path = checkpoint.save(lpq.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8"), tmp_path / "one")
    files = {file.name for file in path.iterdir() if file.suffix != ".distcp"} - {".metadata"}
    assert {*re.findall(r"``(\w+\.(?:json|pt))``", checkpoint.__doc__ or "")} == files
