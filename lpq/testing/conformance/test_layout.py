"""The layout is the truth: ``encode`` and ``measure`` return what was declared, for every shape."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lpq.core import Quantizer, Storage
from lpq.testing.operands import encode, measure, normal, sides
from lpq.testing.options import only

few = settings(max_examples=8, deadline=None, database=None, derandomize=True)
shapes = st.tuples(st.integers(0, 70), st.integers(1, 140))


@few
@given(shape=shapes)
@example(shape=(0, 32))
@example(shape=(1, 1))
@example(shape=(5, 40))
@example(shape=(40, 0))
def test_encode_fills_the_declared_buffers(quantizer: Quantizer, shape: tuple[int, int]) -> None:
    """Names, dtypes and shapes of all buffers; ``[40, 0]`` is the column operand of a tensor of 0 rows."""
    for side in sides(quantizer):
        for dtype in (torch.float32, torch.bfloat16):
            check_buffers(side, encode(side, normal(*shape, dtype=dtype)), shape, dtype)


def check_buffers(side: Quantizer, operand: Storage, shape: tuple[int, int], dtype: torch.dtype) -> None:
    storage = side.storage
    name = storage.__name__
    assert isinstance(operand, storage), (
        f"{type(side).__name__}.encode returned a {type(operand).__name__}; the spec says storage={name}"
    )
    layout = storage.layout_for(side)
    held = {n: t for n, t in vars(operand).items() if isinstance(t, torch.Tensor)}
    assert list(held) == [b.name for b in layout] or set(held) == {b.name for b in layout}, (
        f"{name}.layout declares {[b.name for b in layout]}; encode set {list(held)}"
    )
    for buffer in layout:
        tensor = held[buffer.name]
        wanted = buffer.dtype or dtype
        assert tensor.dtype == wanted, (
            f"{name}.layout says {buffer.name} is {wanted}; encode returned {tensor.dtype}"
        )
        grid = buffer.grid(*shape)
        assert tuple(tensor.shape) == grid, (
            f"{name}.layout says {buffer.name} covers {buffer.block}, so for {list(shape)} it must be {grid}; "
            f"encode returned {tuple(tensor.shape)}"
        )


@few
@given(shape=shapes)
@example(shape=(1, 1))
@example(shape=(5, 40))
def test_measure_returns_the_declared_statistics(quantizer: Quantizer, shape: tuple[int, int]) -> None:
    """Names and shapes of all statistics; fp32 and not negative, since they are combined as such."""
    for side in sides(quantizer):
        if not side.stats or 0 in shape:
            continue
        name = type(side).__name__
        for dtype in (torch.float32, torch.bfloat16):
            measured = side.measure(normal(*shape, dtype=dtype))
            assert set(measured) == {s.name for s in side.stats}, (
                f"{name}.stats declares {[s.name for s in side.stats]}; measure returned {list(measured)}"
            )
            for stat in side.stats:
                tensor, grid = measured[stat.name], stat.grid(*shape)
                assert tuple(tensor.shape) == grid, (
                    f"{name}.stats says {stat.name} covers {stat.block}, so for {list(shape)} it must be {grid}; "
                    f"measure returned {tuple(tensor.shape)}"
                )
                assert tensor.dtype == torch.float32, f"{name}.measure: {stat.name} is {tensor.dtype}, not float32"
                assert not (tensor < 0).any(), f"{name}.measure: {stat.name} is negative; MAX would lose it"


@few
@given(shape=shapes)
@example(shape=(0, 32))
@example(shape=(1, 1))
def test_decode_has_the_logical_shape(quantizer: Quantizer, shape: tuple[int, int]) -> None:
    """``decode`` drops the padding and gives fp32, from the buffers and what the storage was bound to alone."""
    for side in sides(quantizer):
        x = normal(*shape, dtype=torch.bfloat16)
        operand = encode(side, x)
        again = side.storage.wrap(operand.tensors(), side, shape, x.dtype)
        decoded = again.decode()
        what = f"{side.storage.__name__}.decode"
        assert tuple(decoded.shape) == shape, f"{what} returned {list(decoded.shape)} for a matrix {list(shape)}"
        assert decoded.dtype == torch.float32 or side.plain, f"{what} returned {decoded.dtype}; it gives float32"
        assert torch.equal(decoded, operand.decode()), f"{what} uses something that is not in the layout"


@only(lambda quantizer: bool(quantizer.new_state()), "keeps state across steps")
def test_state_gives_the_declared_statistics(quantizer: Quantizer) -> None:
    """``recall`` gives statistics to encode with, from a fresh state and from one that has seen a tensor."""
    x = normal(24, 40)
    for side in quantizer.state_branches().values():
        if not side.state:
            continue
        state = {s.name: torch.zeros(s.shape) for s in side.state}
        for _ in range(2):
            recalled = side.recall(state)
            for stat in side.stats:
                shape = tuple(recalled[stat.name].shape)
                assert shape == stat.grid(*x.shape), (
                    f"{type(side).__name__}.recall: {stat.name} is {shape} and must be {stat.grid(*x.shape)}"
                )
            check_buffers(side, encode(side, x, recalled), (24, 40), x.dtype)
            before = {name: tensor.clone() for name, tensor in state.items()}
            side.remember(state, measure(side, x))
        assert any(not torch.equal(state[n], t) or t.any() for n, t in before.items()), "remember changed nothing"
