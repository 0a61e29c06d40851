"""Observers of layers: what they are told, and that a pass is the same with them and without."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from support.comparing import equal
from support.small_models import Siblings
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lpq
from lpq.nn import GroupedLinear
from lpq.observe import FLOPS, Observed, Observer, observing


class Ratios:
    """What a user would write: the signal-to-noise ratio of each operand, and the statistics of each tensor."""

    def __init__(self) -> None:
        self.ratios: dict[tuple[str, str], list[float]] = {}
        self.statistics: dict[tuple[str, str], dict[str, Tensor]] = {}

    def observe(self, seen: Observed) -> None:
        if seen.name == "y":
            return
        for part in seen.groups():
            layer: Any = part.layer
            name = layer.qualified_name if part.group is None else f"{layer.qualified_name}.{part.group}"
            x = part.value.float().reshape(-1, part.value.shape[-1])
            for operand in part.decoded():
                if operand is not None:
                    ratio = x.square().sum() / (operand - x).square().sum()
                    self.ratios.setdefault((name, part.name), []).append(10 * ratio.log10().item())
            self.statistics[name, part.name] = part.statistics()


class Names(list[str]):
    """The names of the tensors that it was told of."""

    def observe(self, seen: Observed) -> None:
        self.append(seen.name)


def model(recipe: str | None = "fp8-current", **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
    return net if recipe is None else lpq.convert(net, recipe, **options)


def batch(requires_grad: bool = True) -> Tensor:
    return torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).requires_grad_(requires_grad)


def step(net: Any, x: Tensor | None = None) -> list[Tensor]:
    """The output and all gradients of a step, with the same random bits each time."""
    torch.manual_seed(7)
    x = batch() if x is None else x
    net.zero_grad()
    y = net(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in net.parameters())]


RECIPES = ["fp8-current", "fp8-delayed", "mxfp8", "nvfp4", "fprop=nvfp4, dgrad=mxfp8, wgrad=fp8()"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_tensor_of_a_step_is_seen_and_the_step_is_the_same(recipe: str) -> None:
    """Its bytes, the states of delayed scaling, and all attributes of its layers behind the block."""
    net, alone, ratios = model(recipe), model(recipe), Ratios()
    for _ in range(2):
        expected = step(alone)
        with observing(net, ratios):
            found = step(net)
        assert equal(found, expected)
    assert equal(list(net.state_dict().values()), list(alone.state_dict().values()))
    assert [vars(m).keys() for m in net.modules()] == [vars(m).keys() for m in alone.modules()]
    assert {*ratios.ratios} == {(place, name) for place in ("0", "2") for name in ("x", "w", "dy")}
    lowest = 10 if "nvfp4" in recipe else 20
    assert all(lowest < ratio < 70 for each in list(ratios.ratios.values())[3:] for ratio in each)
    amaxes = [value for found in ratios.statistics.values() for key, value in found.items() if key.endswith("amax")]
    assert "mx" in recipe or amaxes
    count = len(ratios.statistics)
    step(net)
    assert len(ratios.statistics) == count, "behind the block nobody is told"


class Decoded(dict[str, tuple[Any, Any]]):
    """The decoded operands."""

    def observe(self, seen: Observed) -> None:
        self[seen.name] = seen.decoded()


@pytest.mark.parametrize("recipe", RECIPES)
def test_decoded_operands_are_those_that_the_pass_multiplies(recipe: str) -> None:
    """With its states and random bits. Control: those of the next step, with other random bits, where there are any."""
    net: Any = lpq.convert(nn.Sequential(nn.Linear(64, 32, bias=False)), recipe)
    steps: list[Decoded] = []
    for seed in (7, 8):
        torch.manual_seed(seed)
        x = batch()
        net.zero_grad()
        with observing(net, Decoded()) as seen:
            y = net(x)
            y.backward(torch.ones_like(y) / 3)
        steps.append(seen)
    (x_row, x_col), (w_row, w_col), (dy_row, dy_col) = (steps[1][name] for name in ("x", "w", "dy"))
    assert x.grad is not None
    assert torch.allclose(y.flatten(0, 1), x_row @ w_row.t(), atol=1e-5)
    assert torch.allclose(x.grad.flatten(0, 1), dy_row @ w_col, atol=1e-5)
    assert torch.allclose(net[0].weight.grad, dy_col.t() @ x_col, atol=1e-4)
    if recipe == "nvfp4":
        assert not torch.allclose(x.grad.flatten(0, 1), steps[0]["dy"][0] @ w_col, atol=1e-5)


def test_statistics_are_those_of_the_tensor() -> None:
    seen: dict[str, Observed] = {}

    class Take:
        def observe(self, one: Observed) -> None:
            seen.setdefault(one.name, one)

    net, x = model(), batch()
    with observing(net[0], Take()):
        net(x).sum().backward()
    assert seen["x"].statistics() == {"amax": x.abs().amax()}
    assert seen["w"].statistics() == {"amax": net[0].weight.abs().amax()}
    assert [seen[name].layer for name in ("x", "w", "y", "dy")] == [net[0]] * 4
    assert [seen[name].is_part or seen[name].again for name in seen] == [False] * 4
    assert seen["y"].value.shape == (32, 96)


# ---------------------------------------------------------------------------------------------- blocks

STEP = ["x", "w", "y", "dy"]


def test_two_observers_and_nested_blocks() -> None:
    net, first, second = model(), Names(), Names()
    with observing(net, first):
        with observing([net[2]], second), observing(net[2], second):
            step(net)
        assert net[2].passes.observers == (first,)
        step(net)
    assert (len(first), second) == (4 * len(STEP), ["x", "x", "w", "w", "y", "y", "dy", "dy"])
    assert net[0].passes.observers == net[2].passes.observers == ()
    step(net)
    assert len(first) == 4 * len(STEP)


@pytest.mark.parametrize("name", STEP)
def test_an_observer_that_raises_leaves_the_model_as_it_was(name: str) -> None:
    class Raises:
        def observe(self, seen: Observed) -> None:
            if seen.name == name:
                raise ValueError(f"no {name}")

    net, alone, others = model("fp8-delayed"), model("fp8-delayed"), Names()
    with observing(net, others), pytest.raises(ValueError, match=f"no {name}"), observing(net, Raises()):
        step(net)
    assert not any(layer.passes.observers for layer in net.modules() if isinstance(layer, lpq.nn.Layer))
    assert equal(list(net.state_dict().values()), list(alone.state_dict().values()))
    assert equal(step(net), step(alone))


def test_blocks_of_threads_may_end_in_any_order() -> None:
    """Each puts back what is not its own, and sees the passes of both."""
    net, seen = model(), [Names(), Names()]
    begun, ended = threading.Barrier(2), threading.Event()

    def other() -> None:
        with observing(net, seen[0]):
            begun.wait(20)
            begun.wait(20)
        ended.set()

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait(20)
    with observing(net, seen[1]):
        begun.wait(20)
        assert ended.wait(20)
        assert net[0].passes.observers == (seen[1],)
        step(net)
    thread.join()
    assert (len(seen[0]), len(seen[1])) == (0, 2 * len(STEP))
    assert not any(layer.passes.observers for layer in net.modules() if isinstance(layer, lpq.nn.Layer))


def test_a_backward_tells_those_who_saw_its_forward() -> None:
    net, seen = model(), Names()
    with observing(net, seen):
        y = net(batch())
    y.sum().backward()
    assert seen.count("dy") == 2


def test_a_copy_is_not_observed() -> None:
    net, seen = model(), Names()
    with observing(net, seen):
        copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    for made in copies:
        step(made)
        assert not any(layer.passes.observers for layer in made.modules() if isinstance(layer, lpq.nn.Layer))
    assert seen == []


def test_what_is_no_layer_is_refused() -> None:
    for layers, words in (
        (model(None), "Sequential has no layer of lpq to observe"),
        ([nn.Linear(2, 2)], "Linear is no"),
    ):
        with pytest.raises(ValueError, match=words), observing(layers, Names()):
            pass


# ---------------------------------------------------------------------------------------------- other passes


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_checkpointing_runs_again_says_so(reentrant: bool) -> None:
    seen: list[tuple[str, bool]] = []

    class Take:
        def observe(self, one: Observed) -> None:
            seen.append((one.name, one.again))

    net, x = model(), batch()
    with observing(net[0], Take()):
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()
    assert [name for name, again in seen if not again] == STEP
    assert [name for name, again in seen if again][:2] == ["x", "w"]


def test_encoded_inputs_and_weights_are_seen_decoded() -> None:
    """Those that were encoded before, that are stored so, and that are held."""
    seen: dict[str, Observed] = {}

    class Take:
        def observe(self, one: Observed) -> None:
            seen[one.name] = one
            assert one.given.dtype == one.value.dtype
            if one.name in kinds:
                row, _ = one.decoded()
                assert row is not None
                assert torch.equal(row, one.value.reshape(row.shape))

    x = batch(requires_grad=False)
    kinds: tuple[str, ...] = ("x", "w")
    stored = model("mxfp8", weights="quantized")
    with observing(stored[0], Take()):
        y = stored[0](lpq.quantizer("mxfp8").quantize(x[0]))
        y.sum().backward()
    assert torch.equal(seen["x"].value, lpq.quantizer("mxfp8").quantize(x[0]).dequantize())
    assert torch.equal(seen["w"].value, stored[0].weight.dequantize())
    kinds, held = (), model("mxfp8")
    with observing(held[0], Take()), lpq.hold_weights(held):
        held(x)
    assert torch.equal(seen["w"].value, held[0].weight)


def test_layers_that_share_an_input_are_told_of_it_each() -> None:
    net, ratios = lpq.convert(Siblings(64, 32, 32), "fp8-current"), Ratios()
    with observing(net, ratios):
        step(net)
    assert ratios.ratios["q", "x"] == ratios.ratios["k", "x"]


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
def test_groups_are_told_of_as_separate_layers_are(recipe: str) -> None:
    """To the bit, with their random bits; a group without rows is left out."""
    torch.manual_seed(0)
    stack = GroupedLinear(3, 64, 32, recipe=recipe)
    stack.qualified_name = "experts"
    alone = [lpq.nn.Linear(64, 32, recipe=recipe) for _ in range(3)]
    for i, layer in enumerate(alone):
        layer.qualified_name = f"experts.{i}"
        layer.load_state_dict({key: value[i] for key, value in stack.state_dict().items()})
    x, counts = torch.randn(40, 64), [24, 0, 16]
    found, expected = Ratios(), Ratios()
    torch.manual_seed(7)
    with observing(stack, found):
        stack(x, counts).square().sum().backward()
    torch.manual_seed(7)
    with observing(alone, expected):
        ys = [layer(part) for layer, part in zip(alone, torch.split(x, counts), strict=True)]
        sum(y.square().sum() for y in ys).backward()
    for key, statistics in found.statistics.items():
        assert {name: value.tolist() for name, value in statistics.items()} == {
            name: value.tolist() for name, value in expected.statistics[key].items()
        }
        assert found.ratios[key] == expected.ratios[key]
    assert {*found.ratios} == {(f"experts.{i}", name) for i in (0, 2) for name in ("x", "dy")} | {
        (f"experts.{i}", "w") for i in range(3)
    }

    class Whole:
        def observe(self, seen: Observed) -> None:
            seen.statistics()

    words = r"x of a layer with groups has statistics for each of them: use groups\(\)"
    with pytest.raises(ValueError, match=words), observing(stack, Whole()):
        stack(x, counts)


# ---------------------------------------------------------------------------------------------- compilers


def compiles() -> bool:
    """Whether a compiled function would be compiled now."""
    graphs: list[Any] = []

    def double(x: Tensor) -> Tensor:
        return x * 2

    torch.compile(double, backend=lambda graph, _: graphs.append(graph) or graph.forward)(torch.ones(1))
    return bool(graphs)


def parts_of(net: Any, **how: Any) -> Any:
    """The model with each of its layers compiled by itself."""
    for layer in (net[0], net[2]):
        layer.compile(**how)
    return net


@pytest.mark.starts
@pytest.mark.parametrize("compile", [torch.compile, parts_of])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_is_compiled_runs_eagerly(compile: Any, fullgraph: bool) -> None:
    net, seen = model(), Names()
    compiled: Any = compile(net, backend="aot_eager", fullgraph=fullgraph)
    expected = step(compiled)
    with observing(net, seen):
        assert equal(step(compiled), expected)
    assert sorted(seen) == sorted(2 * STEP)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert equal(step(compiled), expected), "what was compiled before the block serves behind it"
    assert len(seen) == 2 * len(STEP)


def test_groups_that_are_compiled_run_eagerly() -> None:
    torch.manual_seed(0)
    stack, seen = GroupedLinear(2, 64, 32, recipe="mxfp8"), Names()
    x, ends = torch.randn(40, 64), torch.tensor([24, 40], dtype=torch.int32)
    compiled: Any = torch.compile(stack, backend="aot_eager", fullgraph=True)
    expected = compiled(x, ends)
    with observing(stack, seen):
        assert torch.equal(compiled(x, ends), expected)
    assert seen == ["x", "w", "y"]


def test_the_stance_of_the_compiler_is_what_it_was() -> None:
    """Behind nested blocks, and behind one that an error left. Control: it compiles before."""
    net = model()
    assert compiles()
    with observing(net, Names()):
        with pytest.raises(ZeroDivisionError), observing(net, Names()):
            _ = 1 / compiles()
        assert not compiles()
    assert compiles()
    with torch.compiler.set_stance("force_eager"):
        with observing(net, Names()):
            pass
        assert not compiles()
    with pytest.raises(ValueError, match="no layer of lpq"), observing(model(None), Names()):
        pass
    assert compiles()


def test_compiled_code_runs_eagerly_until_the_last_block_of_all_threads_ends() -> None:
    """The block that began first ends first: it would put the stance back too early, and the other one the first's."""
    net, begun, ended = model(), threading.Barrier(2), threading.Event()

    def other() -> None:
        with observing(net, Names()):
            begun.wait(20)
            begun.wait(20)
        ended.set()

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait(20)
    with observing(net, Names()):
        begun.wait(20)
        assert ended.wait(20)
        assert not compiles()
    thread.join()
    assert compiles()


def test_layers_that_are_traced_in_spite_of_it_are_refused() -> None:
    net, seen = model(), Names()
    compiled: Any = torch.compile(net, backend="aot_eager", fullgraph=True)
    refused = pytest.raises(Exception, match="a compiler or an exporter traces a layer that is observed")
    with observing(net, seen), torch.compiler.set_stance("default"), refused:
        compiled(batch())
    assert seen == []


def test_a_block_cannot_begin_in_compiled_code() -> None:
    net, seen = model(), Names()

    @torch.compile(backend="aot_eager")
    def run(x: Tensor) -> Tensor:
        with observing(net, seen):
            y: Tensor = net(x)
        return y

    with pytest.raises(RuntimeError, match="begins in code that is compiled itself: begin it outside of that"):
        run(batch())
    assert seen == []
    assert compiles()
    step(net)


@pytest.mark.parametrize("inside", [True, False])
def test_a_compiled_part_of_a_checkpoint_runs_again_as_it_ran(inside: bool) -> None:
    """Behind the block it would run compiled: torch refuses what that saves."""
    net, seen = model(), Names()
    compiled, x = torch.compile(net, backend="aot_eager", fullgraph=True), batch()
    with observing(net, seen):
        y = checkpoint(compiled, x, use_reentrant=False)
        if inside:
            y.sum().backward()
    if inside:
        assert seen.count("dy") == 2
        return
    with pytest.raises(CheckpointError, match="different"):
        y.sum().backward()


def test_a_checkpoint_in_what_is_compiled_may_run_backward_behind_the_block() -> None:
    net, seen = model(), Names()

    @torch.compile(backend="aot_eager")
    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(net, x, use_reentrant=False)
        return y

    with observing(net, seen):
        y = run(x := batch())
    y.square().sum().backward()
    assert seen.count("dy") == 2
    found = [x.grad, *(p.grad for p in net.parameters())]
    assert equal(found, step(net)[1:])


def test_a_mode_that_watches_changes_nothing() -> None:
    """The pass runs by operators then, in backward, too."""
    net, plain, watched = model("nvfp4"), Ratios(), Ratios()
    with observing(net, plain):
        expected = step(net)
    with observing(net, watched), FlopCounterMode(display=False, custom_mapping=FLOPS):
        assert equal(step(net), expected)
    assert watched.ratios == plain.ratios
    assert len(watched.ratios) == 6


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_refused(strict: bool) -> None:
    net = model()
    with observing(net, Names()), pytest.raises(Exception, match="export outside of"):
        torch.export.export(net, (batch(requires_grad=False),), strict=strict)


def test_a_graph_that_is_recorded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a CPU records none."""
    monkeypatch.setattr("lpq.nn.observing.captured", lambda x: True)
    net = model()
    with observing(net, Names()), pytest.raises(RuntimeError, match=r"layer 0, .*: a CUDA graph is recorded"):
        net(batch())


def test_the_protocol_is_what_these_have() -> None:
    observers: list[Observer] = [Ratios(), Names(), Decoded()]
    assert all(callable(observer.observe) for observer in observers)
