"""The course of a run whose losses or gradient norms have no middle but 0."""

from __future__ import annotations

import pytest

from lpq.observe import Course


def after(losses: list[float], norms: list[float]) -> Course:
    course = Course(window=12, least=10)
    for step in zip(losses, norms, strict=True):
        assert course.off(*step) is None
    return course


def test_steps_of_zeros_alone_have_no_size_to_compare_with() -> None:
    """As before a part of the model begins to train: the first loss or norm that is not 0 is not off, a NaN is."""
    course = after([0.0] * 10, [0.0] * 10)
    assert course.why(1e-30, 1e-30) is course.why(2.0, 3.0) is None
    assert course.why(float("nan")) == "the loss is nan"
    assert course.off(2.0, 3.0) is None


@pytest.mark.parametrize("usual", [1e-12, 1.0, 1e12])
def test_where_most_steps_have_zero_the_largest_counts(usual: float) -> None:
    """As where most batches have nothing to learn."""
    course = after([0.0, 0.0, usual] * 4, [0.0, 0.0, usual] * 4)
    assert course.why(9 * usual, 4 * usual) is None
    assert str(course.why(11 * usual, usual)).startswith(f"the loss is {11 * usual:.4g}, where")
    assert str(course.why(usual, 6 * usual)).startswith(f"the gradient norm is {6 * usual:.4g}, and was")


def test_losses_around_zero_are_compared_by_their_spread() -> None:
    course = after([-1.0, 0.0, 1.0] * 4, [1.0] * 12)
    assert course.why(9.0, 1.0) is None
    assert course.why(11.0, 1.0) is not None
