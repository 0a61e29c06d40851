"""The passes of a training as CUDA graphs: a small model's step is as long as the host takes to launch its kernels.

Forward, backward and the clipping are recorded. The optimizer's step is not: its learning rate is a number of the host.
A replay computes the bits of a step that is not recorded; the GPU's generator draws on in it as it would without.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lpq.nn.stateful_layer import stateful_layers
from lpq.train.errors import TrainError
from lpq.train.team import Team

Passes = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
WARM = 2
"""Steps that are run before one is recorded: kernels are compiled in them, and states begin."""


def refuse_record(team: Team) -> None:
    """Raise an error where no training can be recorded."""
    if team.device.type != "cuda":
        raise TrainError(
            f"--record makes CUDA graphs, and the device is {team.device}: leave it out, or use --device cuda"
        )
    if team.many:
        raise TrainError("--record is for a training in one process: start it without torchrun, or leave it out")


class Recorded:
    """Passes that leave gradients in a model's parameters. The next call overwrites the tensors that a call returns.

    The passes are recorded once they are warm, and anew when layers have got other recipes. All batches have one shape.
    """

    def __init__(self, model: nn.Module, passes: Passes, device: torch.device) -> None:
        self._passes, self._model, self._device = passes, model, device
        self._layers = [*stateful_layers(model).values()]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._forget()

    def _forget(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: dict[nn.Parameter, Tensor | None] = {}
        self._recipes = [layer.recipe for layer in self._layers]
        self._warm = 0

    def __call__(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Run the passes for a batch, or replay them."""
        if self._recipes != [layer.recipe for layer in self._layers]:
            self._forget()
        if self._warm < WARM:
            self._warm += 1
            return self._aside(lambda: self._passes(tokens.to(self._device), targets.to(self._device)))
        if self._graph is None:
            self._batch = tokens.to(self._device), targets.to(self._device)
            self._record()
        for ours, theirs in zip(self._batch, (tokens, targets), strict=True):
            ours.copy_(theirs)
        assert self._graph is not None
        self._graph.replay()
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient  # the optimizer forgets them after its step
        return self._found

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._found = self._passes(*self._batch)
        self._graph = graph
        self._gradients = {parameter: parameter.grad for parameter in self._model.parameters()}

    def _aside(self, run: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Run on the stream that records, where torch wants passes to be warm."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            found = run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return found
