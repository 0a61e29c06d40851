"""Draft: what the step of an optimizer has made of a stored tensor so far, in fp32; encoded when the step ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Step(Protocol):
    """The step of an optimizer, in which drafts are made."""

    made: dict[Draft, Tensor | None]
    """The matrix of each draft that was written to."""
    unless: dict[Draft, Tensor | None]
    """See ``Draft.unless``."""

    @property
    def running(self) -> bool:
        """Whether it has neither ended nor raised."""
        ...

    def write(self, only: Draft | None = None) -> None:
        """Encode what was written so far, of all tensors or of one."""


class Draft:
    """The draft of a tensor, which it shares with its views; most of the time there is none.

    The step has what was made in it. Other threads may look: who finds that a step has raised drops what that one made,
    and nothing of a step that begins meanwhile.
    """

    __slots__ = ("step", "told", "writes")

    def __init__(self) -> None:
        self.writes = 0
        """How often the buffers were written to; autograd's count does not grow by what goes through ``.data``."""
        self.told = False
        """Whether somebody was told that the tensor is not finite."""
        self.step: Step | None = None
        """The step of an optimizer that may write to the tensor."""

    @property
    def matrix(self) -> Tensor | None:
        """The whole tensor as a matrix, once the step has written to it."""
        step = self.step
        return step.made.get(self) if step is not None else None

    @matrix.setter
    def matrix(self, made: Tensor | None) -> None:
        if (step := self.step) is not None:
            step.made[self] = made

    @property
    def unless(self) -> Tensor | None:
        """If this is there and not zero, the matrix is as it was: what wrote to it skipped that, as ``GradScaler``
        asks of fused optimizers, and the host does not know."""
        step = self.step
        return step.unless.get(self) if step is not None else None

    @unless.setter
    def unless(self, number: Tensor | None) -> None:
        if (step := self.step) is not None:
            step.unless[self] = number

    @property
    def open(self) -> bool:
        """Whether such a step is running."""
        step = self.step
        return step is not None and step.running

    @property
    def value(self) -> Tensor | None:
        """The matrix, if a step that is running has written to it, so that the buffers have its value no longer."""
        step = self.step
        return step.made.get(self) if step is not None and step.running else None

    @property
    def written(self) -> bool:
        """Whether there is one."""
        return self.value is not None
