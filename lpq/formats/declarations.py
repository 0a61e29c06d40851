"""Checks of what a format declares, made when one of its quantizers is: a fault has words then, and not at the first
pass. And what follows from declarations about parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lpq import registry
from lpq.formats.layout import DIMENSIONS
from lpq.formats.rotation import why_unfit
from lpq.formats.state_order import falling
from lpq.registry.errors import LpqError, words


def _fault(quantizer: Any, cause: str, remedy: str) -> Exception:
    return registry.at_fault(registry.format_of(type(quantizer)).name, cause, remedy)


@contextmanager
def raised_by(quantizer: Any) -> Iterator[None]:
    """Have an exception in what a format declares be an error of its plugin."""
    try:
        yield
    except LpqError:
        raise
    except Exception as error:
        cause = f"{quantizer}: what {type(quantizer).__name__} declares raised {words(error)}"
        raise _fault(quantizer, cause, "correct the declaration that the message is about") from error


def check_declared(side: Any, **kinds: tuple[type, Any]) -> None:
    for what, (kind, declared) in kinds.items():
        if not isinstance(declared, Sequence) or not all(isinstance(one, kind) for one in declared):
            cause = f"{side} has {what}={declared!r}, which is no tuple of {kind.__name__}"
            raise _fault(side, cause, f"write a tuple, ({kind.__name__}(…),), with a comma if it is one")


def check_side(quantizer: Any, side: Any, direction: str, quantizers: type[Any], storages: type[Any]) -> None:
    """Refuse sides early that would fail in a compiler, which cannot make quantizers, or at the first transpose.
    ``quantizers`` and ``storages``: the classes whose methods a format replaces by its own."""
    if quantizer.side(direction) is not side:
        method = f"{type(quantizer).__name__}.side({direction!r})"
        cause = f"{quantizer}: {method} makes a new quantizer whenever it is called"
        remedy = "make it once, in a functools.cached_property, and return that; torch.compile cannot make one"
        raise _fault(quantizer, cause, remedy)
    if side.fresh not in ("recall", "measure") or (side.fresh == "measure" and not side.state):
        cause = f"{side} has fresh={side.fresh!r}" + (", and no state" if side.fresh == "measure" else "")
        raise _fault(side, cause, "let it be 'measure' where there is a state, and 'recall' elsewhere")
    cls, again = type(side), [stat.name for stat in side.stats if stat.round == 2]
    if again and cls.measure_again is quantizers.measure_again:
        cause = f"{side} measures {again[0]!r} in round 2, and {cls.__name__} has no measure_again(self, x, stats)"
        raise _fault(side, cause, "define it: it returns the statistics of round 2")
    if side.state and any(stat.round == 2 or stat.reduce == "sum" for stat in side.stats):
        cause = f"{side} remembers statistics across steps, and these are combined by MAX in one round"
        raise _fault(side, cause, "give it no state, or statistics of round 1 with reduce='max'")
    if side.moves and (name := falling(side.state, side.stats, side.remember)) is not None:
        cause = f"{side}: its state {name!r} falls as a statistic rises, and ranks combine their states by MAX"
        raise _fault(side, cause, "remember the statistic itself, an amax, and compute what falls in recall or encode")
    if cls.measure is not quantizers.measure and cls.stats is quantizers.stats:
        cause = f"{side}: {cls.__name__}.measure is never called, since stats declares nothing"
        remedy = f"declare what it returns, {cls.__name__}.stats, or take measure away"
        raise _fault(side, cause, remedy)
    if (unfit := why_unfit(side, storages)) is not None:
        raise _fault(side, *unfit)
    if getattr(side.storage.wrap, "__func__", None) is not storages.wrap.__func__:
        cause = f"{side}: {side.storage.__name__}.wrap is never called, since it is from_tensors now"
        raise _fault(side, cause, "define from_tensors in place of wrap")
    if side.transposable and side.storage.transposed is storages.transposed:
        storage = side.storage.__name__
        cause = f"{side} is declared transposable, and {storage} has no transposed()"
        raise _fault(side, cause, f"define {storage}.transposed(self), or take transposable away")


def why_no_parts(side: Any, dim: int) -> str | None:
    """Why an operand of this quantizer must not be cut along its rows (0) or columns (1); None if it may."""
    if side.plain:
        return None
    if dim in side.uncut:
        return f"the {DIMENSIONS[dim]} of an operand of {side} must not be cut"
    spanning = [buffer.name for buffer in side.layout if buffer.block[dim] is None]
    if not spanning or any(stat.block[dim] is None for stat in side.stats):
        return None
    return (
        f"buffer {spanning[0]!r} of {side} is of all {DIMENSIONS[dim]} of an operand together and follows from no "
        "statistic of them"
    )
