"""A training whose loss on held-out text is no number, though the losses of its steps are."""

from __future__ import annotations

import pytest
from rich.console import Console
from torch import Tensor
from training import MakeConfig

from lpq.train import run
from lpq.train.errors import Diverged
from lpq.train.trainer import Trainer


@pytest.mark.parametrize("every", [0, 2])
def test_a_held_out_loss_that_is_no_number_ends_the_run(
    every: int, tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the last step of the optimizer made weights infinite: its gap to the baseline would be no number."""
    own = Trainer.loss

    def loss(self: Trainer, tokens: Tensor, targets: Tensor) -> Tensor:
        value = own(self, tokens, targets)
        return value if self.model.training else value * float("inf")

    monkeypatch.setattr(Trainer, "loss", loss)
    config = tiny(steps=3, baseline=False, validate_every=every)
    with pytest.raises(Diverged, match=rf"after step {every or 3} the loss on held-out text is inf: training diverged"):
        run(config, console)
