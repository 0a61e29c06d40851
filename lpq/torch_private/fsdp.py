"""Every access to private attributes of FSDP2, in one place.

FSDP2 lets a tensor define what is gathered for it (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``), but does not
tell it whether it is gathered for forward or for backward, and keeps the sizes of the first gather for ever. Both are
read and set here on private attributes; the tests in ``tests/torch_private/test_fsdp_internals.py`` fail first when
torch changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor, Shard

from lpq.torch_private.autograd import graph_task


class Site:
    """One parameter as FSDP2 shards and gathers it."""

    def __init__(self, param: FSDPParam, group: Any, root: bool) -> None:
        self.fsdp_param = param
        self._group = group
        self._root = root

    @property
    def local(self) -> Tensor:
        """This rank's shard."""
        return cast("DTensor", self.fsdp_param.sharded_param)._local_tensor

    @property
    def param(self) -> nn.Parameter:
        """The sharded parameter, which the optimizer has."""
        return self.fsdp_param.sharded_param

    @property
    def padded(self) -> Tensor:
        """This rank's shard with the padding that makes all shards equal."""
        return self.fsdp_param._sharded_param_data.view(self.fsdp_param.padded_sharded_param_size)

    @property
    def unit(self) -> object:
        """An object that is the same for all parameters that are gathered together, and for no other."""
        return self._group

    @property
    def unit_bytes(self) -> int:
        """The bytes that a rank sends of the parameters that are gathered together, where all of them are ordinary."""
        sites = [Site(param, self._group, self._root) for param in self._group.fsdp_params]
        return sum(site.padded.numel() * site.dtype.itemsize for site in sites)

    @property
    def offloaded(self) -> bool:
        """Whether shards are in the memory of the CPU, and FSDP2 moves each to the GPU just before its hook."""
        return bool(self.fsdp_param.offload_to_cpu)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameter where it is whole."""
        return self.fsdp_param.mp_policy.param_dtype or self.fsdp_param.sharded_param.dtype

    @property
    def device(self) -> torch.device:
        """Where it is gathered."""
        return self.fsdp_param.device

    @cached_property
    def group(self) -> ProcessGroup:
        """The ranks over which it is sharded."""
        return cast("DeviceMesh", self.fsdp_param.shard_mesh).get_group()

    @property
    def is_parallel(self) -> bool:
        """Whether tensor parallelism shards it, too."""
        return bool(self.fsdp_param.is_dtensor)

    @cached_property
    def parallel(self) -> tuple[ProcessGroup, int] | None:
        """The ranks of tensor parallelism over which it is sharded, too, and the dimension."""
        if not self.is_parallel:
            return None
        param = cast("DTensor", self.param)
        mesh, placement = param.device_mesh, param.placements[-1]  # FSDP2 puts its dimensions before others
        return (mesh.get_group(mesh.ndim - 1), placement.dim) if isinstance(placement, Shard) else None

    @cached_property
    def shape(self) -> torch.Size:
        """The shape of the gathered tensor: under tensor parallelism, of this rank's part."""
        sizes = [*self.param.shape]
        if self.parallel is not None:
            group, dim = self.parallel
            sizes[dim] //= group.size()
        return torch.Size(sizes)

    @cached_property
    def refusal(self) -> str | None:
        """Why this parameter cannot be gathered quantized, for a reason that is FSDP2's; None if it can."""
        if not isinstance(self.fsdp_param.mesh_info, FSDPMeshInfo):
            return "every rank keeps it whole, as replicate(…) has it; use fully_shard, on a mesh with replicas"
        placement = self.fsdp_param.fsdp_placement
        if placement != Shard(0):
            return f"it is sharded by {placement}, and quantized weights are sharded along dimension 0"
        if self.is_parallel:
            shared = self.parallel
            if shared is None or self.param.ndim != 2 or self.param.shape[shared[1]] % shared[0].size():
                return "it is sharded over other ranks, too, and not its rows or its columns equally"
        return None

    @property
    def reshards_to_fewer_ranks(self) -> bool:
        """Whether ``reshard_after_forward`` is a number of ranks, which FSDP2 supports for ordinary tensors only."""
        return bool(self._group._use_post_forward_mesh)

    @property
    def stays(self) -> bool:
        """Whether the parameter stays gathered from forward to backward. FSDP2 decides it for the outermost module in
        its first forward, unless ``reshard_after_forward`` is given: then it stays."""
        return self._root or not self._group._reshard_after_forward

    @property
    def directions(self) -> tuple[bool, bool]:
        """Whether the gather that is beginning must bring the row operand, and the column operand."""
        state = self._group._training_state
        resharded = self._group._reshard_after_forward
        in_backward = graph_task() != -1
        stays = not self._group.reshard_after_backward  # the next forward then gathers nothing
        row = stays or state != TrainingState.PRE_BACKWARD
        col = state != TrainingState.FORWARD or not resharded or in_backward
        return row, col

    @property
    def for_backward(self) -> bool:
        """Whether the gather that is beginning is for the backward of a forward that ran."""
        return self._group._training_state == TrainingState.PRE_BACKWARD  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Have FSDP2 set up the unsharded parameter anew, because the old one is out of date."""
        unsharded = getattr(self.fsdp_param, "_unsharded_param", None)
        if unsharded is None:
            return
        if unsharded.grad is not None or self.fsdp_param.unsharded_accumulated_grad is not None:
            raise RuntimeError(
                "the recipe of a layer changed while its gradient is being accumulated: "
                "change recipes between optimizer steps"
            )
        del self.fsdp_param._unsharded_param
        self.fsdp_param.all_gather_outputs = []
        self.fsdp_param._unsharded_inner_tensors = []


def parameters(sites: Iterable[Site]) -> list[nn.Parameter]:
    """The sharded parameters, which the optimizer has."""
    return [site.fsdp_param.sharded_param for site in sites]


def shards(sites: Iterable[Site]) -> list[Tensor]:
    """This rank's shards of these parameters."""
    return [cast("DTensor", site.fsdp_param.sharded_param)._local_tensor for site in sites]


def gather_into(places: Iterable[tuple[Site, list[Tensor] | None, list[Tensor]]]) -> None:
    """Make FSDP2 gather each parameter into these flat tensors (None: into its own), and allocate and free both them
    and the tensors of a list, which it keeps."""
    for site, outputs, inner in places:
        if outputs is not None:
            site.fsdp_param.all_gather_outputs = outputs
        site.fsdp_param._unsharded_inner_tensors = inner


def sites(root: nn.Module, name: str | None = None) -> dict[nn.Module, Site]:
    """The modules below ``root`` whose parameter with this name, or any parameter, FSDP2 shards, and how."""
    by_module: dict[nn.Module, Site] = {}
    for module in root.modules():
        outermost = module is root and _get_module_fsdp_state(module)
        decides = bool(outermost and outermost._auto_reshard_after_forward)
        for group in _groups(module):
            for param in group.fsdp_params:
                info = param._module_info
                if name in (None, info.param_name):  # a parameter that modules share is not gathered quantized
                    by_module[info.module] = Site(param, group, decides)
    return by_module


def outermost(part: nn.Module) -> nn.Module:
    """The largest module on which ``fully_shard`` was called and that contains ``part``; if there is none, ``part``."""
    refs = _module_state_mapping.keyrefs()  # threads may add some
    modules = [module for ref in refs if (module := ref()) is not None]
    sharded = [module for module in modules if _get_module_fsdp_state(module) is not None]
    around = [module for module in sharded if any(inner is part for inner in module.modules())]
    return max([part, *around], key=lambda module: sum(1 for _ in module.modules()))


def _groups(module: nn.Module) -> Iterator[Any]:
    state = _get_module_fsdp_state(module)
    if state is None:
        return
    groups = getattr(state, "_fsdp_param_groups", None)  # one group a module before torch 2.12
    yield from groups if groups is not None else filter(None, [state._fsdp_param_group])


def allocate(tensors: Iterable[Tensor]) -> None:
    """Give these tensors their memory back; their values are undefined."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size() != tensor.nbytes:
            storage.resize_(tensor.nbytes)


def free(tensors: Iterable[Tensor]) -> None:
    """Take the memory of these tensors, which stay valid objects, as FSDP2 does with gathered tensors."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size():
            storage.resize_(0)
