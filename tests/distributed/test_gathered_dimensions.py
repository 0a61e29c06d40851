"""Formats whose buffers are of a whole dimension and follow from no statistic: such an operand is encoded where the
weight arrives in high precision, and the other one of shards."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import whole_formats
from ranks import fully_shard, on_ranks
from sharded import W8, How, train
from torch import nn

import lpq
from lpq.core import QuantizedTensor

SAID = {
    "whole_outlier()": "buffer 'place' of whole_outlier is of all columns of an operand together",
    "whole_outlier(told=true)": "the columns of an operand of whole_outlier(told=true) must not be cut",
    "whole_codebook()": "buffer 'low' of whole_codebook is of all columns of an operand together",
    "whole_mixed()": "the columns of an operand of whole_mixed must not be cut",
}
SIZES = {"width": 128, "inner": 128, "blocks": 1}


@on_ranks(2)
def test_a_hybrid_whose_rows_alone_are_of_that_kind(rank: int) -> None:
    """Shards are rows of the row operand, which is none of a dimension that must not be cut."""
    whole_formats.register()
    text = "hybrid(row=whole_outlier, col=mxfp8)"
    losses, net = train(How(W8.format(text), "high_precision", **SIZES), 2)
    assert all(entry.note.startswith(f"gathered as {text}") for entry in lpq.report(net).weights)
    assert losses == train(How(W8.format(text), None, **SIZES), 2)[0]


@on_ranks(2)
def test_what_is_not_known_at_conversion_is_refused(rank: int) -> None:
    whole_formats.register()
    for text, words in SAID.items():
        net = lpq.convert(nn.Linear(64, 64), W8.format(text), weights="quantized")  # for how many ranks?
        assert isinstance(net.weight.data, QuantizedTensor)
        with pytest.raises(ValueError, match=re.escape(f"has no shard of 32 rows: {words}")):
            fully_shard(net)
        with pytest.raises(ValueError, match=re.escape(f"no operand that is a part of the whole tensor's: {words}")):
            lpq.quantizer(text).quantize(torch.randn(32, 64), amax_group=dist.group.WORLD)
        lpq.quantizer(text).quantize(torch.randn(32, 64), col=False, amax_group=dist.group.WORLD)
