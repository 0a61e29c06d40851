"""State across steps: what is remembered gives the statistics that are declared, and follows what the tensor does."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lpq.formats import Quantizer
from lpq.operations.measuring import measure_reference
from lpq.operations.operands import encode_operands, recalls
from lpq.operations.quantizing import quantize
from lpq.operations.sides import declared
from lpq.testing.conformance.test_layout import check_buffers
from lpq.testing.expect import same, same_operand, there
from lpq.testing.operands import SEED, encode, measure, normal
from lpq.testing.options import only

REMEMBERS = only(lambda quantizer: bool(quantizer.new_state()), "keeps state across steps")
STEPS = 8


def branches(quantizer: Quantizer) -> Iterator[tuple[Quantizer, dict[str, Tensor]]]:
    """Each quantizer that remembers, with a fresh state."""
    for side in quantizer.state_branches().values():
        if side.state:
            yield side, {s.name: torch.zeros(s.shape) for s in side.state}


def recall(side: Quantizer, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The statistics that a quantizer whose state moves takes from it: all that it has."""
    return {name: there(value, f"{side}: {name} of recall") for name, value in side.recall(state).items()}


@REMEMBERS
def test_state_gives_the_declared_statistics(quantizer: Quantizer) -> None:
    """``recall`` gives statistics to encode with, from a fresh state and from one that holds a tensor's statistics."""
    x = normal(24, 40)
    for side, state in branches(quantizer):
        name = type(side).__name__
        for _ in ("fresh", "used"):
            recalled = recall(side, state)
            for stat in side.stats:
                shape, grid = tuple(recalled[stat.name].shape), stat.grid(*x.shape)
                assert shape == grid, (
                    f"{name}.recall: {stat.name} is {shape}; as {name}.stats declares it, it must be {grid}"
                )
            check_buffers(side, encode(side, x, recalled), (24, 40), x.dtype)
            side.remember(state, measure(side, x))
        assert any(tensor.any() for tensor in state.values()), (
            f"{name}.remember leaves the state at zeros; it must take the statistics into it: write to the tensors of "
            "state in place, as state['amax'].copy_(…)"
        )


@REMEMBERS
def test_state_follows_the_tensor(quantizer: Quantizer) -> None:
    """After a tensor that is ten times as large, ``recall`` gives other statistics than before. ``remember`` writes to
    no statistic, and ``recall`` to no state."""
    x = normal(24, 40)
    for side, state in branches(quantizer):
        name = type(side).__name__
        _take(side, state, measure(side, x))
        before = {key: value.clone() for key, value in recall(side, state).items()}
        stats = measure(side, x * 10)
        given = {key: value.clone() for key, value in stats.items()}
        _take(side, state, stats)
        for key, value in given.items():
            same(stats[key], value, f"{side}: remember changed the statistic {key!r}; copy it, and change the copy")
        after = recall(side, state)
        assert any(not torch.equal(after[key], value) for key, value in before.items()), (
            f"{name}.recall gives the same statistics as before, after {STEPS} steps with a tensor that is ten times "
            "as large; they must follow it: let remember write to state, in place, at every step"
        )
        kept = {key: value.clone() for key, value in state.items()}
        recall(side, state)
        for key, value in kept.items():
            same(state[key], value, f"{side}: recall changed the state {key!r}; only remember may write to it")


@only(
    lambda q: bool(q.new_state()) and not any(side.rotation for side in q.state_branches().values()),
    "keeps state across steps, of values in their own basis",
)
def test_values_beyond_what_is_remembered_saturate(quantizer: Quantizer) -> None:
    """A tensor that is ten times as large as the one before comes back with its signs and no smaller than that one did,
    or not finite: no code wraps around."""
    x = normal(24, 40)
    for side, state in branches(quantizer):
        _take(side, state, measure(side, x))
        recalled, known = recall(side, state), x.abs().max()
        largest = encode(side, x, recalled).decode().abs().max()
        for larger in (x * 10, x * 2.0**20):
            decoded = encode(side, larger, recalled).decode()
            beyond = (larger.abs() > known) & decoded.isfinite()
            wrong = beyond & ((decoded.sign() != larger.sign()) | (decoded.abs() < largest / 2))
            if wrong.any():
                value, got = larger[wrong][0].item(), decoded[wrong][0].item()
                raise AssertionError(
                    f"{side}: {value:.3g}, beyond the {known:.3g} that its state remembers, comes back as {got:.3g}; "
                    "it must saturate with its sign: clamp to the range of the codes before you cast"
                )


@only(
    lambda q: bool(q.frozen().new_state()) and not q.new_state() and q.col_source == "original",
    "can have static statistics",
)
def test_static_statistics_come_from_the_state(quantizer: Quantizer) -> None:
    """With the option ``static``, statistics of the whole matrix are those of the state, the others are measured, and
    encoding changes no state."""
    static, x, seed = quantizer.frozen(), normal(24, 40), torch.tensor(SEED)
    row, col = static.side("row"), static.side("col")
    needed, own, larger = declared(row, col), measure_reference(x, row, col), measure_reference(x * 3, row, col)
    frozen = recalls(static, row, col)
    for (stat, _), known in zip(needed, frozen, strict=True):
        assert known <= stat.of_all, f"{static}: {stat.name} is static, and is not of the whole matrix"
    keys = [prefix + s.name for prefix, side in static.state_branches().items() for s in side.state]
    state = dict(zip(keys, [s for s, known in zip(larger, frozen, strict=True) if known], strict=True))
    before = {key: value.clone() for key, value in state.items()}
    made = encode_operands(static, x, state=state, seed=seed)
    stats = [b if known else a for a, b, known in zip(own, larger, frozen, strict=True)]
    expected = quantize(x, stats, row, col, seed)
    for one, other in zip(made[:2], expected[:2], strict=True):
        same_operand(there(one, f"{static}: an operand"), there(other, f"{static}: an operand"), f"{static}")
    for key, value in before.items():
        same(state[key], value, f"{static}: encoding changed the static statistic {key!r}")


def _take(side: Quantizer, state: dict[str, Tensor], stats: dict[str, Tensor]) -> None:
    for _ in range(STEPS):
        side.remember(state, stats)
