"""The cost of gathered weights to the host: Python calls of lpq and operators that torch dispatches, and not time, with
a GPU that does nothing; and the memory that is held once weights are sharded again.

FSDP2 gathers the weights of a unit together. So there is a cost of each unit and one of each weight in it, and both
count here. A change that adds a call or an operator to the way from FSDP2's hooks to a gathered operand fails, and so
does one that adds to what is done for a weight after an optimizer's step. If it is worth its cost, raise the number and
say why.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from imitated_gpu import calls_of, imitated_gpu
from ranks import fully_shard, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile

import lpq
from lpq.distributed import alike, gather_unit
from lpq.distributed.weight_gather import Gather
from lpq.kernels.cuda import CudaKernel

SIZE, FEW, MORE, WARM = 256, 1, 2, 3
"""The rows of a weight, the units of two models, and the steps before the one that is counted."""


class Cost(NamedTuple):
    """What one step costs: gathers in forward and backward, what follows them, the layers' own calls
    (``tests/nn/test_host_cost.py``), the optimizer's step, and the measurement after it."""

    calls: float
    operators: float


COSTS = {
    # recipe: a unit of one weight; each weight of larger units; what such a unit costs beside.
    # As a CPU counts them, on which some copies of many buffers are an operator for each, and on a GPU one launch. As
    # torch 2.11 counts them, in which a unit takes 2 calls more than in 2.13. Where there are fewer, lower the
    # number.
    "fp8-current": (Cost(79, 111), Cost(35, 5), Cost(39, 98)),
    "fp8-delayed": (Cost(98, 149), Cost(51, 24), Cost(42, 99)),
    "fp8-row": (Cost(80, 112), Cost(37, 6), Cost(37, 100)),
    "mxfp8": (Cost(85, 126), Cost(39, 8), Cost(36, 98)),
    "nvfp4": (Cost(96, 123), Cost(48, 15), Cost(39, 98)),
}


class Launches(NamedTuple):
    """The launches of a step for the weights of a unit, which share a quantizer. Copies by torch are not counted."""

    of_unit: dict[str, int]
    """The launches of kernels of several matrices. They measure after an optimizer's step, encode for forward and
    backward, put in place what arrives, and make column operands of row operands. ``place`` takes 16 buffers."""
    each: float
    """The launches that a further weight adds. All of them are its layer's, which encodes x and dy and multiplies."""


LAUNCHES = {
    "fp8-current": Launches({"common amaxes": 1, "encode_several": 1, "place": 2, "transpose_several_of_bytes": 1}, 4),
    "fp8-delayed": Launches({"common amaxes": 1, "encode_several": 1, "place": 2, "transpose_several_of_bytes": 1}, 5),
    "fp8-row": Launches({"common amaxes": 2, "pair_several": 2, "place": 2}, 6),
    "mxfp8": Launches({"pair_several": 2, "place": 2}, 5),
    "nvfp4": Launches({"common amaxes": 1, "pair_several": 1, "place": 4, "transpose_several_of_nibbles": 1}, 10.5),
}
HELD = {"fp8-current": 12, "fp8-delayed": 16, "fp8-row": 4096, "mxfp8": 0, "nvfp4": 524}
"""The bytes that each weight of a unit holds beside its shard once it is sharded again: scales and statistics."""
CODES = {
    "fp8-current": SIZE * SIZE // 2, "fp8-delayed": SIZE * SIZE // 2, "nvfp4": SIZE * SIZE // 4,
    "fp8-row": SIZE * SIZE // 2 + 512, "mxfp8": SIZE * SIZE // 2 + 1024,
}  # fmt: skip
"""The bytes of each weight that is encoded for gathers in forward, and sent again in backward. A recipe that sends
other bytes in backward has them in memory that all units of a model share."""
TABLES = 2048
"""The bytes, whatever the number of weights, of tables that kernels of several matrices read."""


class Unit(nn.Sequential):
    """So many layers, whose weights FSDP2 gathers together."""

    def __init__(self, weights: int) -> None:
        super().__init__(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(weights)))


def model_of(
    recipe: str, units: int, weights: int, gathered: str | None = "high_precision", different: int = 0
) -> nn.Sequential:
    """Units of so many weights, sharded; so many of each have another recipe."""
    model = nn.Sequential(*(Unit(weights) for _ in range(units)))
    other = "fp8-row" if recipe == "mxfp8" else "mxfp8"
    for unit in model if different else ():
        for i in range(weights):
            unit[i] = lpq.convert(unit[i], other if i < different else recipe, weights=gathered)  # type: ignore
    if not different:
        lpq.convert(model, recipe, weights=gathered)  # type: ignore[arg-type]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)  # fp32 from torch 2.15 on
    for unit in model:
        fully_shard(unit, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


class Steps:
    """Steps of training such a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        self.x = torch.zeros(SIZE, SIZE, dtype=torch.bfloat16, requires_grad=True)
        self.dy = torch.zeros(SIZE, SIZE, dtype=torch.bfloat16)

    def __call__(self) -> None:
        self.model(self.x).backward(self.dy)
        self.optimizer.step()
        self.optimizer.zero_grad()


def cost_of_all(recipe: str, units: int, weights: int, gathered: str | None) -> Cost:
    """The cost of one step of a whole model."""
    gc.collect()  # each step asks all models that are alive
    step = Steps(model_of(recipe, units, weights, gathered))
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(WARM):  # what is looked up once is looked up before
            step()
        calls = calls_of(step)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            step()
    return Cost(calls, sum(e.name.startswith(("aten::", "lpq::")) for e in seen.events()))


def cost(recipe: str, weights: int, gathered: str | None = "high_precision") -> Cost:
    """The cost of one unit of so many weights."""
    few, more = (cost_of_all(recipe, units, weights, gathered) for units in (FEW, MORE))
    return Cost(*((b - a) / (MORE - FEW) for a, b in zip(few, more, strict=True)))


def costs(recipe: str, gathered: str | None = "high_precision") -> tuple[Cost, Cost, Cost]:
    """The cost of a unit of one weight, of each weight of a larger one, and of such a unit beside its weights."""
    one, three, seven = (cost(recipe, weights, gathered) for weights in (1, 3, 7))
    weight = Cost(*((b - a) / 4 for a, b in zip(three, seven, strict=True)))
    return one, weight, Cost(*(a - 3 * b for a, b in zip(three, weight, strict=True)))


@pytest.mark.parametrize("recipe", COSTS)
@on_ranks(2)
def test_no_call_and_no_operator_is_added(rank: int, recipe: str) -> None:
    with imitated_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(alike, "OFTEN", 1000.0)  # a look for changed recipes is paid once a second, and not by a step
        found = costs(recipe)
    for now, most in zip(found, COSTS[recipe], strict=True):
        assert all(a <= b for a, b in zip(now, most, strict=True)), found
        assert now.calls > 0.95 * most.calls - 1, f"lower the number: {found}"


def launches(recipe: str, weights: int, different: int = 0) -> Counter[str]:
    """The launches of a step of one unit, by kernel."""
    names = Counter[str]()
    with imitated_gpu() as gpu, torch.autograd.set_multithreading_enabled(False):
        count = gpu.launch
        step = Steps(model_of(recipe, 1, weights, different=different))
        for _ in range(WARM):
            step()

        def launch(kernel: CudaKernel, blocks: int, arguments: tuple[float, ...]) -> None:
            names[kernel.name if kernel.source.name != "amaxes.cu" else f"{kernel.source.parent.name} amaxes"] += 1
            count(kernel, blocks, arguments)

        gpu.launch = launch  # type: ignore[method-assign]
        step()
    return names


@pytest.mark.parametrize("recipe", LAUNCHES)
@on_ranks(2)
def test_a_unit_takes_as_many_launches_as_one_weight(rank: int, recipe: str) -> None:
    three, seven = launches(recipe, 3), launches(recipe, 7)
    found = {name: seven[name] for name in LAUNCHES[recipe].of_unit}
    assert all(count == three[name] for name, count in found.items() if name != "place"), (three, seven)
    assert Launches(found, (seven.total() - three.total()) / 4) == LAUNCHES[recipe], seven


@pytest.mark.parametrize("recipe", LAUNCHES)
@on_ranks(2)
def test_a_weight_of_another_quantizer_is_encoded_by_itself(rank: int, recipe: str) -> None:
    """The six others are encoded together, in each gather."""
    mixed = launches(recipe, 7, different=1)
    assert mixed["encode_several"] + mixed["pair_several"] == 2, mixed
    assert mixed["quantize"] >= 2, "the weight alone has no launch of its own"


@on_ranks(2)
def test_what_is_added_is_noticed(rank: int) -> None:
    stale = gather_unit.stale

    def twice(gathers: Sequence[Gather], shards: Sequence[Tensor]) -> list[Gather]:
        torch.empty(0).view(-1)
        stale(gathers, shards)
        return stale(gathers, shards)

    with imitated_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(alike, "OFTEN", 1000.0)  # on a busy machine a look could fall into the usual step alone
        usual = cost("mxfp8", 3)
        patch.setattr(gather_unit, "stale", twice)
        dearer = cost("mxfp8", 3)
    assert dearer.calls > usual.calls
    assert dearer.operators > usual.operators


# -------------------------------------------------------------------------- the memory of what was gathered


def _held() -> int:
    """The bytes of all memory that tensors of this process hold."""
    gc.collect()
    found = [t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


WEIGHTS, SOON = 3, 40


@pytest.mark.parametrize("recipe", COSTS)
@on_ranks(2)
def test_memory_is_freed(rank: int, recipe: str) -> None:
    with imitated_gpu():
        Steps(model_of(recipe, 1, 1))()  # what is made once in a process is made before
        step = Steps(model_of(recipe, 1, WEIGHTS))
        before = _held()
        for _ in range(WARM):
            step()
        most = WEIGHTS * (HELD[recipe] + CODES.get(recipe, 0)) + TABLES
        for _ in range(SOON):  # gloo's thread may hold what was reduced for a moment longer
            if (after := _held()) - before <= most:
                break
            time.sleep(0.05)
        step.model[0].unshard()
        during = _held()
        step.model[0].reshard()
    assert during - after > WEIGHTS * SIZE * SIZE // 4, "nothing is seen of what is gathered"
    assert after - before <= most, (after - before, most)
