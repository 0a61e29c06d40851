"""State across steps: it gives the declared statistics, and follows the values of the tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lpq.formats import Quantizer
from lpq.operations.encoder import EncoderSpec, bind_encoder, through_operators
from lpq.operations.format_calls import unfit_stats
from lpq.operations.measuring import measure_reference
from lpq.operations.operands import encode_operands
from lpq.operations.quantizing import quantize
from lpq.operations.sides import declared
from lpq.operations.states import measures_fresh, recalls, remember
from lpq.testing.conformance.test_layout import check_buffers
from lpq.testing.conformance.test_purity import untouched, with_one
from lpq.testing.expect import same, same_operand, there
from lpq.testing.operands import SEED, encode, measure, normal
from lpq.testing.options import only

REMEMBERS = only(lambda quantizer: bool(quantizer.new_state()), "keeps state across steps")


def branches(quantizer: Quantizer) -> Iterator[tuple[Quantizer, dict[str, Tensor]]]:
    """Each quantizer that remembers, with a fresh state."""
    for side in quantizer.state_branches().values():
        if side.state:
            yield side, {s.name: torch.zeros(s.shape) for s in side.state}


def steps_of(side: Quantizer) -> int:
    """The number of steps after which each place of a history was written to, and the first place once more."""
    return max(8, *(math.prod(buffer.shape) + 2 for buffer in side.state))


def recall(side: Quantizer, state: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """The statistics that a matrix is encoded with: from the state, and the matrix's own where ``recall`` gives
    None."""
    own, recalled = measure(side, x), side.recall(state)
    for name in own:
        assert name in recalled, (
            f"{type(side).__name__}.recall has no {name!r}; it must have each statistic that stats declares, or None "
            "for one that is measured nevertheless"
        )
    return {name: value if (value := recalled[name]) is not None else own[name] for name in own}


def stats_of_state(side: Quantizer, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The statistics that come from the state, as they are now."""
    return {name: value.clone() for name, value in side.recall(state).items() if value is not None}


@REMEMBERS
def test_state_gives_the_declared_statistics(quantizer: Quantizer) -> None:
    """``recall`` gives statistics to encode with, from a fresh state and from one that holds a tensor's statistics."""
    x = normal(24, 40)
    for side, state in branches(quantizer):
        name = type(side).__name__
        for _ in ("fresh", "used"):
            recalled = recall(side, state, x)
            _, fault = unfit_stats(side, "recall", recalled, x)
            assert fault is None, f"{name}.recall {': '.join(fault or ())}"
            check_buffers(side, encode(side, x, recalled), x)
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
        name, steps = type(side).__name__, steps_of(side)
        _take(side, state, measure(side, x), steps)
        before = stats_of_state(side, state)
        stats = measure(side, x * 10)
        given = {f"the statistic {key!r}": value for key, value in stats.items()}
        untouched(given, partial(_take, side, state, stats, steps), f"{side}: remember")
        after = stats_of_state(side, state)
        assert not before or any(not torch.equal(after[key], value) for key, value in before.items()), (
            f"{name}.recall gives the same statistics as before, after {steps} steps with a tensor that is ten times "
            "as large; they must follow it: let remember write to state, in place, at every step"
        )
        kept = {f"the state {key!r}, to which only remember may write": value for key, value in state.items()}
        untouched(kept, partial(side.recall, state), f"{side}: recall")


@REMEMBERS
def test_a_spike_is_forgotten(quantizer: Quantizer) -> None:
    """One step with a tensor that is a thousand times as large, or that has an infinity or a NaN in it, raises the
    recalled statistics for a while, not for ever: after as many ordinary steps as a history has places, and two, they
    are smaller again."""
    x = normal(24, 40)
    spikes = {
        "was a thousand times as large": x * 1000,
        "had an infinity in it": with_one(x, torch.inf),
        "had a NaN in it": with_one(x, torch.nan),
    }
    for (side, state), (how, spike) in itertools.product(branches(quantizer), spikes.items()):
        steps = steps_of(side)
        _take(side, state, measure(side, x), steps)
        before = stats_of_state(side, state)
        _take(side, state, measure(side, spike), 1)
        spiked = stats_of_state(side, state)
        _take(side, state, measure(side, x), steps)
        for key, value in stats_of_state(side, state).items():
            least = torch.fmin(spiked[key], 2**20 * before[key])  # of what is not finite a step may take anything
            mask = ~((value <= before[key]) | (value < least))
            assert not mask.any(), (
                f"{side}: {steps} steps after one whose tensor {how}, recall still gives a {key!r} of "
                f"{value[mask][0]:.3g}, as directly after it, and {before[key][mask][0]:.3g} before: all "
                "values between are lost for ever; forget the oldest statistic, or let it decay at each step, and "
                "remember none that is not finite"
            )


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
        recalled, top = recall(side, state, x), x.abs().max()
        largest = encode(side, x, recalled).decode().abs().max()
        for larger in (x * 10, x * 2.0**20):
            decoded = encode(side, larger, recalled).decode()
            beyond = (larger.abs() > top) & decoded.isfinite()
            wrong = beyond & ((decoded.sign() != larger.sign()) | (decoded.abs() < largest / 2))
            if wrong.any():
                value, result = larger[wrong][0].item(), decoded[wrong][0].item()
                raise AssertionError(
                    f"{side}: {value:.3g}, beyond the {top:.3g} that its state remembers, comes back as {result:.3g}; "
                    "it must saturate with its sign: clamp to the range of the codes before you cast"
                )


@only(measures_fresh, "measures while its state is empty")
def test_a_fresh_state_is_measured(quantizer: Quantizer) -> None:
    """With ``fresh = "measure"`` a first step encodes as without a state, by kernels and by operators, and remembers
    what it measured."""
    x, seed = normal(24, 40), torch.tensor(SEED)
    whole = encode_operands(quantizer, x, seed=seed)
    spec = EncoderSpec(quantizer, (24, 40), x.dtype, x.device, measures=True)
    recalled = quantizer.new_state()
    remember(quantizer, recalled, encode_operands(quantizer, x, state=recalled).measured)
    for bind in (bind_encoder, through_operators):
        encoder, state = bind(spec), quantizer.new_state()
        of_row, of_col, measured = encoder.encode(x, (), seed)
        for operand, buffers, other in ((encoder.row, of_row, whole.row), (encoder.col, of_col, whole.col)):
            result = there(operand, f"{quantizer}: an operand").storage(buffers)
            same_operand(result, there(other, f"{quantizer}: an operand"), f"{quantizer}, in its first step")
        remember(quantizer, state, [*measured])
        for key, value in state.items():
            assert value.any(), f"{quantizer}: {key} is empty after the first step"
            if quantizer.col_source == "original":
                same(value, recalled[key], f"{quantizer}: {key} after the first step")


@only(
    lambda q: bool(q.frozen().new_state()) and not q.new_state() and q.col_source == "original",
    "can have static statistics",
)
def test_static_statistics_come_from_the_state(quantizer: Quantizer) -> None:
    """With the option ``static``, statistics of the whole matrix come from the state, the others are measured, and
    encoding changes no state."""
    static, x, seed = quantizer.frozen(), normal(24, 40), torch.tensor(SEED)
    row, col = static.side("row"), static.side("col")
    declared_stats, own, larger = declared(row, col), measure_reference(x, row, col), measure_reference(x * 3, row, col)
    frozen = recalls(static, row, col)
    for (stat, _), is_static in zip(declared_stats, frozen, strict=True):
        assert is_static <= stat.of_all, f"{static}: {stat.name} is static, and is not of the whole matrix"
    keys = [prefix + s.name for prefix, side in static.state_branches().items() for s in side.state]
    state = dict(zip(keys, [s for s, is_static in zip(larger, frozen, strict=True) if is_static], strict=True))
    kept = {f"the static statistic {key!r}": value for key, value in state.items()}
    encoding = partial(encode_operands, static, x, state=state, seed=seed)
    operands = untouched(kept, encoding, f"{static}: encoding")
    stats = [b if is_static else a for a, b, is_static in zip(own, larger, frozen, strict=True)]
    expected = quantize(x, stats, row, col, seed)
    for one, other in zip(operands[:2], expected[:2], strict=True):
        same_operand(there(one, f"{static}: an operand"), there(other, f"{static}: an operand"), f"{static}")


def _take(side: Quantizer, state: dict[str, Tensor], stats: dict[str, Tensor], steps: int = 8) -> None:
    for _ in range(steps):
        side.remember(state, stats)
