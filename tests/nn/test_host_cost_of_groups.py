"""The cost of a grouped layer to the host: calls, operators, buffers and launches, and not time.

By kernels, a pass costs the same whatever the number of groups. By reference, as on a CPU, it costs as much for each
group. The numbers are exact: where one falls, lower it here, and where one must rise, say why.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from imitated_gpu import HOPPER, Gpu, calls_of
from lpq_fp8 import groups_hopper, tensor_maps
from support.modes import Watched
from test_host_cost import LAUNCHES
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import lpq
from lpq.distributed.alike import description, digest
from lpq.kernels import tiles
from lpq.kernels.cuda import CudaKernel
from lpq.kernels.fresh import fresh
from lpq.nn import GroupedLinear, functional, grouped_step
from lpq.operations import group_tiles, groups

ROWS, FEATURES, SMALL = 4096, 2048, 64
"""The rows and features of a layer, and the features where references encode."""
WARM = 2
"""The passes before those that are counted."""


class Cost(NamedTuple):
    """What one forward and backward costs."""

    operators: int
    """All that torch dispatches, and that operators dispatch (as torch 2.13 counts them)."""
    buffers: int
    launches: int
    calls: int
    """Python calls of lpq, but for the launches."""


BY_KERNELS = {
    "fp8-current": Cost(7, 19, 17, 57),
    "fp8-row": Cost(7, 22, 16, 52),
    "fp8-block": Cost(7, 16, 10, 43),
    "mxfp8": Cost(22, 12, 12, 49),
    "mxfp4": Cost(39, 12, 11, 47),
    "nvfp4": Cost(39, 17, 17, 59),
}
OF_CODES = {
    # Column operands are made of codes. These are decoded in one launch, by functions of which some are not bound.
    "mxfp8-one-copy": Cost(51, 23, 21, 187),
    "nvfp4-eden": Cost(145, 39, 29, 174),
}
RAGGED = 320
"""Features that are no multiple of the 128 columns that MS-EDEN rotates together, as the 2880 of GPT-OSS's experts.
The numbers are the same with those, where what is left over takes seconds to rotate."""
OF_RAGGED = Cost(2120, 164, 26, 1049)
"""By ``nvfp4-eden``: the last columns of dy and of the weight are rotated by torch's operations."""
BY_REFERENCE = {
    # recipe: a layer of two groups, and the calls of each further one.
    "fp8-current": (Cost(238, 59, 22, 483), 159),
    "mxfp8": (Cost(279, 65, 24, 578), 200),
    "nvfp4": (Cost(373, 105, 36, 635), 225),
}


DESCRIBED = 13
"""The calls of describing two layers of experts for the other ranks."""


@pytest.fixture
def with_kernels(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU for groups as well, which takes tensors of the CPU for its own."""

    def product(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        gpu.launches += 1
        return a.new_empty((len(a), b.shape[-1]) if b.dim() == 3 else (len(offs), len(a), b.shape[1]))

    choose = grouped_step.decoded_at_once
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(grouped_step, "decoded_at_once", lambda *how: choose(*how[:-1], torch.device("cuda", 0)))
    monkeypatch.setattr(group_tiles, "serves", lambda *kernel_and_device: True)
    monkeypatch.setattr(group_tiles, "grouped_mm", product)
    monkeypatch.setattr(tensor_maps, "of_bytes", lambda *how: (0,) * 16)
    monkeypatch.setattr(groups_hopper, "multiprocessors", lambda device: 132)
    return gpu


def cost(recipe: str, groups: int, gpu: Gpu, rows: int = ROWS, features: int = FEATURES) -> Cost:
    """What one pass of a layer of so many groups costs."""
    layer = GroupedLinear(groups, features, features, bias=False, recipe=recipe, dtype=torch.bfloat16)
    weight, x = layer.weight, torch.zeros(rows, features, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.zeros(rows, features, dtype=torch.bfloat16)
    ends = torch.arange(1, groups + 1, dtype=torch.int32) * (rows // groups)

    def step() -> None:
        layer(x, ends).backward(dy)
        x.grad = weight.grad = None

    for _ in range(WARM):  # what is looked up once is looked up before
        step()
    calls = calls_of(step)
    before = gpu.launches, gpu.allocated
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    names = [e.name for e in seen.events() if e.name.startswith(("aten::", "lpq::"))]
    buffers = sum(name in ("aten::empty", "aten::empty_strided") for name in names) + gpu.allocated - before[1]
    return Cost(len(names), buffers, gpu.launches - before[0], calls)


TWICE = ("fp8-current", "mxfp8", "mxfp8-one-copy")
"""The recipes of which twice as many groups are counted, too. A cost for each group of another recipe shows with 4."""


@pytest.mark.parametrize(
    ("recipe", "groups"), [*((recipe, 4) for recipe in [*BY_KERNELS, *OF_CODES]), *((recipe, 8) for recipe in TWICE)]
)
def test_by_kernels_nothing_is_added_whatever_the_number_of_groups(recipe: str, groups: int, with_kernels: Gpu) -> None:
    assert cost(recipe, groups, with_kernels) == (BY_KERNELS | OF_CODES)[recipe]


@pytest.mark.parametrize("groups", [4, 8])
def test_what_a_rotation_leaves_over_is_rotated_for_all_groups_at_once(groups: int, with_kernels: Gpu) -> None:
    assert cost("nvfp4-eden", groups, with_kernels, features=RAGGED) == OF_RAGGED


def test_by_kernels_a_grouped_layer_takes_at_most_twice_the_calls_of_a_plain_one() -> None:
    """Both numbers are held by other tests. Features that MS-EDEN cannot rotate together are the exception, as
    ``OF_RAGGED`` says."""
    kernels = BY_KERNELS | OF_CODES
    assert [recipe for recipe, cost in kernels.items() if cost.calls > 2 * LAUNCHES[recipe, HOPPER][-1]] == []


@pytest.mark.parametrize("recipe", [*BY_KERNELS, *OF_CODES, "x=fp8(scaling=row), w=mxfp8, dy=mxfp8"])
def test_a_mode_around_backward_takes_what_kernels_kept(recipe: str, with_kernels: Gpu) -> None:
    """Operands that exist decoded only, of which operators know nothing, amaxes of a stack, and codes."""
    layer = GroupedLinear(4, SMALL, SMALL, bias=False, recipe=recipe, dtype=torch.bfloat16)
    x = torch.zeros(4 * SMALL, SMALL, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x, torch.arange(1, 5, dtype=torch.int32) * SMALL)
    with Watched():
        dx, dw = torch.autograd.grad(y, (x, layer.weight), torch.zeros_like(y))
    assert (dx.shape, dw.shape) == (x.shape, layer.weight.shape)


class Fused(nn.Module):
    """Experts with transformers' interface, without a gate."""

    num_experts, has_gate, has_bias, is_transposed, is_concatenated = 4, False, False, False, True

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.zeros(4, SMALL, SMALL, dtype=torch.bfloat16))
        self.down_proj = nn.Parameter(torch.zeros(4, SMALL, SMALL, dtype=torch.bfloat16))

    def act_fn(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("recipe", BY_KERNELS)
def test_fused_experts_cost_what_two_grouped_layers_do(recipe: str, with_kernels: Gpu) -> None:
    fused: Any = lpq.convert(nn.ModuleDict({"experts": Fused()}), recipe)["experts"]  # type: ignore[index]
    layers = [GroupedLinear(4, SMALL, SMALL, bias=False, recipe=recipe, dtype=torch.bfloat16) for _ in range(2)]
    x = torch.zeros(4 * SMALL, SMALL, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.arange(1, 5, dtype=torch.int32) * SMALL

    def of_fused() -> None:
        fused.multiply("down_proj", fused.multiply("up_proj", x, ends), ends).sum().backward()

    def of_layers() -> None:
        layers[1](layers[0](x, ends), ends).sum().backward()

    for step in [of_fused, of_layers] * WARM:
        step()
    forward = 2  # GroupedLinear's own, which calls multiply
    assert calls_of(of_fused) == calls_of(of_layers) - forward


@pytest.mark.parametrize("recipe", BY_REFERENCE)
def test_by_reference_nothing_is_added_for_any_group(recipe: str, gpu: Gpu) -> None:
    two, four = (cost(recipe, groups, gpu, 4 * SMALL, SMALL) for groups in (2, 4))
    assert (two, (four.calls - two.calls) / 2) == BY_REFERENCE[recipe]


@pytest.mark.parametrize("place", ["lpq.nn.grouped_linear.check_tensors", "lpq.nn.multiply._gradients"])
def test_what_is_added_is_noticed(place: str, with_kernels: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, original, spare, times = BY_KERNELS["fp8-current"], pkgutil.resolve_name(place), torch.zeros(1), 0
    more: list[tuple[Cost, Callable[[], Any]]] = [
        (Cost(1, 0, 0, 0), spare.detach),
        (Cost(0, 1, 0, 0), lambda: with_kernels.allocate((1,), (1,), torch.float32)),
        (Cost(0, 0, 1, 0), lambda: tiles.FINISH.launch(0, (), 1, 0, 0, 0)),
        (Cost(0, 0, 0, 1), lambda: fresh((1,), torch.float32)),
    ]

    def dearer(*args: Any, **how: Any) -> Any:
        nonlocal times
        times += 1
        extra()
        return original(*args, **how)

    monkeypatch.setattr(place, dearer)
    for costs, one in more:
        extra, times = one, 0
        found = cost("fp8-current", 4, with_kernels)
        each, left = divmod(times, WARM + 2)
        assert each > 0
        assert left == 0
        assert found == tuple(before + each * added for before, added in zip(usual, costs, strict=True))


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8"])
def test_another_number_of_rows_loads_no_kernel(
    recipe: str, with_kernels: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are given another number in each step. A kernel keeps what it loaded, so it must be the same object. The
    weight is the same, and what encodes it is bound once."""
    stacks: list[Any] = []
    bound, bind, bind_any = set(), CudaKernel.bind, groups.bind
    monkeypatch.setattr(CudaKernel, "bind", lambda self, *how: (bound.add((self, how[1])), bind(self, *how))[1])
    monkeypatch.setattr(groups, "bind", lambda e, **how: (e.sections.stack and stacks.append(e), bind_any(e, **how))[1])
    cost(recipe, 4, with_kernels)
    once = len(bound), len(stacks)
    cost(recipe, 4, with_kernels, rows=2 * ROWS)
    assert once == (len(bound), len(stacks))
    assert min(once) > 0


def test_a_layer_finds_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find one among those of all layers takes a hash of the whole plan, five microseconds."""
    layer, x = GroupedLinear(2, 32, 32, recipe="mxfp8"), torch.ones(8, 32)
    layer(x, [4, 4])
    monkeypatch.setattr(functional, "bind_few", None)
    layer(x, [3, 5])
    layer.recipe = "fp8-row"
    with pytest.raises(TypeError, match="not callable"):
        layer(x, [3, 5])


def test_experts_are_described_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share them out do so when a recipe changes, and torch's walk over parameters is half of the time."""
    module = nn.ModuleDict({n: GroupedLinear(2, 32, 32, bias=False, recipe="mxfp8") for n in ("up", "down")})
    before = description(module)
    monkeypatch.delattr(nn.Module, "parameters")
    assert description(module) == before
    assert calls_of(lambda: digest(description(module))) == DESCRIBED
