"""``lpq export``: write a checkpoint of lpq in a layout that inference engines read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lpq.cli.runs import checkpoint_in
from lpq.registry.errors import OptionError, suggestion

DTYPES = ("bfloat16", "float16", "float32")
SIBLINGS = ("alike", "any")

Source = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint of lpq, or the directory of a run.")]
Target = Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where to write: a new directory, or an empty one.")]
Layout = Annotated[
    str,
    typer.Option("--layout", help="The layout: compressed-tensors, modelopt, fp8-block, or one that a plugin brings."),
]
Base = Annotated[
    Path | None,
    typer.Option("--base", help="The directory of the model that was trained, for its configuration and tokenizer."),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help=f"The dtype to which training casts weights: {', '.join(DTYPES)}. Empty: none."),
]
Leave = Annotated[
    list[str] | None, typer.Option("--leave", metavar="PATTERN", help="Layers that stay in high precision; repeatable.")
]
Siblings = Annotated[
    str,
    typer.Option("--siblings", help="How layers that engines fuse, as q_proj, k_proj and v_proj, may lie: alike, any."),
]
Full = Annotated[bool, typer.Option("--full", help="Name every layer, and how the files hold it.")]


def export(
    checkpoint: Source,
    directory: Target,
    layout: Layout = "compressed-tensors",
    base: Base = None,
    dtype: Dtype = "",
    leave: Leave = None,
    siblings: Siblings = "alike",
    full: Full = False,
) -> None:
    """Write a checkpoint of lpq for inference engines, with the codes of training, and show what was written."""
    if dtype and dtype not in DTYPES:
        raise OptionError(f"there is no dtype {dtype!r} here: {suggestion(dtype, DTYPES)}")
    if siblings not in SIBLINGS:
        raise OptionError(f"there is no siblings={siblings!r}: {suggestion(siblings, SIBLINGS)}")
    import torch  # `lpq export --help` can do without

    import lpq
    from lpq.registry.tables import table

    torch_dtype = getattr(torch, dtype) if dtype else None
    record = lpq.export(
        checkpoint_in(checkpoint), directory, layout=layout, base=base, dtype=torch_dtype, leave=leave or (),
        siblings=siblings,  # type: ignore[arg-type]  # which is one of these
    )  # fmt: skip
    typer.echo(record)
    if full:
        layers = {name: title for title, names in record.layers.items() for name in names}
        rows = [*layers.items(), *((name, "high precision") for name in record.left)]
        table("Layers", ("layer", "in the files"), rows)
