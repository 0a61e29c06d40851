"""A check that the ranks which share weights out have the same model: different recipes would be mixed in silence.

They compare one hash, in a collective of a few words, before the first gather, when a recipe has changed, and in every
forward while a later step may change one; where lpq gathers no weight, before steps of optimizers. Where it differs,
they exchange descriptions of their models, and all raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from threading import Timer
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lpq.distributed.agree import exchange
from lpq.distributed.shard import WeightShard
from lpq.operations.reduce_statistics import same_ranks
from lpq.registry.warning import warn
from lpq.tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lpq.torch_private.fsdp import Site

WORDS = 4
BITS = 30
LIMIT = (1 << BITS) - 1
"""The largest word of the hash. With each word goes its complement, so that a MAX shows whether all are equal."""
PATIENCE = 30.0
"""Seconds after which a rank that waits for the others warns. They may be late for good reasons, so it waits on."""
REMEDY = "Build and convert the model, and call lpq.set_step, alike on all ranks"


def check_alike(sites: Mapping[nn.Module, Site], names: Mapping[nn.Module, str]) -> list[Site]:
    """Raise on all ranks if those that share out these parameters, or hold replicas of them, have different ones. It
    takes a collective for each set of ranks; return a parameter of each."""
    shared: dict[tuple[int, ...], list[tuple[nn.Module, Site]]] = {}
    for module, site in sites.items():
        shared.setdefault(same_ranks(site.group), []).append((module, site))
    for parts in shared.values():
        texts = [_described(names[module], module, site) for module, site in parts]
        site = parts[0][1]
        if not _equal(texts, _groups(site), site.device):
            difference = _first_difference(exchange(texts, _groups(site)))
            raise RuntimeError(f"the ranks do not have the same model: {difference}. {REMEDY}")
    return [parts[0][1] for parts in shared.values()]


def are_equal(text: str, sites: Sequence[Site]) -> bool:
    """Whether all ranks that share out these parameters, or hold replicas of them, pass the same text; a collective for
    each set of ranks."""
    return _equal([text], [group for site in sites for group in _groups(site)], sites[0].device)


def _groups(site: Site) -> list[ProcessGroup]:
    return [group for group in (site.group, site.replicas) if group is not None and group.size() > 1]


def _described(name: str, module: nn.Module, site: Site) -> str:
    """A description of a parameter that must be equal on all ranks: its module's name, class, recipe and so on."""
    local, shape = site.local, list(site.param.shape)
    kind = type(module).__name__.removeprefix("FSDP")
    if isinstance(local, QuantizedTensor):
        how = f"stored as {local.quantizer}"
    else:
        how = "in high precision" if not isinstance(local, WeightShard) else "gathered quantized"
    text = f"{name}: {kind} with a weight {shape} of {site.dtype}, {how}"
    if not hasattr(module, "weight_quantizer"):
        return text
    layer: Any = module
    text += f", recipe {layer.recipe.text if layer.recipe is not None else None}"
    if layer.schedule is None or len(layer.schedule.pieces) == 1:
        return text
    at_step = layer.stages is not None and layer.stages.was_set
    return f"{text}, at step {layer.stages.step} of ({layer.schedule})" if at_step else f"{text}, before lpq.set_step"


def _equal(texts: Sequence[str], groups: Sequence[ProcessGroup], device: torch.device) -> bool:
    """Whether all ranks of these groups pass the same texts, of which each makes one hash."""
    import torch.distributed as dist

    number = int.from_bytes(hashlib.sha256("\n".join(texts).encode()).digest()[:16], "big")
    words = [number >> (BITS * i) & LIMIT for i in range(WORDS)]
    both = torch.tensor([*words, *(LIMIT - word for word in words)], dtype=torch.int32, device=device)
    waits = Timer(PATIENCE, _warn_of_waiting)
    waits.daemon = True
    waits.start()
    try:
        for group in groups:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        found = both.view(2, -1).tolist()
    except RuntimeError as error:
        raise RuntimeError(
            "ranks compare recipes that are new before weights are gathered or, with weights=None, before an optimizer "
            f"writes to them, and another rank did not, or is gone. {REMEDY}, before the same forward ({error})"
        ) from error
    finally:
        waits.cancel()
    return all(a + b == LIMIT for a, b in zip(*found, strict=True))


def _warn_of_waiting() -> None:
    warn(
        f"ranks compare their models before weights are gathered or, with weights=None, before an optimizer writes to "
        f"them, and another rank has not for {PATIENCE:.0f} s. It is late, or it never will: with another weights= it "
        f"compares at another time, and if its model was not converted, never. {REMEDY}"
    )


def _first_difference(known: Mapping[int, Sequence[str]]) -> str:
    """The first difference between the first rank and another one, in words."""
    first = min(known)
    rank = next((rank for rank in sorted(known) if known[rank] != known[first]), first)
    for a, b in zip_longest(known[first], known[rank], fillvalue="no more layers"):
        if a != b:
            return f"rank {first} has [{a}], and rank {rank} has [{b}]"
    return "their descriptions have the same words and other hashes"
