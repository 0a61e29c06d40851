"""Trials of other code's modules: a forward runs with stand-ins for its parts, and shows what it does with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

REGISTERED = ("_parameters", "_buffers")
"""The dictionaries of parameters and of buffers, to which assignments go."""


class StandIn(nn.Module):
    """Takes the place of a layer: it keeps its input and returns a given tensor."""

    def __init__(self, returned: Tensor) -> None:
        super().__init__()
        self.returned, self.given = returned, list[Any]()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.given += [*args, *kwargs.items()]
        return self.returned


class Functions(TorchFunctionMode):
    """Counts the functions of torch that compute."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") != "__get__"  # an attribute of a tensor
        return func(*args, **(kwargs or {}))


def with_parts(module: nn.Module, base: type[nn.Module], parts: dict[str, nn.Module | None]) -> Any:
    """A copy of a module as an instance of ``base``, with these children: made without an ``__init__``, and without a
    write to the module."""
    like: Any = object.__new__(base)
    like.__dict__.update(module.__dict__, _modules=parts)
    like.__dict__.update({name: dict(module.__dict__[name]) for name in REGISTERED})
    return like


def has_written(like: nn.Module, module: nn.Module) -> bool:
    """Whether a forward of the copy wrote an attribute, as another forward in its place would not."""
    mine, before = _attributes(like), _attributes(module)
    return mine.keys() != before.keys() or any(value is not before[name] for name, value in mine.items())


def settings_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The attributes by which the forward of a module may decide, as they are now."""
    torchs = vars(nn.Module())
    return tuple((name, value) for name, value in vars(module).items() if name not in torchs and "lpq_" not in name)


def is_another(now: Any, before: Any) -> bool:
    """Whether an attribute, which is not the same object, is another: numbers and text come out of a pickle as equal
    objects."""
    return type(now) is not type(before) or type(now) not in (int, float, str) or now != before


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in module.__dict__.items() if name not in ("_modules", *REGISTERED)}
    return {**own, **module._parameters, **module._buffers}
