"""Trials of other code's modules: a forward runs with stand-ins for its parts, and shows what it does with them.

A trial holds as long as the attributes stay by which the forward decided. So it notes the attributes that were
read, and leaves no trace: the forward runs on copies, and random numbers and modes stay as they are for others.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from functools import cache
from inspect import isroutine
from operator import is_
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lpq.nn.extended import class_before
from lpq.nn.unwrapping import children_inside
from lpq.torch_private.compiling import COMPILED_CALL
from lpq.torch_private.dispatch import without_modes
from lpq.torch_private.tensors import local_part, version_of

OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
"""The attributes of every module, which a trial does not note: no forward decides by them."""
ABSENT = "lpq: absent"
"""The value of an attribute that is not the object's own, as a method."""
TRIAL = "lpq_trial"
"""The attribute of copies under which they find their trial."""
MUTABLE = list, dict, set, deque
DEEPEST = 3
"""How deep the contents of an attribute are looked at: ``config.text_config.options``."""

StandFor = Callable[[nn.Module, str, nn.Module], nn.Module | None]
"""``stand_for(parent, name, child)``: what takes the place of a child, which has no wrapper of torch around it; None: a
copy of the child."""


class Read(NamedTuple):
    """An attribute that a forward read, of a module or of a module's class, which has the methods."""

    owner: nn.Module | type
    name: str
    value: Any
    contents: Any
    """The items of the value, if these can change while the object stays, as in a ``config``; else None."""

    def __reduce__(self) -> Any:
        """Many attributes of classes cannot be part of a pickle: they are read again."""
        if isinstance(self.owner, type):
            return _read_of_class, (self.owner, self.name)
        return Read, tuple(self)

    def __deepcopy__(self, memo: Any) -> Read:
        return self if isinstance(self.owner, type) else Read(*deepcopy(tuple[Any, ...](self), memo))


def _read_of_class(owner: type, name: str) -> Read:
    value = vars(owner)[name]
    return Read(owner, name, value, _contents(value))


class ReplacedForward(Exception):
    """A module of a trial has a forward of its own on the object, which would run on the module itself."""


class ScriptedModule(Exception):
    """A module of a trial is compiled by ``torch.jit``: no mode sees the functions that it calls."""


class StandIn(nn.Module):
    """Takes the place of a layer: it notes its calls, and returns a given tensor."""

    def __init__(self, name: str, output: Tensor, calls: list[tuple[str, Any]]) -> None:
        """``calls``: of all stand-ins, in order, each with its input; None: it was not called with that alone."""
        super().__init__()
        del self.training  # no trial notes who asks for its mode, which may change
        self.name, self.output, self.calls = name, output, calls

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append((self.name, args[0] if len(args) == 1 and not kwargs else None))
        return self.output


class Trial(TorchFunctionMode):
    """One run of a forward. It counts the functions of torch that compute, and the attributes of tensors that are read:
    a forward that reads a shape may do something else for another one."""

    def __init__(self, grads: bool = False, device: torch.device | None = None) -> None:
        """``device``: where the forward runs; None: on the CPU."""
        super().__init__()
        self.count = self.attribute_reads = 0
        self.grads, self.device = grads, device or torch.device("cpu")
        self.reads: dict[tuple[int, str], Read] = {}
        self.reads_tensors = False
        """Whether the name of a parameter or a buffer was read, even one that is None."""
        self.drew = False
        """Whether random numbers of torch, Python or NumPy were drawn, or a generator of them was read."""
        self._copies: list[tuple[Any, dict[str, Any], list[int]]] = []
        self._held: list[tuple[Any, Any]] = []
        """The containers in attributes that the forward read, each with its contents then."""
        self._wrote_inside = False

    def __enter__(self) -> Self:
        kind = self.device.type
        self._drawn, self._around = _random_states(), ExitStack()
        devices, seeded = ([], "cuda") if kind == "cpu" else ([self.device], kind)
        for context in (
            aside(),
            torch.random.fork_rng(devices, device_type=seeded),
            torch.autocast(kind, enabled=False),
            torch.enable_grad() if self.grads else torch.no_grad(),
        ):
            self._around.enter_context(context)
        self._of_torch = torch.get_rng_state()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self.drew |= not torch.equal(torch.get_rng_state(), self._of_torch)  # one function may draw, or not, as a ReLU
        self._around.__exit__(*raised)
        for held, before in reversed(self._held):  # what is reached twice was noted first as it was
            if not _is_as(held, before):
                self._wrote_inside = True
                held.clear()
                (held.update if isinstance(held, dict | set) else held.extend)(before)
        self.drew |= _random_states() != self._drawn
        of_python, of_numpy = pickle.loads(self._drawn)
        random.setstate(of_python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            self.attribute_reads += 1
        else:
            self.count += 1
        return func(*args, **(kwargs or {}))

    def copy(self, module: nn.Module, stand_for: StandFor, base: type[nn.Module] | None = None) -> Any:
        """A copy of a module with stand-ins in it, made without an ``__init__``. The module is not written to, nor are
        its buffers. ``base``: its class; None: the class that it had before ``lpq.fuse``."""
        return self._copy(module, stand_for, base, {})

    def _copy(self, module: nn.Module, stand_for: StandFor, base: Any, copies: dict[int, nn.Module]) -> Any:
        if isinstance(module, torch.jit.ScriptModule):
            raise ScriptedModule
        if "forward" in vars(module):
            raise ReplacedForward
        cls: Any = base or class_before(module)
        like: Any = object.__new__(_noting(cls))
        copies[id(module)] = like
        children: dict[str, nn.Module | None] = dict(module._modules)
        for name, child in children_inside(module).items():
            if child is not None:
                twin = copies.get(id(child)) or stand_for(module, name, child)
                copies[id(child)] = twin = twin or self._copy(child, stand_for, None, copies)
                children[name] = twin
        own = {
            k: deepcopy(v) if _draws(v) else copy(v) if k not in OF_EVERY_MODULE and isinstance(v, MUTABLE) else v
            for k, v in vars(module).items()
            if k != COMPILED_CALL  # it calls the module, and not the copy
        }
        buffers = {name: None if b is None else _whole(b).detach().clone() for name, b in module._buffers.items()}
        parameters = {name: _whole(p) for name, p in module._parameters.items()}
        own.update(_modules=children, _parameters=parameters, _buffers=buffers)
        # Hooks would leave traces: FSDP2's take this module for the root of the model. Where they matter they are
        # looked for elsewhere, and they hang on the modules that a fused forward calls.
        own.update({name: value for name, value in vars(nn.Module()).items() if "hook" in name})
        vars(like).update(own)
        versions = [_version(b) for b in buffers.values()]
        before = {name: copy(value) if isinstance(value, MUTABLE) else value for name, value in own.items()}
        self._copies.append((like, before, versions))
        vars(like)[TRIAL] = self._note, module
        self._note_class(module, "forward")  # a trial may call the function of the class
        return like

    def _note(self, module: nn.Module, name: str) -> None:
        self.reads_tensors |= name in module._parameters or name in module._buffers
        if (id(module), name) not in self.reads:
            value = _value_of(module, name)
            self.drew |= _draws(value)
            inside = None if name in module._modules else value
            self.reads[id(module), name] = Read(module, name, value, _contents(inside))
            self._held += [(inner, copy(inner)) for inner in _containers(inside)]
            if value is ABSENT:
                self._note_class(module, name)

    def _note_class(self, module: nn.Module, name: str) -> None:
        """Note the attribute of the class that has it."""
        owner = next((cls for cls in class_before(module).__mro__ if name in vars(cls)), nn.Module)
        if owner is not nn.Module:
            self.reads[id(owner), name] = read = _read_of_class(owner, name)
            self._held += [(inner, copy(inner)) for inner in _containers(read.value)]

    def shows_little(self) -> bool:
        """Whether the next run of the forward may do something else: this one drew a number, wrote something, or read a
        parameter or a buffer of the module's own."""
        return self.drew or self.reads_tensors or self.wrote()

    def wrote(self) -> bool:
        """Whether the forward wrote an attribute or a buffer: a forward that replaces this one would not write."""
        for like, before, versions in self._copies:
            now = {name: value for name, value in vars(like).items() if name != TRIAL}
            same = now.keys() == before.keys() and all(_is_as(value, before[name]) for name, value in now.items())
            if not same or [_version(b) for b in like._buffers.values()] != versions:
                return True
        return self._wrote_inside or changed(self.reads.values()) is not None

    def of(self, *modules: nn.Module) -> tuple[Read, ...]:
        """The attributes that were read, without the children of these modules, which the caller compares."""
        skipped = {(id(module), name) for module in modules for name in module._modules}
        return tuple(attribute for key, attribute in self.reads.items() if key not in skipped)


@contextmanager
def aside() -> Iterator[None]:
    """Inside, no mode sees an operator, and tensors are no inference tensors: a trial may begin within a pass."""
    with without_modes(), torch.inference_mode(False):
        yield


def changed(reads: Iterable[Read]) -> str | None:
    """The name of an attribute that is another one since a forward read it; None if all are as they were."""
    for owner, name, value, contents in reads:
        now = vars(owner).get(name, ABSENT)
        if now is ABSENT and isinstance(owner, nn.Module):
            now = _value_of(owner, name)
        if (now is not value and _is_another(now, value)) or (contents is not None and _contents(now) != contents):
            return name
    return None


def numbers(count: int) -> list[Tensor]:
    """Tensors of a few rows in fp32, wherever tensors are made by default. Their columns are of several sizes, and some
    are zero, as functions differ that are alike for numbers of one size, such as a ReLU and one that ends at 20."""
    drawn = torch.Generator("cpu").manual_seed(0)
    sizes = torch.tensor([4.0, 4.0, 4.0, 0.0, 1e-4, 4.0, 1e4, 4.0] * 8, device="cpu", dtype=torch.float32)
    return [torch.randn(1, 2, 64, generator=drawn, device="cpu", dtype=torch.float32).mul(sizes) for _ in range(count)]


def _random_states() -> bytes:
    """The states of the random numbers of Python and, if somebody imported it, of NumPy."""
    numpy = sys.modules.get("numpy")
    return pickle.dumps((random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)))


def _draws(value: object) -> bool:
    """Whether a value is a generator of random numbers, of Python or NumPy."""
    return issubclass(type(value), random.Random) or type(value).__module__.startswith("numpy.random")


@cache
def _noting(base: Any) -> Any:
    """A subclass that tells a trial of the attributes that are read."""

    def __getattribute__(self: Any, name: str) -> Any:
        if name not in OF_EVERY_MODULE and not name.startswith("__"):
            note, module = object.__getattribute__(self, "__dict__").get(TRIAL, (None, None))
            if note is not None:
                note(module, name)
        return base.__getattribute__(self, name)

    own = {"__getattribute__": __getattribute__, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), own)


def _value_of(module: nn.Module, name: str) -> Any:
    own = vars(module)
    if name in own:
        return own[name]
    if name in module._modules:
        return module._modules[name]
    for tensors in (module._parameters, module._buffers):
        if name in tensors:
            return tensors[name] is not None
    return ABSENT


def _is_another(now: Any, before: Any) -> bool:
    """Whether an attribute, which is not the same object, is another: numbers and text come out of a pickle as equal
    objects."""
    return type(now) is not type(before) or type(now) not in (int, float, str) or now != before


class _Itself:
    """An object that equals itself alone."""

    __slots__ = ("it",)

    def __init__(self, it: object) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.it is other.it

    __hash__ = object.__hash__


def _contents(value: Any, depth: int = DEEPEST) -> Any:
    """The items of an object, for comparing; None: it has none by which a forward would decide."""
    if not depth or _is_closed(value):
        return None
    items: Sequence[tuple[Any, Any]]
    if isinstance(value, dict):
        items = [*value.items()]
    elif isinstance(value, (list, tuple, set, deque)):
        items = [*enumerate(value)]
    elif hasattr(value, "__dict__"):
        items = [*vars(value).items()]
    else:
        return None
    plain = int, float, str, bool, type(None)
    return [(key, v if type(v) in plain else (_Itself(v), _contents(v, depth - 1))) for key, v in items]


def _is_closed(value: Any) -> bool:
    """Whether nothing inside of a value is noted."""
    return isinstance(value, Tensor | type | ModuleType) or isroutine(value)


def _containers(value: Any, depth: int = DEEPEST) -> Iterator[Any]:
    """The containers in a value, and the attributes of objects in it."""
    if not depth or _is_closed(value):
        return
    inner = value if isinstance(value, (*MUTABLE, tuple)) else getattr(value, "__dict__", ())
    if isinstance(inner, MUTABLE):
        yield inner
    for item in inner.values() if isinstance(inner, dict) else inner:
        yield from _containers(item, depth - 1)


def _is_as(now: Any, before: Any) -> bool:
    """Whether an attribute of a copy is as it was; ``before`` has copies of lists and dictionaries."""
    if now is before:
        return True
    if not isinstance(now, MUTABLE) or type(now) is not type(before) or len(now) != len(before):
        return False
    if isinstance(now, dict) and isinstance(before, dict):
        return all(key in before and value is before[key] for key, value in now.items())
    return all(map(is_, now, before))


def _whole(tensor: Any) -> Any:
    """A parameter or a buffer as a forward has it on every rank. Shards, and tensors on the meta device, are replaced
    by zeros without memory. The zeros for the meta device are on the CPU, since other code's kernel would be launched
    with no address."""
    if tensor is None or not (tensor.is_meta or hasattr(tensor, "device_mesh")):
        return tensor
    local = local_part(tensor) if hasattr(tensor, "device_mesh") else tensor
    device = torch.device("cpu") if local.is_meta else local.device
    return torch.zeros((), dtype=local.dtype, device=device).expand(tensor.shape)


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else version_of(tensor)
