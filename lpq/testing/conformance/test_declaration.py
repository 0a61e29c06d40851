"""What a format declares: options that are constants, a layout and statistics that can be read, honest bits."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

import lpq
from lpq import registry
from lpq.core import Quantizer
from lpq.registry.errors import suggestion
from lpq.testing.operands import sides
from lpq.testing.options import known_failures, only

LARGE = (4096, 4096)


def test_quantizer_is_a_constant(quantizer: Quantizer) -> None:
    """Frozen, hashable, equal to its copies: a constant to ``torch.compile`` and in a checkpoint."""
    assert dataclasses.is_dataclass(quantizer), f"{type(quantizer).__name__} must be a dataclass"
    hash(quantizer)
    for made, how in (
        (pickle.loads(pickle.dumps(quantizer)), "pickled"),
        (copy.deepcopy(quantizer), "copied"),
        (dataclasses.replace(quantizer), "made again from its options"),  # type: ignore[type-var]
    ):
        assert made == quantizer, f"{quantizer}, {how}, is not equal to itself"
        assert hash(made) == hash(quantizer), f"{quantizer}, {how}, has another hash"
    for field in dataclasses.fields(quantizer):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(quantizer, field.name, getattr(quantizer, field.name))
    tensors = [name for name, value in vars(quantizer).items() if isinstance(value, torch.Tensor)]
    assert not tensors, f"{quantizer} holds the tensors {tensors}; what lives across steps is a StateBuffer"


def test_text_makes_the_same_quantizer(quantizer: Quantizer) -> None:
    """``lpq.quantizer(str(q)) == q``."""
    assert lpq.quantizer(str(quantizer)) == quantizer
    for side in sides(quantizer):
        assert lpq.quantizer(side.text) == side, f"{side.text!r}, a side of {quantizer}, makes another quantizer"


def test_declarations_can_be_read(quantizer: Quantizer) -> None:
    """Buffers and statistics have names of their own; nothing that the core needs is missing."""
    for side in sides(quantizer):
        buffers = side.storage.layout_for(side)
        assert buffers, f"{side.storage.__name__}.layout is empty"
        for what, declared in (("layout", buffers), ("stats", side.stats)):
            names = [d.name for d in declared]
            assert len(set(names)) == len(names), f"the {what} of {side} declares a name twice: {names}"
            assert all(n.isidentifier() for n in names), f"the {what} of {side} has a name that no attribute can have"
        taken = [b.name for b in buffers if b.name in ("quantizer", "shape", "dtype") or hasattr(side.storage, b.name)]
        assert not taken, f"{side.storage.__name__}.layout uses {taken}, which are attributes of every Storage"
        for buffer in buffers:
            step = buffer.block[1]
            assert step is None or buffer.pad % step == 0 or buffer.pad == 1, (
                f"{side.storage.__name__}.{buffer.name} is padded to {buffer.pad} columns, no multiple of its block"
            )


@only(lambda quantizer: advertised(quantizer) is not None, "has effective_bits in its spec and default options")
def test_effective_bits_are_those_of_the_buffers(quantizer: Quantizer) -> None:
    """The bits an element that the spec advertises are the bytes of the layout, on a large matrix."""
    side = quantizer.side("row")
    bits = stored_bits(side)
    said = advertised(quantizer)
    assert said is not None
    assert abs(bits - said) < 0.05, f"the spec says effective_bits={said}; the layout takes {bits:.3f} bits an element"


def advertised(quantizer: Quantizer) -> float | None:
    """What the spec says of the default options; None for others."""
    return registry.format_of(type(quantizer)).effective_bits if "(" not in quantizer.text else None


def test_known_failures_name_tests(quantizer: Quantizer) -> None:
    """A known failure is a test of the kit, and has a reason."""
    from lpq.testing.conformance import __all__ as tests

    for name, reason in known_failures(quantizer).items():
        assert name in tests, f"known_failures of {type(quantizer).__name__}: {name!r}: {suggestion(name, tests)}"
        assert reason, f"known_failures of {type(quantizer).__name__}: {name!r} needs a reason"


def stored_bits(side: Quantizer) -> float:
    """Bits that one element of a large fp32 matrix takes in the buffers."""
    operand = side.storage.empty(side, LARGE, torch.float32, torch.device("meta"))
    return 8 * operand.nbytes / (LARGE[0] * LARGE[1])
