"""The processes that train one model together, or this process alone.

Everything that decides how a run goes on (a loss, a signal, an error of the first rank) is made equal on all processes
here, so that no process waits for another one that went a different way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lpq.distributed.ranks import Ranks
from lpq.train.errors import TrainError
from lpq.train.machine import fast_bf16
from lpq.train.model import GPT

T = TypeVar("T")


class Team(Ranks):
    """All processes of the default group; where there is no group, this process, which then shards nothing. An error on
    any rank is a ``TrainError`` on all."""

    error = TrainError
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def first(self, function: Callable[[], T]) -> T:
        """Call ``function`` on the first rank; all get its result, or the same error. One process has its own error."""
        return super().first(function) if self.many else function()

    def mean(self, value: Tensor) -> float:
        """The mean of a number over the ranks, bitwise the same on all."""
        if self.many:
            value = value.detach().clone()
            dist.all_reduce(value)
            value /= self.size
        return value.item()

    def largest(self, value: int) -> int:
        """The largest of a number over the ranks."""
        if not self.many:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor.item())

    # ------------------------------------------------------------------------------ dividing work

    def check_batch(self, batch: int) -> None:
        """Raise an error if the sequences of a step cannot be shared out equally."""
        if batch % self.size:
            raise TrainError(
                f"batch = {batch} does not divide among {self.size} ranks: each takes as many sequences of a step as "
                f"the others. Use --batch {self.size * -(-batch // self.size)}, or another --nproc-per-node"
            )

    def share(self, batch: Tensor) -> Tensor:
        """This rank's sequences of a batch."""
        return batch.chunk(self.size)[self.rank]

    def shard(self, model: GPT) -> None:
        """Shard the model: each block, then the rest.

        Weights that are gathered in high precision travel as bf16 where the device computes in bf16. Activations
        between blocks keep the dtype that they have without sharding.
        """
        dtype = torch.bfloat16 if fast_bf16(self.device) else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        mesh = init_device_mesh(self.device.type, (self.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
