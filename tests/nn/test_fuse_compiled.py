"""Fused models of which parts are compiled: norms hand compiled layers what they take, and encode nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.comparing import equal, equal_states
from test_fuse_families import step
from test_fuse_models import model, norms
from torch._dynamo.backends.common import aot_autograd

import lpq
from lpq.nn import norms as norms_of
from lpq.nn import shared_states


def test_compiled_whole(fused_passes: list[int]) -> None:
    """A decoder layer, with its norms."""
    net = lpq.fuse(model())
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
    assert counts == [encodings] * 2
    assert len(fused_passes) == 2
    assert added == [False, True] * 2


@pytest.mark.starts
def test_compiled_for_any_size_it_takes_what_the_norm_has_encoded() -> None:
    """Then the compiler takes numbers among the options of a quantizer for sizes, too, and compares none."""
    torch.compiler.reset()
    plain, net = model(recipe="fp8-current"), lpq.fuse(model(recipe="fp8-current"))
    for layer in net.model.layers:
        layer.self_attn.compile(backend="aot_eager", dynamic=True)
    assert equal(step(net), step(plain))


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
    on a GPU that waits for the host. The norm computes and adds as before."""
    torch.compiler.reset()  # or torch, which compiles a function eight times, may leave it uncompiled
    encoded, compared = list[int](), list[int]()
    by, differing = norms_of.EncodedBy, shared_states._differing
    monkeypatch.setattr(norms_of, "EncodedBy", lambda *args: encoded.append(1) or by(*args))
    monkeypatch.setattr(shared_states, "_differing", lambda *args: compared.append(1) or differing(*args))
    plain, net = model(recipe="fp8-delayed"), lpq.fuse(model(recipe="fp8-delayed"))
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (plain, net)]
    count, without = COMPILED[part]
    for number in range(4):
        if number == 1:  # the layers behind each norm share a history until then
            for layer in net.model.layers:
                layer.get_submodule(part).compile(fullgraph=True, backend="aot_eager")
        for calls in (encoded, compared, added):
            calls.clear()
        assert equal(step(net), step(plain))
        for optimizer in optimizers:
            optimizer.step()
        assert equal_states(net.state_dict(), plain.state_dict())
        assert len(encoded) == (2 * count if number else 4)
        assert not compared or number < 2
        assert added == [False, True] * 2
    why = [entry for entry in lpq.report(net).apart if "is compiled and remembers statistics of inputs" in entry.note]
    assert [entry.name for entry in why] == ([f"model.layers.{i}.{without}" for i in range(2)] if without else [])
    lpq.convert(net, "mxfp8")
    lpq.convert(plain, "mxfp8")
    assert equal(step(net), step(plain))
    assert len(norms(net)) == 4
