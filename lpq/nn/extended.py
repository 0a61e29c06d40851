"""Modules of other libraries that become instances of a class of lpq, where they stand.

To other code such a module stays the same: its class is a subclass of its former one, and parameters, hooks and
references to it stay.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from torch import nn

from lpq.tensor.fsdp_protocol import attribute_names


class Extension:
    """A class of lpq that extends the classes of modules: ``extend`` makes the subclass of both."""

    lpq_bases: ClassVar[tuple[type[Extension], type[nn.Module]]]
    """The class of lpq, and the class of the module before; the module may have a child of any other name."""

    @classmethod
    def attributes_for(cls, base: Any) -> dict[str, Any]:
        """Return the attributes of the subclass for modules of the class ``base``."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the classes before in copies and pickles, as no module of Python has the subclass."""
        return fresh, self.lpq_bases, self.__getstate__()


@cache
def _subclass(kind: Any, base: Any) -> Any:
    own = {"lpq_bases": (kind, base), "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (kind, base), own | kind.attributes_for(base))


def clashes(module: nn.Module, kind: Any) -> list[str]:
    """The attributes that a module would lose as one of ``kind``, as that class has others of these names."""
    base: Any = next(c for c in type(module).__mro__ if not c.__module__.startswith("torch.distributed."))
    ours = attribute_names(kind) - attribute_names(nn.Linear) - {"bias"}  # which all have for the same
    if issubclass(kind, base):
        ours -= attribute_names(base)
    own = {*vars(module), *module._parameters, *module._buffers, *module._modules, *attribute_names(base)}
    return sorted(own & ours)


def extend(module: nn.Module, kind: Any) -> None:
    """Extend the class of this very module."""
    base: Any = type(module)
    module.__class__ = _subclass(kind, base)


def class_before(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before ``extend``, or has."""
    return module.lpq_bases[1] if isinstance(module, Extension) else type(module)


def check_extended(module: Any) -> None:
    """Refuse a module whose class is another one since it was extended."""
    kind, base = module.lpq_bases
    if type(module) is not _subclass(kind, base):
        raise RuntimeError(
            f"a {base.__name__} that lpq extended has become a {type(module).__name__} since, as by fully_shard or "
            "a parametrization: call lpq.unfuse or lpq.restore before that"
        )


def restore(module: Any, *own: str) -> None:
    """Give a module that was extended its class before, and take the attributes with these names away."""
    check_extended(module)
    module.__class__ = module.lpq_bases[1]
    for name in own:
        vars(module).pop(name, None)


def fresh(kind: Any, base: Any) -> Any:
    """Return a module whose state comes from ``__setstate__``."""
    return object.__new__(_subclass(kind, base))
