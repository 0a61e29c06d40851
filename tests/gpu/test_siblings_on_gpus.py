"""An encoded input serves another layer on the same stream only, and no CUDA graph that is recorded later."""

from __future__ import annotations

from typing import Any

import torch
from support.passes import in_a_graph
from support.small_models import Siblings

import lpq
from lpq.nn.linear import Layer

SIZE = 128


def made() -> Any:
    torch.manual_seed(1)
    return lpq.convert(Siblings(SIZE, SIZE, SIZE, SIZE), "mxfp8").cuda()


def test_a_graph_encodes_what_it_is_given() -> None:
    assert torch.equal(*in_a_graph(made(), torch.randn(SIZE, SIZE, device="cuda")))


def test_a_stream_takes_nothing_of_another() -> None:
    model = made()
    x = torch.randn(SIZE, SIZE, device="cuda")
    inputs = next(m for m in model.modules() if isinstance(m, Layer)).model.inputs
    assert inputs is not None
    with torch.no_grad():
        model.q(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            model.k(x)
        of_q, of_k = inputs.values()
        assert of_q.by == {id(model.q)}
        assert of_k.by == {id(model.k)}
        torch.cuda.synchronize()
        model.v(x)
        assert [*inputs.values()] == [of_q, of_k]
        assert of_q.by == {id(model.q), id(model.v)}, "on the first layer's stream its operands are taken"
