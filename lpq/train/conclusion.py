"""The end of a run in words: how far the recipe is from the baseline, and what the times mean."""

from __future__ import annotations

from collections.abc import Sequence

from lpq.bench.measured import gain
from lpq.train.gpu_size import FP8_RECIPE


def conclusion(titles: Sequence[str], gap: float | None, distance: float | None, *, on_cpu: bool) -> list[str]:
    """The paragraphs about trainings of these titles, the recipe's first and then the baseline's.

    ``gap`` is how much more loss the recipe has than the baseline, ``distance`` how much more another seed of it has.
    """
    paragraphs = [] if gap is None else [beside_seeds(titles[0], titles[1], gap, distance)]
    return [*paragraphs, *([times()] if on_cpu else [])]


def beside_seeds(recipe: str, baseline: str, gap: float, distance: float | None) -> str:
    """The gap of the recipe beside the distance of two seeds of the baseline."""
    ends = f"{recipe} ends {_apart(gap)} {baseline} in loss on text that was held out."
    if distance is None:
        return ends
    if abs(gap) <= abs(distance):
        verdict = "a seed alone changes the loss by at least as much, so this run shows no effect of the recipe"
    elif distance:
        verdict = f"the gap is {abs(gap / distance):.1f} times what the seed changes"
    else:
        verdict = "the seed changes nothing, and the recipe does"
    return (
        f"{ends} {baseline} with another seed ends {_apart(distance)} it: {verdict}. "
        "One pair of seeds is a hint; python -m lpq compare RECIPE --seeds 3 measures it."
    )


def times() -> str:
    """The meaning of times on a CPU, and a gain that was measured on a GPU."""
    remark = "On a CPU low precision is emulated: the losses are those that the formats give, the times mean nothing."
    measured = gain(FP8_RECIPE)
    if measured is None:
        return remark
    return (
        f"{remark} On an {measured.device} {measured.recipe} trained a Llama of {measured.layers} layers of hidden "
        f"{measured.hidden} {measured.times_as_fast:.2f} times as fast as bf16, in {measured.memory:.2f} of its memory "
        f"(both compiled, {measured.date})."
    )


def _apart(part: float) -> str:
    """A signed part of a loss in words, before what it is compared with."""
    return f"{abs(part):.2%} {'above' if part >= 0 else 'below'}"
