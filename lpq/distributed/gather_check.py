"""The comparison of models before gathers of weights that are gathered quantized.

A rank with ``weights=None``, or one that converted nothing, gathers before it compares, if it ever does, and waits in
that gather for the others. So where not all ranks come to the first comparison soon, the others gather once as that
rank does. That brings it to its first pass, in which it compares.
"""

from __future__ import annotations

import weakref
from time import monotonic, sleep

import torch
import torch.distributed as dist
from torch import nn

from lpq.distributed import meeting
from lpq.distributed.alike import Comparison, in_vain, waiting_for_ranks
from lpq.distributed.weight_gather import Gather
from lpq.torch_private.fsdp import Site

OFTEN = 0.01
"""Seconds between two looks whether a gather has ended."""
NAN = 255
"""The value of all bytes of a NaN: nobody is to take what arrives for weights."""


def compare_before_gather(comparison: Comparison, root: nn.Module, gather: Gather) -> bool:
    """Compare a model if a recipe has changed since. Raise on all ranks if models differ. Return whether ranks did not
    know that they are alike. While recipes may change by step, each forward compares steps: a rank cannot see that only
    another rank was given a step."""
    due = comparison.moving and comparison.first() is gather and not gather.site.for_backward
    if (knew := comparison.alike) and not due:
        return False
    if comparison.sets:
        comparison.compare(root, steps=due)
    else:
        _compare_first(comparison, root, gather.site)
    comparison.first = weakref.ref(gather)
    return not knew


def _compare_first(comparison: Comparison, root: nn.Module, site: Site) -> None:
    begun = monotonic()
    comparison.compare(root, meeting.SOON)
    if comparison.alike:
        return
    with waiting_for_ranks():
        all_came = _gather_for_others(site)
    if all_came:
        comparison.compare(root, meeting.SOON + meeting.PATIENCE)
    if not comparison.alike:
        raise in_vain(monotonic() - begun)


def _gather_for_others(site: Site) -> bool:
    """Take part in the gather of a unit whose parameters are ordinary, and drop what arrives. Return whether all ranks
    have come to it."""
    sent = torch.full((site.unit_bytes,), NAN, dtype=torch.uint8, device=site.device)
    arrives = sent.new_empty(len(sent) * site.group.size())
    work = dist.all_gather_into_tensor(arrives, sent, site.group, async_op=True)
    assert work is not None
    end = monotonic() + meeting.limit()
    while not work.is_completed():
        if monotonic() >= end:
            return False
        sleep(OFTEN)
    work.wait()
    return True
