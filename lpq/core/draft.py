"""Draft: what the step of an optimizer has made of a stored tensor so far, in fp32; encoded when the step ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from lpq.core.steps import Step


class Draft:
    """The draft of a tensor, which it shares with its views; most of the time there is none."""

    __slots__ = ("matrix", "step")

    def __init__(self) -> None:
        self.step: Step | None = None
        """The step of an optimizer that may write to the tensor."""
        self.matrix: Tensor | None = None
        """The whole tensor as a matrix, once the step has written to it."""

    @property
    def open(self) -> bool:
        """Whether such a step is running. What a step wrote that raised is dropped here, when somebody looks next."""
        if self.step is not None and not self.step.running:
            self.step = self.matrix = None
        return self.step is not None

    @property
    def written(self) -> bool:
        """Whether a step that is running has written to the tensor, so that the buffers have its value no longer."""
        return self.matrix is not None and self.open
