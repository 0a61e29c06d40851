"""The methods that FSDP2 calls on a tensor that it shards, before and after a gather. Its layer carries them out."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import torch
from torch import Tensor

from lpq.tensor.inference import normal_tensors
from lpq.torch_private.tensors import PARAMETER, is_parameter

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


class Gatherer(Protocol):
    """How one parameter is gathered."""

    def begin(self, shard: Any) -> tuple[Tensor, ...]:
        """Return the tensors to gather of this rank's shard."""

    def finish(self, outputs: tuple[Tensor, ...], out: Tensor | None) -> Any:
        """Return the whole parameter, made of the gathered tensors, and the tensors to free with it; or fill
        ``out``."""


class _WithSignature:
    """A method with a stored signature: FSDP2 reads the signature at every gather, and Python computes a method's
    signature anew each time."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        _, *others = inspect.signature(method).parameters.values()
        self.signature = inspect.Signature(others)

    def __get__(self, tensor: object, owner: type) -> Callable[..., Any]:
        if tensor is None:
            return self._method
        bound: Any = partial(self._method, tensor)
        bound.__signature__ = self.signature
        return cast("Callable[..., Any]", bound)


class Gathered:
    """A tensor whose layer decides what FSDP2 gathers of it."""

    layer: weakref.ref[nn.Module] | None = None
    """The layer whose weight it is. Only the parameter that ``lpq.convert`` made has it: neither its views and copies
    nor FSDP2's shards have."""

    def given(self, attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The attributes that others have set on it; or the ones of ``attributes`` that others may set."""
        own = {PARAMETER, *attribute_names(type(self)), *cast("Any", self).__tensor_flatten__()[0]}
        return {name: value for name, value in (attributes or vars(self)).items() if name not in own}

    @property
    def write_count(self) -> int:
        """A number that grows when it is written to, also where autograd does not count."""
        raise NotImplementedError(f"{type(self).__name__} does not count writes to it")

    @property
    def buffers(self) -> list[Tensor]:
        """The ordinary tensors that hold its data."""
        raise NotImplementedError(f"{type(self).__name__} has no buffer")

    def data_ptr(self) -> int:
        """The address of the first buffer of a parameter, by which code outside of PyTorch distinguishes parameters. It
        is 0 for any other tensor, such as a detached one in a state dict: so PyTorch finds no memory to copy."""
        return self.buffers[0].data_ptr() if is_parameter(self) else 0

    def share_memory_(self) -> Self:
        """Move its data to memory that processes share."""
        for buffer in self.buffers:
            buffer.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """Whether its data lies there."""
        return all(buffer.is_shared() for buffer in self.buffers)  # type: ignore[no-untyped-call]

    def storage(self) -> Any:
        """Raise: safetensors, which reads it, would write the bytes there in place of the values."""
        assert isinstance(self, Tensor)
        raise TypeError(
            f"{getattr(self, 'whose', '')}this {list(self.shape)} {type(self).__name__} has no storage of its own: "
            'write the model with lpq.export(model, path, layout="lpq", decode=True), or the result of dequantize() of '
            "each QuantizedTensor, and load it with model.load_state_dict; before save_pretrained, call "
            "lpq.integrations.transformers.attach(model)"
        )

    @property
    def replaced_by(self) -> str | None:
        """The function that put another parameter in its place, so that an optimizer of the old parameter trains
        nothing."""
        weight = getattr(self.layer(), "weight", None) if self.layer is not None else None
        if weight is self or not (isinstance(weight, Gathered) or hasattr(weight, "device_mesh")):
            return None
        return "lpq.convert" if getattr(weight, "layer", None) is not None else "fully_shard"

    @_WithSignature
    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], Gatherer]:
        """Return the tensors to gather, and data for ``fsdp_post_all_gather``. FSDP2 calls it before a gather."""
        gather_of = getattr(module, "weight_gather", None)
        if gather_of is None or "weight" not in module._parameters:
            raise RuntimeError(
                f"{getattr(module, 'title', type(module).__name__)}: it has a {[*outer_size]} parameter that "
                "lpq.convert(…, weights=…) prepared as the weight of a layer, and only as such it can be gathered: "
                "apply what computes a weight of it (weight_norm, prune, a parametrization …) before lpq.convert"
            )
        gather: Gatherer = gather_of()
        assert isinstance(self, Tensor)
        with normal_tensors():  # they are kept from gather to gather
            return gather.begin(self), gather

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], gather: Gatherer, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Return the whole parameter, or fill ``out``, which the first call returned. FSDP2 calls it after a gather."""
        if out is not None and not outputs:  # another parameter sent for this parameter, and has filled it
            return None
        if not torch.is_inference_mode_enabled():
            return gather.finish(outputs, out)
        with normal_tensors():  # they are kept from gather to gather
            return gather.finish(outputs, out)


def attribute_names(cls: type) -> set[str]:
    """The names that a class and its bases define or declare at present: transformers adds some for a while."""
    return {name for c in cls.__mro__ for name in (*vars(c), *vars(c).get("__annotations__", ()))}


SIGNATURE: inspect.Signature = vars(Gathered)["fsdp_pre_all_gather"].signature
"""The signature that FSDP2 expects of ``fsdp_pre_all_gather``."""
