"""Formats whose buffers are of a whole dimension and follow from no statistic: such an operand is encoded where the
weight arrives in high precision, and the other one of shards."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import whole_formats
from ranks import fully_shard, on_ranks
from sharded import W8, How, same_weights, train
from torch import nn

import lpq
from lpq.core import QuantizedTensor
from lpq.observe import collectives, gathered_bytes

SAID = {
    "whole_outlier()": "buffer 'place' of whole_outlier is of all columns of an operand together",
    "whole_outlier(told=true)": "the columns of an operand of whole_outlier(told=true) must not be cut",
    "whole_codebook()": "buffer 'low' of whole_codebook is of all columns of an operand together",
    "whole_mixed()": "the columns of an operand of whole_mixed must not be cut",
}
SIZES = {"width": 128, "inner": 128, "blocks": 1}


@on_ranks(2)
def test_their_column_operands_are_encoded_of_the_whole(rank: int) -> None:
    whole_formats.register()
    for text, words in SAID.items():
        plain, expected = train(How(W8.format(text), None, **SIZES), 2)
        for weights in ("high_precision", "quantized"):
            with pytest.warns() if weights == "quantized" else nullcontext():  # it stores none at all
                losses, net = train(How(W8.format(text), weights, ranks=2, **SIZES), 2)
            for entry in lpq.report(net).weights:
                assert entry.note.startswith(f"gathered as {lpq.quantizer(text)}: "), entry
                assert f" 2.00 in backward; in high precision in backward: {words}" in entry.note, entry
            assert weights == "quantized" or _bytes(net) == _bytes_of(net, text), text
            assert losses == plain, (text, weights)
            same_weights(net, expected, (text, weights))


def _bytes(net: nn.Module) -> tuple[int, int]:
    """The bytes that are gathered in forward, and in backward."""
    with collectives() as forward:
        loss = net(torch.randn(8, 128)).square().mean()
    with collectives() as backward:
        loss.backward()
    return gathered_bytes(forward), gathered_bytes(backward)


def _bytes_of(net: nn.Module, text: str) -> tuple[int, int]:
    """The bytes of row operands and vectors in forward, and of weights in high precision and vectors in backward."""
    rest = sum(p.nbytes for p in net.parameters() if p.dim() == 1)
    weights = [p for p in net.parameters() if p.dim() == 2]
    row = sum(lpq.quantizer(text).quantize(torch.empty(p.shape), col=False).row.nbytes for p in weights)
    return rest + row, rest + sum(p.nbytes for p in weights)


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
