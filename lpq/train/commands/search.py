"""``lpq search``: which product of which layer gets which recipe, for the model of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lpq.cli.output import Json, as_json, print_text
from lpq.cli.runs import checkpoint_in
from lpq.files.outputs import check_writable
from lpq.registry.errors import LpqError, OptionError

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run of `lpq train`, or a checkpoint.")]
BUDGET = "a number, or a recipe, for as much as by it"
Time = Annotated[
    str,
    typer.Option("--time", help=f"The most time of all layers, in times of bf16's: {BUDGET}."),
]
Error = Annotated[
    str,
    typer.Option("--error", help=f"In place of --time, the most error of the gradients: {BUDGET}."),
]
Recipes = Annotated[
    list[str] | None,
    typer.Option("--recipe", help="A recipe to take products from, beside bf16; repeatable. Default: mxfp8, nvfp4."),
]
Card = Annotated[
    str,
    typer.Option("--gpu", help="The GPU whose times are predicted, as in `lpq advise`. Default: this machine's."),
]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="The tokens of a step on each GPU.")]
Batches = Annotated[int, typer.Option("--batches", min=1, help="The batches whose mean gradients are compared.")]
Out = Annotated[Path, typer.Option("--out", help="The file for the policy; one that is there is refused.")]


def search(
    run: Run,
    time: Time = "",
    error: Error = "",
    recipe: Recipes = None,
    gpu: Card = "",
    tokens: Tokens = 8192,
    batches: Batches = 4,
    out: Out = Path("policy.toml"),
    json: Json = False,
) -> None:
    """Choose the recipe of each product of each layer under a budget, and write a policy.

    Each product of each layer is run by each recipe, all else in bf16, on batches of the run's own text; what counts is
    how far the gradients move away from bf16's. Times are predicted, as by `lpq advise`. The policy is for `lpq train
    --policy`, and for `lpq.convert` of a model with the same names. For other models there is `lpq.search` in Python.
    """
    from rich.console import Console
    from rich.progress import Progress

    import lpq
    from lpq.bench.search import BF16, COLUMNS, USUAL, budget_of, recipes_by_name
    from lpq.cli.advise import gpu_named, not_compared, provenance
    from lpq.registry.tables import table

    if bool(time) == bool(error):
        raise OptionError("search needs one budget: --time 0.6 or --time nvfp4, or else --error 0.1 or --error nvfp4")
    budget_of(_budget(time), _budget(error), [BF16, *(recipe or USUAL)], "--{} {}")
    chosen = {text: [each] for text, each in recipes_by_name(recipe or USUAL).items() if text != BF16}
    card, _ = gpu_named(gpu, "--gpu")
    check_writable(out, "choose another --out")
    model, closures = _prepared(checkpoint_in(run), batches)
    if out.exists():  # last, as it is there whenever the command is given again
        raise OptionError(f"--out {out} is there already: give another name, or remove it")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("Replaying")
        result = lpq.search(
            model,
            closures,
            time=_budget(time),
            error=_budget(error),
            recipes=recipe or USUAL,
            gpu=gpu.lower() or None,
            tokens=tokens,
            tell=lambda done, whole: progress.update(bar, completed=done, total=whole),
        )
    try:
        result.write(out)
    except LpqError:
        print_text(result.policy.to_toml())  # the measurements are not lost
        raise
    remarks = [provenance(card), *not_compared(chosen, card)]
    if gains_nothing := all({*one.products} == {BF16} for one in result.choices.values()):
        remarks.append(
            "The policy leaves every layer in bf16: by these recipes none saves time within the budget. Narrow layers "
            "save none at all; in Python, lpq.search takes the times of wider ones by seconds=."
        )
    if json:
        as_json({"policy": str(out), **result.as_dict(), "remarks": remarks})
        return
    table("Products by layer", COLUMNS, result.rows())
    print_text(result.summary())
    print_text(" ".join(remarks))
    print_text(f"written to {out}{'' if gains_nothing else f', for lpq train --policy {out}'}")


def _budget(text: str) -> float | str | None:
    try:
        return float(text)
    except ValueError:
        return text or None


def _prepared(path: Path, batches: int) -> tuple[Any, list[Callable[[], Any]]]:
    """The model of a checkpoint, as it is without lpq, and the steps of some batches."""
    import lpq
    from lpq.train.commands.trained import loaded, trained
    from lpq.train.data import load
    from lpq.train.machine import pick_device
    from lpq.train.trainer import loss_of

    info = lpq.checkpoint.info(path)
    config, model = trained(path, info, "search in Python, lpq.search")
    if info.description.quantized:
        raise OptionError(f"{path} has weights that are stored quantized: search in a run without --weights quantized")
    model = lpq.restore(loaded(model, path, info)).to(device := pick_device("auto"))
    text = load(config.data, config.seq, config.text)

    def closure(number: int) -> Any:
        batch = text.batch(config.seed, (info.step or 0) + number, config.batch, config.seq)
        loss = loss_of(model, *(t.to(device) for t in batch))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return model, [partial(closure, number) for number in range(batches)]
