"""Fused models of which parts are compiled: norms hand compiled layers what they take, and encode nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.comparing import equal, equal_states
from support.passes import recomputed
from support.small_models import Gated
from test_fuse_families import model, step
from test_fuse_models import norms
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import lpq
from lpq.nn import norms as norms_of
from lpq.nn import shared_states


def test_compiled_whole(fused_passes: list[int]) -> None:
    """A decoder layer, with its norms."""
    net = lpq.fuse(model(num_hidden_layers=2))
    layer = net.model.layers[0]
    x, one = torch.randn(2, 8, 64).bfloat16(), torch.ones(1, 8, 32).bfloat16()
    with torch.no_grad():
        expected = layer(x, position_embeddings=(one, one))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert "compiled code" not in str(lpq.report(net))
    assert torch.equal(compiled(x, position_embeddings=(one, one)), expected)
    assert len(fused_passes) == 1
    assert all(("; compiled code" in entry.note) == (".0." in entry.name) for entry in lpq.report(net).fused)


@pytest.mark.starts
@pytest.mark.parametrize(("recipe", "encodings"), [("fp8-current", 5), ("mxfp8", 5), ("fp8-delayed", 8)])
def test_attention_alone_is_compiled(recipe: str, encodings: int, fused_passes: list[int], added: list[bool]) -> None:
    """It takes what the norm before it has encoded, and encodes four weights and one input; layers that remember
    statistics encode their own inputs."""
    counts: list[int] = []

    def forward(graph: Any, _: Any) -> Any:
        counts.append(sum(node.target is torch.ops.lpq.quantize.default for node in graph.graph.nodes))
        return graph.forward

    net = lpq.fuse(model(recipe=recipe))
    for layer in net.model.layers:
        layer.self_attn.compile(
            fullgraph=True, backend=aot_autograd(fw_compiler=forward, bw_compiler=lambda graph, _: graph.forward)
        )
    assert equal(step(net), step(model(recipe=recipe)))
    assert counts == [encodings]
    assert len(fused_passes) == 1
    assert added == [False, True]


@pytest.mark.starts
def test_compiled_for_any_size_it_takes_what_the_norm_has_encoded() -> None:
    """Then the compiler takes numbers among the options of a quantizer for sizes, too, and compares none."""
    torch.compiler.reset()
    plain, net = model(recipe="fp8-current"), lpq.fuse(model(recipe="fp8-current"))
    for layer in net.model.layers:
        layer.self_attn.compile(backend="aot_eager", dynamic=True)
    assert equal(step(net), step(plain))


@pytest.mark.starts
@pytest.mark.parametrize("order", ["fuse, compile", "compile, fuse"])
@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_no_trial_runs_what_is_compiled_where_it_stands(part: str, order: str) -> None:
    """It would be the part itself, with its own layers, and no copy."""
    net, calls = model(recipe="mxfp8"), []
    for what in order.split(", "):
        if what == "fuse":
            lpq.fuse(net)
            continue
        for layer in net.model.layers:
            getattr(layer, part).compile(backend=lambda graph, _: calls.append(graph) or graph.forward)
    report = lpq.report(net)
    assert (len(report.fused), report.apart) == (3, ())
    assert not any(layer.passes.called or layer.passes.traced for layer in net.modules() if hasattr(layer, "passes"))
    assert not calls


COMPILED = {
    # the part of a layer that is compiled: the encodings of its two norms, and the norm that encodes nothing
    "self_attn": (1, "input_layernorm"),
    "mlp": (1, "post_attention_layernorm"),
    "self_attn.q_proj": (2, ""),
    "self_attn.v_proj": (2, ""),
}


@pytest.mark.starts
@pytest.mark.parametrize("part", COMPILED)
def test_a_norm_encodes_nothing_for_compiled_layers_that_remember(
    part: str, added: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get its output in high precision, and have histories of their own, which nobody compares in any later step:
    on a GPU that waits for the host. The norm computes and adds as before. It has given them these histories before
    their first compiled pass, which would do so in code of its own, to be compiled beside the code of later passes."""
    torch.compiler.reset()  # or torch, which compiles a function eight times, may leave it uncompiled
    encoded, compared, graphs = list[int](), list[int](), list[int]()
    by, differing = norms_of.EncodedBy, shared_states._differing
    monkeypatch.setattr(norms_of, "EncodedBy", lambda *args: encoded.append(1) or by(*args))
    monkeypatch.setattr(shared_states, "_differing", lambda *args: compared.append(1) or differing(*args))
    plain, net = model(recipe="fp8-delayed"), lpq.fuse(model(recipe="fp8-delayed"))
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (plain, net)]
    count, without = COMPILED[part]
    for number in range(4):
        if number == 1:  # the layers behind each norm share a history until then
            for layer in net.model.layers:
                layer.get_submodule(part).compile(
                    fullgraph=True, backend=lambda *args: graphs.append(1) or aot_eager(*args)
                )
        for calls in (encoded, compared, added):
            calls.clear()
        assert equal(step(net), step(plain))
        for optimizer in optimizers:
            optimizer.step()
        assert equal_states(net.state_dict(), plain.state_dict())
        assert len(encoded) == (count if number else 2)
        assert len(graphs) == min(number, 1)
        assert not compared or number < 2
        assert added == [False, True]
    why = [entry for entry in lpq.report(net).apart if "is compiled and remembers statistics of inputs" in entry.note]
    assert [entry.name for entry in why] == ([f"model.layers.0.{without}"] if without else [])
    lpq.convert(net, "mxfp8")
    lpq.convert(plain, "mxfp8")
    assert equal(step(net), step(plain))
    assert len(norms(net)) == 2


PARTS = {
    # the part of a layer that torch wraps: the norm behind which it compiles layers
    "self_attn": "input_layernorm",
    "mlp": "post_attention_layernorm",
    "": "",
}


def _wrap(net: Any, part: str, wrap: Any) -> None:
    for number, layer in enumerate(net.model.layers):
        if part:
            setattr(layer, part, wrap(getattr(layer, part)))
        else:
            net.model.layers[number] = wrap(layer)


@pytest.mark.starts
@pytest.mark.parametrize(
    ("order", "part", "recipe"),
    [
        ("fuse, wrap", "self_attn", "fp8-delayed"), ("fuse, wrap", "", "mxfp8"), ("wrap, fuse", "mlp", "fp8-delayed"),
        ("wrap, fuse", "self_attn", "mxfp8"), ("fuse, wrap, fuse", "", "fp8-delayed"),
        ("fuse, wrap, fuse", "mlp", "mxfp8"),
    ],
)  # fmt: skip
def test_torch_compile_around_a_part(order: str, part: str, recipe: str, added: list[bool]) -> None:
    """It is as if the part were compiled where it stands, in whatever order: `torch.compile` returns a module around
    it. No trial compiles anything, or runs layers of the model."""
    torch.compiler.reset()
    graphs: list[object] = []

    def compiled(module: Any) -> Any:
        return torch.compile(module, backend=lambda graph, _: graphs.append(graph) or graph.forward)

    plain, net = model(recipe=recipe), model(recipe=recipe)
    for what in order.split(", "):
        _ = lpq.fuse(net) if what == "fuse" else _wrap(net, part, compiled)
    reported = lpq.report(net)
    assert not graphs
    assert not any(layer.passes.called or layer.passes.traced for layer in net.modules() if hasattr(layer, "passes"))
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (plain, net)]
    for _ in range(2):
        added.clear()
        assert equal(step(net), step(plain))
        for optimizer in optimizers:
            optimizer.step()
    assert graphs
    assert equal_states({name.replace("_orig_mod.", ""): t for name, t in net.state_dict().items()}, plain.state_dict())
    assert added == [False, True] * bool(part)
    report = lpq.report(net)
    behind = [PARTS[part]] if part else ["input_layernorm", "post_attention_layernorm"]
    alone = [f"model.layers.0.{norm}" for norm in behind if recipe == "fp8-delayed"]
    assert [entry.name for entry in report.apart] == alone
    assert len(report.fused) + len(alone) == len(reported.fused) + len(reported.apart) == 3
    assert all("is compiled and remembers statistics of inputs" in entry.note for entry in report.apart)
    assert not any("lpq.fuse again" in entry.note for entry in report.fused)
    assert all("; compiled code" in entry.note for entry in report.fused) == (not part)
    kinds = {type(m).__name__ for m in lpq.unfuse(net).modules()}
    assert not lpq.report(net).fused
    assert {type(m).__name__ for m in plain.modules()} <= kinds
    assert equal(step(net), step(plain))


@pytest.mark.starts
@pytest.mark.parametrize("in_place", [True, False])
def test_a_norm_that_is_compiled_alone(in_place: bool) -> None:
    torch.compiler.reset()
    net = lpq.fuse(model())
    for layer in net.model.layers:
        if in_place:
            layer.input_layernorm.compile(backend="aot_eager")
        else:
            layer.input_layernorm = torch.compile(layer.input_layernorm, backend="aot_eager")
    assert equal(step(net), step(model()))
    notes = {entry.name.removeprefix("model.layers.0."): entry.note for entry in lpq.report(net).fused}
    assert notes["input_layernorm"].endswith("the compiler fuses it in its own way")
    assert "compiled" not in notes["post_attention_layernorm"]


@pytest.mark.parametrize("recipe", ["fp8-delayed", "mxfp8"])
@pytest.mark.parametrize("part", PARTS)
def test_checkpoint_wrapper_around_a_part(part: str, recipe: str, added: list[bool]) -> None:
    plain, net = model(recipe=recipe), lpq.fuse(model(recipe=recipe))
    for each in (plain, net):
        _wrap(each, part, checkpoint_wrapper)
    for again in (False, True):
        if again:
            lpq.fuse(net)
        added.clear()
        assert equal(step(net), step(plain))
        assert equal_states(net.state_dict(), plain.state_dict())
        assert len(lpq.report(net).fused) == 3
        assert added[:2] == [False, True]


def test_a_hook_of_a_wrapper_gets_an_ordinary_tensor() -> None:
    plain, net = model(), lpq.fuse(model())
    seen: list[type] = []
    for each in (plain, net):
        _wrap(each, "self_attn", checkpoint_wrapper)
        for layer in each.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs: seen.append(type(kwargs["hidden_states"])), with_kwargs=True
            )
    assert equal(step(net), step(plain))
    assert set(seen) == {torch.Tensor}
    assert all("a forward hook looks at its output" in entry.note for entry in lpq.report(net).apart)
    assert len(lpq.report(net).apart) == 1


def _counted() -> tuple[Any, Any, Any, list[int]]:
    """A block that remembers, and the same fused; the fused one compiled, and an item for each graph of that."""
    torch.compiler.reset()
    plain, net = (lpq.convert(Gated(32, 64), "fp8-delayed", fuse=fuse) for fuse in (False, True))
    net.load_state_dict(plain.state_dict())
    graphs = list[int]()
    code = torch.compile(net, fullgraph=True, backend=lambda *args: graphs.append(1) or aot_eager(*args))
    return plain, net, code, graphs


def _growing() -> Iterator[torch.Tensor]:
    """Three inputs, each larger than the one before."""
    for number in range(3):
        yield torch.randn(16, 32, generator=torch.Generator().manual_seed(number)) * (number + 1)


def test_a_checkpoint_around_compiled_code_runs_the_graph_of_the_first_run_again() -> None:
    """The pass that was compiled gave layers states of their own. So the next one had another graph, and checkpointing,
    which compares sizes, gave the weights the statistics of the inputs. An evaluation shared the states again."""
    plain, net, code, graphs = _counted()
    for x in _growing():
        with torch.no_grad():
            assert torch.equal(net(x), plain(x))
        recomputed(code, x).square().mean().backward()
        plain(x).square().mean().backward()
        assert equal([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
        assert equal_states(net.state_dict(), plain.state_dict())
        assert len(graphs) == 1
    assert plain.left.x_amax_history.count_nonzero() == 3
    assert copy.deepcopy(net).left.passes.moved_by_graph, "a copy has the graph, too"


def test_an_evaluation_that_is_compiled_leaves_the_states_of_training_shared() -> None:
    """It moves none. Layers behind a norm encoded alone in all later passes, and the evaluation was traced again."""
    plain, net, code, graphs = _counted()
    for x in _growing():
        for each in (net, plain):
            each(x).square().mean().backward()
        with torch.no_grad():
            assert torch.equal(code(x), plain(x))
        assert equal_states(net.state_dict(), plain.state_dict())
        assert not lpq.report(net).apart
    assert len(graphs) == 1
