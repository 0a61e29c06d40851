"""Norms as functions, for a forward of one's own: with the arguments of ``torch.nn.functional``, and the layers that
read the result, for which it is encoded.

They compute as the modules ``lpq.nn.RMSNorm`` and ``lpq.nn.LayerNorm`` do: the first of these layers keeps such a
module without parameters, and each call has a copy of it with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpq.nn.linear import Layer
from lpq.nn.norms import EncodingNorm, LayerNorm, RMSNorm


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    layers: Sequence[nn.Module],
) -> Tensor:
    """Return what ``F.rms_norm`` returns, encoded for the layers that read it.

    Layers of lpq multiply the encoding of their format. Everything else takes the result in high precision. Results and
    gradients equal the results of ``F.rms_norm`` and the layers apart as far as ``lpq.nn.RMSNorm`` does.

    Args:
        input: The tensor to normalize.
        normalized_shape: Its last dimension. With more dimensions nothing is encoded.
        weight: The factor of each column. Without one nothing is encoded.
        eps: The number added to the mean square; None: the one that ``F.rms_norm`` chooses.
        layers: All modules that read the result, in each pass. Layers whose recipe remembers inputs share a history.
    """
    norm = _kept(RMSNorm, input, normalized_shape, eps, layers)
    if norm is None:
        return F.rms_norm(input, [*normalized_shape], weight, eps)
    y: Tensor = _with(norm, weight=weight).forward(input)
    return y


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    layers: Sequence[nn.Module],
) -> Tensor:
    """Return what ``F.layer_norm`` returns, encoded for the layers that read it; see ``rms_norm``.

    Args:
        input: The tensor to normalize.
        normalized_shape: Its last dimension. With more dimensions nothing is encoded.
        weight: The factor of each column. Without one nothing is encoded.
        bias: The number added to each column.
        eps: The number added to the variance.
        layers: All modules that read the result, in each pass. Layers whose recipe remembers inputs share a history.
    """
    norm = _kept(LayerNorm, input, normalized_shape, eps, layers)
    if norm is None:
        return F.layer_norm(input, [*normalized_shape], weight, bias, eps)
    y: Tensor = _with(norm, weight=weight, bias=bias).forward(input)
    return y


def _kept(
    kind: Callable[..., EncodingNorm], input: Tensor, shape: Sequence[int], eps: float | None,
    layers: Sequence[nn.Module],
) -> EncodingNorm | None:  # fmt: skip
    """The norm that serves these layers; None if it would encode nothing, or torch refuses the shape."""
    if not isinstance(input, Tensor):
        raise TypeError(f"input is a {type(input).__name__}: pass a tensor")
    if isinstance(shape, int):
        raise TypeError(f"normalized_shape is a int: pass ({shape},)")
    if not isinstance(layers, Iterable):
        raise TypeError(f"layers is a {type(layers).__name__}: it is a sequence of the modules that read the result")
    alone = isinstance(layers, nn.Module) and not isinstance(layers, nn.ModuleList | nn.Sequential)
    stranger = layers if alone else next((one for one in layers if not isinstance(one, nn.Module)), None)
    if stranger is not None:
        what = f"layers {'is' if alone else 'has'} a {type(stranger).__name__}"
        raise TypeError(f"{what}: it is a sequence of the modules that read the result")
    if (*shape,) != input.shape[-1:]:
        return None
    consumers = tuple(layer for layer in layers if isinstance(layer, Layer))
    if not consumers or torch.compiler.is_compiling():
        return None
    norms, key = consumers[0].passes.norms, (kind, *shape, eps, len(layers), *map(id, consumers))
    norm: EncodingNorm | None = norms.get(key)
    if norm is None or norm.consumers != consumers:
        norm = norms[key] = kind([*shape], eps, elementwise_affine=False)
        norm.consumers, norm.serves_others, norm._calls = consumers, len(consumers) < len(layers), {}
    return norm


def _with(norm: EncodingNorm, **parameters: Tensor | None) -> EncodingNorm:
    """A copy with these parameters, of which the norm keeps none. Both have the same bound calls."""
    copy = norm.__new__(type(norm))
    vars(copy).update(vars(norm), _parameters=parameters)
    return copy
