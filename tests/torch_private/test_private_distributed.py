"""Private names of torch.distributed are there, and do what is said of them, in torch 2.11 and 2.13."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import imitated_ranks, on_ranks
from torch import nn
from torch._inductor.lowering import lowerings
from torch._inductor.utils import run_and_get_code
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.nn.parallel import DistributedDataParallel

from lpq.torch_private import checkpoints, collectives, compiling, distributed, dtensor, fsdp, styles, wrappers
from lpq.torch_private.dispatch import TorchDispatchMode, schema_of
from lpq.torch_private.tensors import local_part, local_parts, version_of


class Asking(nn.Module):
    """Writes down in forward which replica it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.found: list[object] = []
        self.outlasts: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.append(distributed.active_replica())
        self.outlasts.append(distributed.outlasts_ranks())
        return x * self.weight

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: object) -> None:
        pass


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators of collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace in distributed.COLLECTIVES:
            self.names.append(schema_of(func).name.partition("::")[2])
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_two_ranks(rank: int) -> None:
    world = dist.group.WORLD
    assert world is not None
    assert distributed.group_named(world.group_name) is world
    store = distributed.job_store()
    store.add("came", 1)
    dist.barrier()
    assert isinstance(store, distributed.Store)
    assert (store.add("came", 0), distributed.job_timeout(), distributed.is_imitated()) == (2, 120, False)
    mesh = init_device_mesh("cpu", (2,))
    mine = torch.full((2, 3), float(rank))
    whole = dtensor.dtensor_over(mine, mesh, (Shard(0),), (4, 3))
    assert local_part(whole) is mine
    assert [id(part) for part in local_parts([whole, mine])] == [id(mine)] * 2
    assert (whole.shape, whole.stride(), whole.full_tensor()[:, 0].tolist()) == ((4, 3), (3, 1), [0, 0, 1, 1])
    name = mesh.get_group().group_name
    begun = collectives.begin_all_gather([mine, mine[0].to(torch.uint8)], 2, name)
    first, second = collectives.arrived(begun)
    assert (first[:, 0].tolist(), second.tolist()) == ([0, 0, 1, 1], [0, 0, 0, 1, 1, 1])
    assert collectives.all_reduce(mine, "max", name).max() == 1
    summed = collectives.finish(collectives.begin_all_reduce(mine, "sum", name))
    assert summed.unique().tolist() == [1.0]
    assert mine.max() == rank
    scattered = collectives.finish(collectives.begin_reduce_scatter(mine + 1, 2, name))
    assert scattered.tolist() == [[3.0] * 3]
    swapped = [2 * rank, 2 - 2 * rank]  # nothing to itself, both rows to the other
    assert torch.equal(collectives.all_to_all(mine, swapped, swapped, name), 1 - mine)
    other = mine + 1
    alike = dtensor.dtensor_as(whole, other)
    assert local_part(alike) is other
    assert (alike.shape, alike.placements, alike.device_mesh) == (whole.shape, whole.placements, whole.device_mesh)
    assert local_part(DTensor.from_local(mine, mesh, (Shard(0),))) is not mine, "else there were no need for it"

    module = Asking()
    replica = DistributedDataParallel(module)
    replica(torch.ones(2))
    module(torch.ones(2))
    assert module.found == [replica, None]
    for options in ({}, {"throw_on_early_termination": True}, {"enable": False}):
        with replica.join(**options):  # type: ignore[no-untyped-call]
            replica(torch.ones(2))
    assert module.outlasts == [False, False, True, False, False]

    group = dist.group.WORLD
    assert group is not None
    assert torch.device("cpu") in distributed.device_types(group)
    assert torch.device("meta") not in distributed.device_types(group)
    with Seen() as seen:
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
        dist.reduce_scatter_tensor(torch.empty(1), torch.ones(2))
        dist.all_reduce(torch.ones(1))
        gathered = whole.full_tensor()
    assert gathered.shape == (4, 3)
    kinds = [distributed.KINDS[name] for name in seen.names if name not in distributed.SILENT]
    assert kinds[:3] == ["all_gather", "reduce_scatter", "all_reduce"]


class Doubling(dist.ProcessGroup):
    """A group of one rank, written in Python, whose sum is twice what it should be."""

    def getBackendName(self) -> str:
        return "doubling"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        assert opts.reduceOp == dist.ReduceOp.SUM
        tensors[0].mul_(2)
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(tensors)
        return distributed.work_of(future)


def test_operators_find_a_group_in_python_by_its_name() -> None:
    group = Doubling(0, 1)  # type: ignore[call-arg]
    distributed.name_group("doubling", group)
    x = torch.ones(2)
    assert (collectives.all_reduce(x, "sum", "doubling").tolist(), x.tolist()) == ([2.0, 2.0], [1.0, 1.0])
    distributed.forget_group("doubling")
    with pytest.raises(RuntimeError, match="doubling"):
        collectives.all_reduce(x, "sum", "doubling")


@pytest.mark.starts
def test_inductor_compiles_an_operator_as_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps what is sent until then."""
    library = torch.library.Library("lpq_test", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("wait(Tensor begun) -> Tensor")  # type: ignore[no-untyped-call]
    torch.library.register_fake("lpq_test::wait", torch.empty_like, lib=library)
    operator = torch.ops.lpq_test.wait.default
    monkeypatch.setitem(lowerings, operator, None)
    compiling.compile_as_wait(operator)

    with imitated_ranks():
        assert dist.group.WORLD is not None
        group = dist.group.WORLD.group_name

        def scatter(x: torch.Tensor) -> Any:
            return operator(collectives.begin_reduce_scatter(x + 1, 2, group)) + 1

        _, (code,) = run_and_get_code(torch.compile(scatter, fullgraph=True), torch.zeros(4))
    begun, waits = code.index("reduce_scatter_tensor.default(buf0"), code.index("wait_tensor.default(")
    assert begun < waits < code.index("del buf0")
    assert "ops.lpq_test" not in code[begun:]


def test_memory_is_taken_and_given_back_without_a_count() -> None:
    x = torch.ones(4)
    before = version_of(x)
    fsdp.free([x])
    assert (x.shape, x.untyped_storage().size()) == ((4,), 0)
    fsdp.allocate([x])
    x.data.fill_(2.0)
    assert (x.tolist(), version_of(x)) == ([2.0] * 4, before)


class Doubled(styles.LayerStyle, parallel.ColwiseParallel):
    """A style that doubles the inputs of a layer."""

    @classmethod
    def lay_out(cls, module: nn.Module, inputs: Any, given: Any, wanted: Any, mesh: DeviceMesh) -> Any:
        assert (given, wanted, mesh.size()) == ((Shard(0),), (Replicate(),), 2)
        return DTensor.from_local(inputs[0] * 2, mesh, given).redistribute(placements=wanted)


class Halved(styles.InputStyle):
    """A style that halves the inputs of a module, and lays them out as torch does."""

    def lay_out(self, input: Any, mesh: DeviceMesh, given: Any, wanted: Any) -> Any:
        return super().lay_out(input / 2, mesh, given, wanted)


@on_ranks(2)
def test_styles_lay_out_inputs(rank: int) -> None:
    mesh, mine = init_device_mesh("cpu", (2,)), torch.full((1, 4), float(rank + 1))
    plain = nn.Linear(4, 2, bias=False)
    nn.init.ones_(plain.weight)
    twice = parallel.parallelize_module(plain, mesh, Doubled(input_layouts=Shard(0)))
    assert twice(mine).tolist() == [[8.0], [16.0]]
    assert hasattr(twice, styles.SHARED_OUT)
    assert not hasattr(nn.Linear(4, 2), styles.SHARED_OUT)
    with pytest.raises(RuntimeError, match="once"):
        parallel.parallelize_module(twice, mesh, parallel.ColwiseParallel())
    style = Halved(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True)
    half = parallel.parallelize_module(nn.Identity(), mesh, style)
    assert half(mine).tolist() == [[0.5] * 4, [1.0] * 4]


def test_wrapped_modules_have_these_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(torch.compile(nn.Linear(2, 2)), checkpoint_wrapper(nn.Linear(2, 2)))
    inside = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert inside == [f"{i}.{name}" for i, name in enumerate(wrappers.WRAPPED)]


def test_a_checkpoint_wrapper_is_torchs() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped = checkpoint_wrapper(nn.Linear(2, 2))
    assert isinstance(wrapped, distributed.CheckpointWrapper)


def test_files_of_torch_have_these_names(tmp_path: Path) -> None:
    """An index that DCP writes has such places, and a state dict has that key."""
    model = Asking()
    assert checkpoints.EXTRA_STATE in model.state_dict()
    dist.checkpoint.save({"x": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    index = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert {type(place) for place in index.storage_data.values()} == {checkpoints.StorageInfo}
