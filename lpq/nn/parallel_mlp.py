"""An MLP whose layers ranks share out: the first by their outputs, and the last by its inputs. All that lies between
them is computed and encoded as without ranks, but for statistics, which span them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import Shard

from lpq.nn.linear import Layer
from lpq.nn.multiply import LayerCall
from lpq.nn.step import Step
from lpq.operations.producer import Output, Producer, bind_producer, producing
from lpq.operations.source import Between

LAST = Shard(-1)


def why_not(layers: Sequence[Layer]) -> str | None:
    """Why such layers are computed one after the other; None if each rank computes its part of them as one function."""
    weights: list[Any] = [layer._parameters.get("weight") for layer in layers]
    if any(layer.layouts is None or not hasattr(w, "device_mesh") for layer, w in zip(layers, weights, strict=True)):
        return "ranks share out some of its weights, and not all of them by styles of lpq.distributed.tensor_parallel"
    pairs: list[tuple[Any, Any]] = [(layer.layouts, weight) for layer, weight in zip(layers, weights, strict=True)]
    *before, (down, columns) = pairs
    inputs = {(weight.device_mesh, layouts.input) for layouts, weight in before}
    by_rows = all(weight.placements[-1].is_shard(0) and layouts.output == LAST for layouts, weight in before)
    by_columns = columns.placements[-1].is_shard(1) and down.input == LAST
    if by_rows and by_columns and len(inputs) == 1 and all(columns.device_mesh == mesh for mesh, _ in inputs):
        return None
    return "ranks share out its weights otherwise than the first layers by their outputs and the last by its inputs"


def bind_parts(
    calls: Sequence[LayerCall], between: Between, summed: Sequence[bool]
) -> tuple[Step, Callable[[], Producer]]:
    """The step of the last layer, of whose input this rank computes a part; and what binds the producer of the first
    layers' gradients. ``summed``: for each of the first layers whether the gradient of its bias is wanted."""
    *before, down = calls
    parts: Any = down.shapes.parts
    assert down.step is not None
    outputs = []
    for call, value in zip(before, summed, strict=True):
        own: Any = call.shapes.parts
        spec = own.gradient(call.plan, call.shapes)
        outputs.append(Output(spec if spec.row or spec.col else None, value, own.cut_of("dy")))
    step = parts.computed(down.plan, down.shapes, down.step, producing(between.product))
    return step, lambda: bind_producer(between.backward, [*outputs, Output(None)], parts.group)
