"""The batches that a calibration takes."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from models import statics
from torch import Tensor, nn

import lpq
from lpq.calibration import CalibrationError


def test_a_batch_may_be_a_mapping_of_another_class() -> None:
    """As a tokenizer of Hugging Face gives, which is no dict."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net, x = lpq.convert(Named(), "fp8-current"), torch.randn(8, 64)
    assert lpq.calibrate(net, [UserDict(x=x)]).samples == 8
    assert torch.equal(statics(net)["layer.x_amax"], x.abs().amax())
    with pytest.raises(CalibrationError, match="a batch is a UserDict without a tensor"):
        lpq.calibrate(net, [UserDict(x="text")])
