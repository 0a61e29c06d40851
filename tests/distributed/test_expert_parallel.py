"""Expert parallelism on several ranks: bit for bit what one process computes of the rows of all."""

from __future__ import annotations

import copy
import gc
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import imitated_ranks, mesh_of, on_one, on_ranks
from support import small_models
from support.comparing import equal
from support.hugging_face import small
from test_tensor_parallel import held_groups
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import lpq
import lpq.checkpoint
from lpq.distributed.expert_parallel import ExpertParallel
from lpq.distributed.expert_rows import Route
from lpq.nn import GroupedLinear
from lpq.torch_private.tensors import local_part

EXPERTS, WIDTH, INNER, BEHIND = 4, 64, 96, 3


class Experts(small_models.Experts):
    """Two layers for each expert, with biases."""

    def __init__(self, recipe: str | None, device: str = "cpu", bias: bool = True) -> None:
        super().__init__(EXPERTS, WIDTH, INNER, recipe=recipe)
        if not bias:
            self.down.bias = None
        self.to(device, kind(device))


def kind(device: str) -> torch.dtype:
    """The dtype of rows and weights: that of training on GPUs."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def counts(rank: int) -> list[int]:
    """How many rows of a rank go to each expert: none of any to the last but one."""
    return [(3 * rank + 5 * i) % 11 if i != EXPERTS - 2 else 0 for i in range(EXPERTS)]


def rows(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's rows, of which some go nowhere, the gradients of what becomes of them, and where experts end."""
    draw = torch.Generator().manual_seed(rank)
    each = counts(rank)
    x, dy = (torch.randn(sum(each) + BEHIND, WIDTH, generator=draw) for _ in range(2))
    return x, dy, torch.tensor(each).cumsum(0, dtype=torch.int32)


def of_all(ranks: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The same of all ranks: of each expert those of one rank behind those of the other."""
    x, dy = ([], [])  # type: tuple[list[Tensor], list[Tensor]]
    parts = [[t.split([*counts(r), BEHIND])[:-1] for t in rows(r)[:2]] for r in ranks]
    for expert in range(EXPERTS):
        for mine in parts:
            x.append(mine[0][expert])
            dy.append(mine[1][expert])
    ends = torch.tensor([sum(counts(r)[e] for r in ranks) for e in range(EXPERTS)])
    return torch.cat(x), torch.cat(dy), ends.cumsum(0, dtype=torch.int32)


def mine_of(whole: Tensor, ends: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's rows among those of all."""
    each = whole.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
    return torch.cat([part.split([counts(r)[e] for r in range(ranks)])[rank] for e, part in enumerate(each)])


def as_one(
    rank: int,
    ranks: int,
    recipe: str | None,
    device: str = "cpu",
    bias: bool = True,
    dispatch: Any = "high_precision",
    backward: Callable[[Tensor, Tensor], object] = Tensor.backward,
) -> None:
    """Each rank has its rows of what one process makes of those of all, and the same gradients of its experts."""
    (expected, dx, ends), stacks = on_one(_one_process, ranks, recipe, device, bias)
    mesh = mesh_of(device=device)
    model = parallelize_module(Experts(recipe, device, bias), mesh, ExpertParallel(dispatch=dispatch))
    own, gradient, offs = (_on(device, tensor) for tensor in rows(rank))
    own.requires_grad_()
    for _ in range(2):  # as of two micro-batches
        y = model(own, offs)
    backward(y, gradient)
    count = len(own) - BEHIND
    assert equal([y[:count]], [_on(device, mine_of(expected, ends, rank, ranks))], nan=True)
    assert not y[count:].any()
    assert own.grad is not None
    assert equal([own.grad[:count]], [_on(device, mine_of(dx, ends, rank, ranks))], nan=True)
    assert not own.grad[count:].any()
    for (name, part), whole in zip(model.named_parameters(), stacks, strict=True):
        assert local_part(part.grad).shape[0] == EXPERTS // ranks
        assert equal([local_part(part.grad)], [_on(device, whole.chunk(ranks)[rank])], nan=True), name


def _one_process(ranks: int, recipe: str | None, device: str, bias: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Results, gradients and ends of the rows of all ranks; and the gradients of all experts. All lie on the CPU."""
    model = Experts(recipe, device, bias)
    x, dy, ends = (_on(device, tensor) for tensor in of_all(range(ranks)))
    y = model(x.requires_grad_(), ends)
    y.backward(dy)
    assert x.grad is not None
    return [t.detach().cpu() for t in (y, x.grad, ends)], [
        p.grad.cpu() for p in model.parameters() if p.grad is not None
    ]


MX = "x=hybrid(row=mxfp8, col=mxfp8, col_source=row), w=mxfp8(), dy=hybrid(row=mxfp8, col=mxfp8, col_source=row)"
ROWS = "x=hybrid(row=fp8(scaling=row), col=nvfp4, col_source=row), w=fp8(scaling=row), dy=fp8()"
PLAIN = (
    "x=hybrid(row=mxfp8, col=identity, col_source=row), w=mxfp8(), dy=hybrid(row=mxfp8, col=identity, col_source=row)"
)
FAMILIES = [
    ("fp8-current", "high_precision"), ("mxfp8", "high_precision"),
    ("x=nvfp4(), w=nvfp4(block=16x16), dy=mxfp8()", "high_precision"), (MX, "encoded"), (ROWS, "encoded"),
]  # fmt: skip
"""A recipe of each kind, and how its rows are dispatched: with a mode around backward, a NaN and a compiler."""
HIGH = 4 * WIDTH
ENCODED = [
    (2, MX, False, WIDTH + WIDTH // 32, WIDTH + WIDTH // 32), (2, MX, True, WIDTH + WIDTH // 32, HIGH),
    (2, ROWS, False, WIDTH + 4, HIGH), (4, PLAIN, False, WIDTH + WIDTH // 32, WIDTH + WIDTH // 32),
]  # fmt: skip
"""Ranks, a recipe, whether results have a bias, and the bytes in which a row and the gradient of a result travel."""


@pytest.mark.parametrize(("ranks", "recipe", "bias", "of_x", "of_dy"), ENCODED)
@on_ranks()
def test_rows_that_travel_encoded(rank: int, ranks: int, recipe: str, bias: bool, of_x: int, of_dy: int) -> None:
    """To the bit what is made of rows that travel as they are, in as many bytes as the operand has."""
    as_one(rank, ranks, recipe, "cpu", bias, "encoded")
    mesh = mesh_of()
    own, gradient, offs = rows(rank)
    own.requires_grad_()
    came = sum(sum(_share(r, rank, ranks)) for r in range(ranks))
    made: list[list[Tensor]] = []
    for how, size, back in (("high_precision", HIGH, HIGH), ("encoded", of_x, of_dy)):
        model = parallelize_module(Experts(recipe, bias=bias), mesh, ExpertParallel(dispatch=how))  # type: ignore[arg-type]
        own.grad = None
        with lpq.observe.collectives() as seen:
            y = model(own, offs)
            y.backward(gradient)
        gone = len(own) - BEHIND
        expected = [8 * (EXPERTS + ranks), size * gone, HIGH * came, back * gone, HIGH * came]
        assert [c.bytes for c in seen if c.kind == "all_to_all_single"] == expected
        assert held_groups(model) == held_groups(y) == []
        assert own.grad is not None
        made.append([y, own.grad, *(local_part(p.grad) for p in model.parameters())])
        for parameter in model.parameters():
            parameter.grad = None
        own.grad = None
        checkpoint(model, own, offs, use_reentrant=False).backward(gradient)
        again = [own.grad, *(local_part(p.grad) for p in model.parameters())]
        assert equal(made[-1][1:], again)
    assert equal(*made)


def _share(sender: int, rank: int, ranks: int) -> list[int]:
    """How many rows of another rank go to each expert of this one."""
    each = EXPERTS // ranks
    return counts(sender)[rank * each : (rank + 1) * each]


@on_ranks(2)
def test_few_rows_that_travel_encoded(rank: int) -> None:
    """One row or none for all experts of a rank. A row's codes end at a byte at which no scale can begin."""
    mesh = mesh_of()
    for few in ([8, 8, 1, 0], [8, 8, 0, 0]):
        each = few if rank == 0 else [8, 8, 0, 0]
        made = []
        for how in ("high_precision", "encoded"):
            torch.manual_seed(0)
            layers = nn.ModuleList([GroupedLinear(4, 66, 32, bias=False, recipe=ROWS)])
            layers.forward = lambda x, counts, layer=layers[0]: layer(x, counts)  # type: ignore[assignment]
            model = parallelize_module(layers, mesh, ExpertParallel(dispatch=how))  # type: ignore[arg-type]
            x = torch.randn(sum(each), 66).requires_grad_()
            y = model(x, each)
            y.sum().backward()
            assert x.grad is not None
            made.append([y, x.grad, local_part(layers[0].weight.grad)])
        assert equal(*made)
        assert made[0][2].any() == (rank == 0 or few[2] == 1)


def _on(device: str, tensor: Tensor) -> Tensor:
    return tensor.to(device, kind(device) if tensor.is_floating_point() else tensor.dtype)


@pytest.mark.parametrize(("ranks", "recipe"), [(2, None), (4, "mxfp8")])
@on_ranks()
def test_ranks_compute_what_one_process_does(rank: int, ranks: int, recipe: str | None) -> None:
    """``test_every_recipe`` has two ranks and all recipes."""
    as_one(rank, ranks, recipe)


@on_ranks(2)
def test_rows_that_meet_other_experts_are_noticed(rank: int) -> None:
    """With rows left rank by rank, and not expert by expert."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "argsort", lambda self, **how: torch.arange(len(self)))
        with pytest.raises(AssertionError):
            as_one(rank, 2, "fp8-current")


@on_ranks(4)
def test_experts_and_fsdp(rank: int) -> None:
    """Experts over two ranks, and FSDP2 over two replicas of them, which see other rows."""
    mesh = mesh_of("dp", "ep")
    model: Any = parallelize_module(Experts(MX), mesh["ep"], ExpertParallel(dispatch="encoded"))
    fully_shard(model, mesh=mesh["dp"])
    alone = Experts(MX)
    own, gradient, offs = rows(rank)
    model(own, offs).backward(gradient)
    for replica in ((0, 1), (2, 3)):
        x, dy, ends = of_all(replica)
        alone(x, ends).backward(dy)
    for (name, whole), part in zip(alone.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(part.grad.full_tensor(), whole.grad / 2), name


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "dispatch"), [FAMILIES[0], *FAMILIES[3:]])
@on_ranks(2)
def test_compiled_it_computes_the_same(rank: int, recipe: str, dispatch: Any) -> None:
    """Graphs break where the host waits for how many rows go where. One stack on one rank: each takes a compiler
    seconds, and the other rank does the same collectives."""
    mesh = mesh_of()
    own, gradient, offs = rows(rank)
    made = []
    for compiled in (False, True):
        counters.clear()
        torch.manual_seed(0)
        stack = nn.ModuleDict({"up": GroupedLinear(EXPERTS, WIDTH, WIDTH, bias=False, recipe=recipe)})
        stack.forward = stack["up"].forward  # type: ignore[assignment]
        model: Any = parallelize_module(stack, mesh, ExpertParallel(dispatch=dispatch))
        x = own.clone().requires_grad_()
        y = (torch.compile(model, backend="aot_eager") if compiled and rank == 0 else model)(x, offs)
        y.backward(gradient)
        assert x.grad is not None
        made.append([y, x.grad, *(local_part(p.grad) for p in model.parameters())])
        assert (counters["stats"]["unique_graphs"] > 0) == (compiled and rank == 0)
    assert equal(*made)


@on_ranks(2)
def test_what_is_encoded_already_travels_as_it_is(rank: int) -> None:
    """Rows, and gradients of results, that are encoded as the recipe has them. All others are refused."""
    mesh, (own, gradient, offs), other = mesh_of(), rows(rank), lpq.quantizer("mxfp8(dtype=e5m2)")

    def made(model: Any, x: Any = None, dy: Any = None, scale: float = 1.0) -> list[Any]:
        model.zero_grad()
        given = (own if x is None else x.quantize(scale * own)).detach().requires_grad_()
        y = model(given, offs)
        if dy is not None:
            y.register_hook(dy.quantize)
        y.backward(scale * gradient)
        return [y.detach(), given.grad, *(local_part(p.grad) for p in model.parameters())]

    model: Any = parallelize_module(Experts(MX, bias=False), mesh, ExpertParallel(dispatch="encoded"))
    x, dy = model.up.recipe.x, model.down.recipe.dy
    expected = made(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lpq.core.PrecisionWarning)  # nothing is decoded
        for given in ((x, None), (None, dy), (x, dy)):
            assert equal(made(model, *given), expected)
    assert not equal(made(model, x, dy, scale=-3.0), expected)
    alone = parallelize_module(Experts(MX, bias=False), mesh, ExpertParallel())
    otherwise = r"rows, .*, are encoded already, as mxfp8\(dtype=e5m2\), and its recipe encodes them as hybrid"
    for refusing, given, words in (
        (model, (other, None), otherwise),
        (model, (None, other), otherwise),
        (alone, (x, None), "its rows are encoded already, .*, and travel in high precision: pass them before"),
        (alone, (None, dy), "the gradient of its results, .*, and travels in high precision. Return the gradient as"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"Experts: {words}"):
            made(refusing, *given)


@on_ranks(4)
def test_a_checkpoint_loads_on_another_number_of_ranks(rank: int, tmp_path: Path) -> None:
    """From experts over four ranks to experts over two that FSDP2 shards."""

    def of(*shape: int) -> tuple[Any, Any]:
        model: Any = lpq.convert(Experts(None), "mxfp8")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
        parallelize_module(model, mesh["ep"], ExpertParallel())
        if shape[0] > 1:
            fully_shard(model, mesh=mesh["dp"])
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = of(1, 4)
    own, gradient, offs = rows(rank)
    model(own, offs).backward(gradient)
    optimizer.step()
    lpq.checkpoint.save(model, tmp_path / "saved", optimizer)
    other, restored = of(2, 2)
    lpq.checkpoint.load(other, tmp_path / "saved", restored)
    for (name, before), after in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(before.full_tensor(), after.full_tensor()), name
        moments = optimizer.state[before]["exp_avg"], restored.state[after]["exp_avg"]
        assert torch.equal(*(moment.full_tensor() for moment in moments)), name


@on_ranks(2)
def test_ends_that_make_no_sense_on_one_rank_are_refused_on_all(rank: int) -> None:
    """The second rank gives ends that make no sense; both raise, and go on to work."""
    model = parallelize_module(Experts("mxfp8"), mesh_of(), ExpertParallel())
    x, _, right = rows(rank)
    falls, behind = right.clone(), right.clone()
    falls[1] = falls[0] - 1
    behind[-1] = len(x) + 1
    for wrong, error, words in (
        (falls, ValueError, rf"{falls.tolist()}, and there are {len(x)} rows".replace("[", r"\[")),
        (behind, ValueError, f"there are {len(x)} rows"),
        (right.long(), TypeError, "offs is torch.int64 on cpu"),
        (right[:2], ValueError, rf"offs is \[2\], and there are {EXPERTS} groups"),
        (counts(rank)[:-1], ValueError, f"there are {EXPERTS} groups: pass for each how many"),
    ):
        with pytest.raises(
            error if rank else ValueError,
            match=words if rank else f"Experts: rank 1 could not send its rows: {error.__name__}: ",
        ):
            model(x, wrong if rank else right)
    model(x, right)
    with pytest.raises(ValueError, match=r"Experts: the input is \[1, .*flatten it"):
        model(x[None], right)


@on_ranks(2)
def test_recomputation_leaves_nothing_behind(rank: int) -> None:
    """Recomputation is broken off before results are sent back: what a call notes does not pile up."""
    model = parallelize_module(Experts(MX, bias=False), mesh_of(), ExpertParallel())
    x, _, offs = rows(rank)
    alive = []
    for _ in range(3):
        checkpoint(model, x, offs, use_reentrant=False).sum().backward()
        alive.append(sum(type(held) is Route for held in gc.get_objects()))
    assert alive[0] == alive[1] == alive[2] <= 1


@on_ranks(2)
def test_the_report_says_how_rows_travel(rank: int) -> None:
    mesh = mesh_of()
    for how, recipe, bias, said in (
        ("high_precision", MX, False, "2 of 4 experts on each of 2 ranks; rows are dispatched in high precision"),
        (
            "encoded",
            MX,
            False,
            "rows are dispatched as .*: 0.52 of bf16; gradients of results likewise, as .*: 0.52 of",
        ),
        ("encoded", MX, True, "results in high precision: there is a bias, whose gradient is their sum"),
        ("encoded", ROWS, False, "results in high precision: amax of fp8 is of all rows of a group together"),
    ):
        model = lpq.convert(Experts(None, bias=bias), recipe)
        parallelize_module(model, mesh, ExpertParallel(dispatch=how))  # type: ignore[arg-type]
        notes = {entry.name: entry.note for entry in lpq.report(model).parallel}
        assert re.search(said, notes["down"]), notes
        with pytest.raises(ValueError, match="before a style shares out layer up, "):
            lpq.observe.memory(model)  # of a model that FSDP2 shards


@on_ranks(2)
def test_rows_travel_as_they_are_where_a_step_has_a_recipe_that_cannot_encode_them(rank: int) -> None:
    """As the last steps of a policy, or the recipes that ``culprits`` tries."""
    x, gradient, offs = rows(rank)
    policy = {"rules": [{"match": "*", "recipe": MX, "until": 1}, {"match": "up", "recipe": "mxfp8"}]}
    made = []
    for how in ("high_precision", "encoded"):
        torch.manual_seed(0)
        model = parallelize_module(
            lpq.convert(Experts(None, bias=False), policy), mesh_of(), ExpertParallel(dispatch=how)
        )  # type: ignore[arg-type]
        for step, size in enumerate((HIGH if how == "high_precision" else WIDTH + WIDTH // 32, HIGH)):
            lpq.set_step(model, step)
            with lpq.observe.collectives() as seen, warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                y = model(x.requires_grad_(), offs)
            y.backward(gradient)
            sent = [c.bytes for c in seen if c.kind == "all_to_all_single"]
            assert sent[1] == size * (len(x) - BEHIND)
            said = [str(one.message) for one in told if "rows are dispatched" in str(one.message)]
            assert len(said) == (step == 1 and how == "encoded"), said
            made.append([y, x.grad, *(local_part(p.grad) for p in model.parameters())])
            made[-1] = [t.clone() for t in made[-1] if t is not None]
        notes = {entry.name: entry.note for entry in lpq.report(model).parallel}
        assert notes["up"].endswith("rows are dispatched in high precision"), notes
        x.grad = None
    assert "layers with the recipes ['None', 'mxfp8'], and rows that" in said[0]
    assert equal(made[0] + made[1], made[2] + made[3])
    assert not equal(made[0], made[1])


@on_ranks(2)
def test_what_ranks_cannot_share_out_is_refused(rank: int) -> None:
    mesh = mesh_of()
    odd = nn.ModuleDict({"up": GroupedLinear(3, WIDTH, WIDTH, recipe=None)})
    with pytest.raises(ValueError, match="3 experts of ModuleDict over 2 ranks"):
        parallelize_module(odd, mesh, ExpertParallel())
    with pytest.raises(
        ValueError, match=r"router\.weight of ModuleDict is \[4, 64\]|norm\.weight of ModuleDict is \[64\]"
    ):
        parallelize_module(
            nn.ModuleDict({"up": GroupedLinear(EXPERTS, WIDTH, WIDTH, recipe=None), "norm": nn.LayerNorm(WIDTH)}),
            mesh,
            ExpertParallel(),
        )
    prepared = lpq.convert(copy.deepcopy(Experts(None)), "mxfp8", weights="high_precision")
    with pytest.raises(ValueError, match="was prepared by lpq"):
        parallelize_module(prepared, mesh, ExpertParallel())
    shared = parallelize_module(Experts("mxfp8"), mesh, ExpertParallel())
    sharded = fully_shard(Experts("mxfp8"), mesh=mesh)
    words = r"up\.weight of \w*Experts is sharded already: apply it once, before fully"
    for experts, before, told in ((shared, shared.dispatched, "it has a style already"), (sharded, None, words)):
        with pytest.raises(ValueError, match=told):
            parallelize_module(experts, mesh, ExpertParallel())
        assert vars(experts).get("dispatched") is before
    with pytest.raises(ValueError, match="dispatch='quantized': choose from encoded, high_precision"):
        ExpertParallel(dispatch="quantized")  # type: ignore[arg-type]
    for recipe, reason in (
        ("mxfp8", "is not made of its row operand, as col_source=row has it"),
        (
            "x=hybrid(row=nvfp4, col=mxfp8, col_source=row), w=nvfp4(), dy=mxfp8()",
            "amax of nvfp4 is of all rows of a g",
        ),
        (
            "x=hybrid(row=nvfp4(block=16x16), col=mxfp8, col_source=row), w=nvfp4(), dy=mxfp8()",
            "is of all rows of a gr",
        ),
        ("bf16", r"identity\(dtype=bfloat16\) leaves rows as they are"),
        (None, r"layers with the recipes \['None'\], and rows that are dispatched encoded have one"),
    ):
        with pytest.raises(ValueError, match=reason):
            parallelize_module(Experts(recipe), mesh, ExpertParallel(dispatch="encoded"))
    with pytest.raises(TypeError, match="was called with 1 arguments, and a module of experts takes rows and where"):
        parallelize_module(Experts("mxfp8"), mesh, ExpertParallel())(torch.ones(4, WIDTH))


def test_shared_out_experts_have_the_attributes_of_the_page_on_the_design() -> None:
    page = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    table, _, others = page.partition("a layer has four:\n")[2].partition("A copy")[0].partition("Under tensor")
    told = {*re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE), *re.findall(r"`(\w+)`", others)}
    plain, model = small("Qwen3Moe"), lpq.convert(small("Qwen3Moe"), "mxfp8", fuse=True)
    before, experts = (net.model.layers[0].mlp.experts for net in (plain, model))
    with imitated_ranks():
        parallelize_module(experts, mesh_of(), ExpertParallel())
    own = {name for name in vars(experts).keys() - vars(before).keys() if not name.startswith("_")}  # torch's
    assert own >= {"gate", "dispatched"}
    assert own == told - {"gather", "layouts"}
    assert len(own) == 6
