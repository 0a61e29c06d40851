"""The course of a run: whether its loss or the norm of its gradients leaves it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lpq.nn.first_argument import check_whole
from lpq.observe.readings import NumericsError, check_number, is_number
from lpq.registry.showing import brief


def _usual(sizes: Sequence[float]) -> float:
    """The median, or the largest where the median is 0, beside which anything would be far out."""
    return median(sizes) or max(sizes)


class Course:
    """The losses and gradient norms of the last steps. One that is off its course is not taken into it."""

    def __init__(self, window: int = 50, *, loss: float = 10.0, norm: float = 5.0, least: int = 10) -> None:
        """
        Args:
            window: How many steps are looked back to.
            loss: A loss is off if it is above the median by more than ``loss`` times the median distance from it.
            norm: A gradient norm is off if it is more than ``norm`` times the median.
            least: The number of steps before which only NaN and infinity are off.
        """
        check_whole("Course", 2, NumericsError, window=window, least=least)
        check_number("Course", math.inf, loss=loss, norm=norm)
        if least > window:
            raise NumericsError(
                f"Course: window={window} looks back to fewer steps than least={least} asks for: give a wider `window` "
                "or a smaller `least`"
            )
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)
        self._loss, self._norm, self._least = loss, norm, least
        self._is_off = False

    def leaves(self, loss: float, norm: float | None = None) -> str | None:
        """Take a step; as ``off``, but None where the step before was off the course, too: so a NaN that stays is
        looked into once."""
        why, was = self.off(loss, norm), self._is_off
        self._is_off = why is not None
        return None if was else why

    def off(self, loss: float, norm: float | None = None) -> str | None:
        """Take a step; return in words why it is off the course, or None."""
        why = self.why(loss, norm)
        if why is None:
            self._losses.append(loss)
            if norm is not None:
                self._norms.append(norm)
        return why

    def why(self, loss: float, norm: float | None = None) -> str | None:
        """Say why a step with this loss and norm is off the course, or None; the step is not taken."""
        for name, value in (("loss", loss), *([] if norm is None else [("gradient norm", norm)])):
            if not is_number(value):
                raise NumericsError(f"Course: the {name} is {brief(value)}: give a number, as loss.item() of a tensor")
            if not math.isfinite(value):
                return f"the {name} is {value}"
        if len(self._losses) >= self._least:
            middle = median(self._losses)
            spread = _usual([max(abs(one - middle), 1e-3 * abs(middle)) for one in self._losses])
            if spread and loss > middle + self._loss * spread:
                return f"the loss is {loss:.4g}, where the last {len(self._losses)} steps had about {middle:.4g}"
        if norm is not None and len(self._norms) >= self._least:
            usual = _usual(self._norms)
            if usual and norm > self._norm * usual:
                return f"the gradient norm is {norm:.4g}, and was about {usual:.4g}"
        return None

    def why_as_well(self, step: tuple[float, float], again: tuple[float, float]) -> str | None:
        """Say why another run of a step leaves the course by what the step leaves it by; None if it does not. Each run
        has a loss and a norm. A value that is not finite is found again only in a run that is not finite either."""
        for ours, theirs in ((step[:1], again[:1]), (step, again)):
            if self.why(*ours) is not None:
                is_worse = not all(map(math.isfinite, ours)) and all(map(math.isfinite, theirs))
                return None if is_worse else self.why(*theirs)
        return None

    def state_dict(self) -> dict[str, Any]:
        """The steps that it looks back to, for a checkpoint."""
        return {"losses": [*self._losses], "norms": [*self._norms], "left": self._is_off}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, in place of the steps so far."""
        is_state = isinstance(state, Mapping) and state.keys() >= {"losses", "norms", "left"}
        has_lists = is_state and all(isinstance(state[key], list | tuple) for key in ("losses", "norms"))
        if not has_lists or not all(is_number(x) and math.isfinite(x) for x in (*state["losses"], *state["norms"])):
            raise NumericsError(f"Course: {brief(state)} is not what state_dict() of a course returns: load that")
        for steps, saved in ((self._losses, state["losses"]), (self._norms, state["norms"])):
            steps.clear()
            steps.extend(saved)
        self._is_off = state["left"]
