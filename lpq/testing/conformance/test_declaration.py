"""The declarations of a format: options that are constants, a layout that can be read, an honest count of bits."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from types import ModuleType

import torch

import lpq
from lpq import registry
from lpq.formats import Quantizer
from lpq.registry.errors import suggestion
from lpq.testing.operands import stored_bits
from lpq.testing.options import cases, known_failures, only


def test_quantizer_is_a_constant(quantizer: Quantizer) -> None:
    """Equal to its copies, with the same hash: a constant to ``torch.compile`` and in a checkpoint."""
    for other, how in (
        (pickle.loads(pickle.dumps(quantizer)), "pickled"),
        (copy.deepcopy(quantizer), "copied"),
        (dataclasses.replace(quantizer), "made again from its options"),  # type: ignore[type-var]
    ):
        assert other == quantizer, f"{quantizer}, {how}, is not equal to itself"
        assert hash(other) == hash(quantizer), f"{quantizer}, {how}, has another hash"
    tensors = [name for name, value in vars(quantizer).items() if isinstance(value, torch.Tensor)]
    assert not tensors, f"{quantizer} holds the tensors {tensors}; what lives across steps is a StateBuffer"


def test_text_makes_the_same_quantizer(quantizer: Quantizer) -> None:
    """``lpq.quantizer(str(q)) == q``, for its sides too."""
    for one in (quantizer, quantizer.side("row"), quantizer.side("col")):
        assert lpq.quantizer(str(one)) == one, f"{str(one)!r} makes another quantizer than the one it describes"


def test_declarations_can_be_read(side: Quantizer) -> None:
    """Buffers and statistics have names of their own."""
    name, layout = side.storage.__name__, side.storage.layout_for(side)
    assert layout, f"{name}.layout is empty"
    for what, declared in ((f"{name}.layout", layout), (f"{type(side).__name__}.stats", side.stats)):
        names = [d.name for d in declared]
        assert len(set(names)) == len(names), f"{what} declares a name twice: {names}"
        for entry in declared:
            assert entry.name.isidentifier(), f"{what}: {entry.name!r} is no name for an attribute"
    for buffer in layout:
        clash = buffer.name in ("quantizer", "shape", "dtype") or hasattr(side.storage, buffer.name)
        assert not clash, f"{name}.layout: {buffer.name!r} is an attribute of every Storage; choose another name"
        step = buffer.block[1]
        assert buffer.pad == 1 or (step is not None and buffer.pad % step == 0), (
            f"{name}.layout: {buffer.name} is padded to {buffer.pad} columns, which is no multiple of {step}"
        )


@only(
    lambda quantizer: advertised(quantizer) is not None,
    "has a fixed number of bits",
)
def test_effective_bits_are_those_of_the_buffers(quantizer: Quantizer) -> None:
    """The bits an element that the spec advertises are the bytes of the layout, on a large matrix."""
    in_spec, bits = advertised(quantizer), stored_bits(quantizer.side("row"))
    assert in_spec is not None, f"{quantizer} has no effective_bits, and was chosen for them"
    assert abs(bits - in_spec) < 0.05, (
        f"the spec has effective_bits={in_spec}; the layout takes {bits:.3f} bits an element: set that in FormatSpec"
    )


def advertised(quantizer: Quantizer) -> float | None:
    """The ``effective_bits`` of the spec, which are for the default options; None for others."""
    return registry.format_of(type(quantizer)).effective_bits if "(" not in quantizer.text else None


def test_known_failures_name_tests(quantizer: Quantizer, conformance_kit: ModuleType) -> None:
    """A known failure is a test of the kit or one case of it, as ``test_name[case]``, and has a reason."""
    tests: list[str] = conformance_kit.__all__
    for name, reason in known_failures(quantizer).items():
        what = f"known_failures of {type(quantizer).__name__}: {name!r}"
        test, bracket, case = name.removesuffix("]").partition("[")
        assert test in tests, f"{what} is no test of the kit: {suggestion(test, tests)}"
        if bracket:
            names = cases(getattr(conformance_kit, test))
            assert case in names, f"{what} is no case of {test}: {suggestion(case, names)}"
        assert reason, f"{what} has no reason: say why it cannot be otherwise"
