"""Formats whose buffers are of a whole dimension and follow from no statistic: such weights stay in high precision."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import whole_formats
from ranks import fully_shard, on_ranks
from sharded import How, same, train, whole
from torch import nn

import lpq
from lpq.core import QuantizedTensor

SAID = {
    "whole_outlier": "buffer 'place' of whole_outlier is of all columns of an operand together",
    "whole_outlier(told=true)": "the columns of an operand of whole_outlier(told=true) must not be cut",
    "whole_codebook": "buffer 'low' of whole_codebook is of all columns of an operand together",
    "whole_mixed": "the columns of an operand of whole_mixed must not be cut",
}


def _recipe(text: str) -> str:
    return f"x=mxfp8(), w={text if text.endswith(')') else text + '()'}, dy=mxfp8()"


def _they_stay_in_high_precision(rank: int) -> None:
    for text, words in SAID.items():
        how = {"width": 128, "inner": 128, "blocks": 1, "ranks": 2}
        plain, expected = train(How(_recipe(text), None, **how), 2)
        for weights in ("high_precision", "quantized"):
            with pytest.warns() if weights == "quantized" else nullcontext():  # it stores none at all
                losses, net = train(How(_recipe(text), weights, **how), 2)
            assert all(e.note.startswith(f"in high precision: {words}") for e in lpq.report(net).weights), text
            assert same(losses, plain), (text, weights)
            assert all(
                torch.equal(whole(p), whole(q)) for p, q in zip(net.parameters(), expected.parameters(), strict=True)
            )


def _a_hybrid_whose_rows_alone_are_of_that_kind(rank: int) -> None:
    """Shards are rows of the row operand, which is none of a dimension that must not be cut."""
    text = "hybrid(row=whole_outlier, col=mxfp8)"
    how = {"width": 128, "inner": 128, "blocks": 1}
    losses, net = train(How(_recipe(text), "high_precision", **how), 2)
    assert all(entry.note.startswith(f"gathered as {text}") for entry in lpq.report(net).weights)
    assert same(losses, train(How(_recipe(text), None, **how), 2)[0])


def _what_is_not_known_at_conversion_is_refused(rank: int) -> None:
    for text, words in SAID.items():
        net = lpq.convert(nn.Linear(64, 64), _recipe(text), weights="quantized")  # for how many ranks?
        assert isinstance(net.weight.data, QuantizedTensor)
        with pytest.raises(ValueError, match=re.escape(f"has no shard of 32 rows: {words}")):
            fully_shard(net)
        with pytest.raises(ValueError, match=re.escape(f"no operand that is a part of the whole tensor's: {words}")):
            lpq.quantizer(text).quantize(torch.randn(32, 64), amax_group=dist.group.WORLD)
        lpq.quantizer(text).quantize(torch.randn(32, 64), col=False, amax_group=dist.group.WORLD)


def _buffers_of_odd_strides_travel(rank: int) -> None:
    """A shard of ``up`` has one scale, in a place of its own in memory; those of ``down`` would cut blocks."""
    text, how = _recipe(whole_formats.STRIDED), {"width": 64, "inner": 128, "blocks": 1}
    plain, _ = train(How(text, None, **how), 2)
    for reshard in (True, False):
        losses, net = train(How(text, "high_precision", reshard=reshard, **how), 2)
        assert same(losses, plain)
        assert "gathered as whole_strided" in str(lpq.report(net))
    losses, net = train(How(text, "quantized", ranks=2, **how), 2)
    assert "stored and gathered as whole_strided" in str(lpq.report(net))
    unsharded, _ = train(How(text, "quantized", ranks=2, shard=False, **how), 2)
    assert same(losses, unsharded)


@pytest.mark.parametrize(
    "check",
    [
        _they_stay_in_high_precision,
        _a_hybrid_whose_rows_alone_are_of_that_kind,
        _what_is_not_known_at_conversion_is_refused,
        _buffers_of_odd_strides_travel,
    ],
)
@on_ranks(2)
def test_two_ranks(rank: int, check: Callable[[int], None]) -> None:
    whole_formats.register()
    check(rank)
