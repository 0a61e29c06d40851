"""Draft: what the step of an optimizer has made of a stored tensor so far, in fp32; encoded when the step ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from lpq.core.steps import Step


class Draft:
    """The draft of a tensor, which it shares with its views; most of the time there is none.

    Other threads may look: so nothing changes when somebody looks, and what a step that raised has left is passed over
    until the next step begins.
    """

    __slots__ = ("matrix", "step", "unless", "writes")

    def __init__(self) -> None:
        self.writes = 0
        """How often the buffers were written to; autograd's count does not grow by what goes through ``.data``."""
        self.begin(None)

    def begin(self, step: Step | None) -> None:
        """A step begins, or none is running any longer."""
        self.matrix: Tensor | None = None
        """The whole tensor as a matrix, once the step has written to it."""
        self.unless: Tensor | None = None
        """If this is there and not zero, the matrix is as it was: what wrote to it skipped that, as ``GradScaler``
        asks of fused optimizers, and the host does not know."""
        self.step = step
        """The step of an optimizer that may write to the tensor."""

    @property
    def open(self) -> bool:
        """Whether such a step is running."""
        step = self.step
        return step is not None and step.running

    @property
    def value(self) -> Tensor | None:
        """The matrix, if a step that is running has written to it, so that the buffers have its value no longer."""
        matrix = self.matrix
        return matrix if matrix is not None and self.open else None

    @property
    def written(self) -> bool:
        """Whether there is one."""
        return self.value is not None
