"""The lines of lpq by subject: ``python tests/lines.py``.

A subject that came to the library after its core has files of its own, which are listed here. All other files are the
core: what it takes to convert, train, shard and save a model by any format.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

LPQ = Path(__file__).parents[1] / "lpq"
SUBJECTS = {
    "fused blocks, norms and activations": (
        "kernels/triton/norms.py kernels/triton/produce.py kernels/triton/sources.py nn/adopted_norms.py "
        "nn/followed_norms.py nn/fused_blocks.py nn/fused_mlp.py nn/halves.py nn/norm_functions.py nn/norm_groups.py "
        "nn/norms.py nn/parallel_mlp.py nn/parallel_norms.py nn/recomputed_norms.py nn/residual_layers.py "
        "nn/shared_states.py nn/stand_ins.py nn/unwrapping.py operations/line_amaxes.py operations/norm_choice.py "
        "operations/norm_kernels.py operations/norm_programs.py operations/norms.py operations/produced_programs.py "
        "operations/produced_tiles.py operations/producer.py operations/source.py operations/tile_program.py "
        "tensor/with_value.py"
    ),
    "rotations, one copy, first steps of states, presets by block": (
        "formats/rotation.py formats/state_order.py kernels/triton/rotation.py kernels/triton/random_bits.py "
        "nn/fresh_states.py operations/recoding.py operations/rotated_decoding.py recipes/blocks.py "
        "testing/conformance/test_alike.py testing/conformance/test_rounding.py"
    ),
    "statistics, replays and culprits of a run": (
        "integrations/transformers_culprits.py nn/eagerly.py nn/observing.py observe/course.py observe/culprits.py "
        "observe/gradient_error.py observe/gradients.py observe/numerics.py observe/operands.py observe/page.py "
        "observe/readings.py observe/replay.py observe/replays.py observe/shards.py observe/sharing.py "
        "observe/statistics.py observe/sums.py observe/table.py observe/trigger.py tensor/observed.py files/typed.py"
    ),
    "comparing, advising, timing and searching": (
        "bench/*.py cli/advise.py cli/bench.py cli/first_advice.py cli/models.py files/outputs.py train/beside.py "
        "train/commands/compare.py train/commands/options.py train/commands/report.py train/commands/search.py "
        "train/commands/trained.py train/compare.py train/compare_config.py train/conclusion.py train/gaps.py "
        "train/taking_turns.py train/trainings.py"
    ),
    "states of optimizers in a format": (
        "operations/stored_tile.py optim/adamw.py optim/adamw_triton.py optim/rounding.py optim/state_names.py "
        "optim/states.py optim/stored_size.py"
    ),
    "ranks that differ at their first gather or step": (
        "distributed/gather_check.py distributed/step_check.py optim/wrapper.py"
    ),
    "the faults of plugins' specs, in words": "registry/plugin_faults.py",
    "other frameworks, undoing a conversion, names of earlier versions": (
        "checkpoint/argument_order.py checkpoint/former_names.py importing.py integrations/*.py moved.py "
        "nn/first_argument.py nn/restoring.py nn/undoing.py "
        "registry/field_docs.py registry/former_names.py registry/shipped.py"
    ),
}
"""The files of each subject, by patterns below ``lpq``. A file that two name is the first one's."""


def length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def by_subject() -> dict[str, list[Path]]:
    """Return the files of each subject; the core's come first, under ``core: PACKAGE``."""
    found: dict[str, list[Path]] = {}
    left = {path for path in LPQ.rglob("*.py") if "__pycache__" not in path.parts}
    for subject, patterns in SUBJECTS.items():
        own = {path for pattern in patterns.split() for path in _named(pattern)} & left
        found[subject], left = sorted(own), left - own
    core: dict[str, list[Path]] = {}
    for path in sorted(left):
        parts = path.relative_to(LPQ).parts
        core.setdefault(f"core: {parts[0] if len(parts) > 1 else 'lpq itself'}", []).append(path)
    return core | found


def _named(pattern: str) -> Iterator[Path]:
    paths = [*LPQ.glob(pattern)]
    if not paths:
        raise FileNotFoundError(f"no file of lpq is {pattern}: take it out of SUBJECTS, or give its new name")
    yield from paths


def lines() -> dict[str, int]:
    return {subject: sum(map(length, paths)) for subject, paths in by_subject().items()}


def of_the_core() -> int:
    return sum(count for subject, count in lines().items() if subject.startswith("core: "))


if __name__ == "__main__":
    for subject, count in lines().items():
        print(f"{count:7,}  {subject}")
    print(f"{of_the_core():7,}  the core\n{sum(lines().values()):7,}  all of lpq")
