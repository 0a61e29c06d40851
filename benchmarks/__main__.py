"""Measure lpq beside bf16 and beside the other libraries that are installed.

python -m benchmarks                                        casts, linear, host and stack, on one GPU
python -m benchmarks linear host --quick                    two parts, fewer rounds and shapes
torchrun --nproc-per-node 2 -m benchmarks stack             the stack of blocks under FSDP2 on two GPUs
torchrun --nproc-per-node 2 -m benchmarks parallel          two layers that GPUs share out, with their sequence
torchrun --nproc-per-node 2 -m benchmarks llama             Hugging Face's Llama under FSDP2
torchrun --nproc-per-node 4 -m benchmarks layouts           a stack of blocks in every way that ranks can share it out
torchrun --nproc-per-node 4 -m benchmarks layouts --mixture mixtral    blocks with experts
python -m benchmarks grouped                                a linear layer for each expert, forward and backward
python -m benchmarks.group_choice                           from how many rows of an expert FP8 saves time
python -m benchmarks.states                                 AdamW with states in formats: time, memory
python -m benchmarks.state_losses                           their losses beside fp32 states and other libraries
python -m benchmarks.after_step                             what an optimizer could save that leaves operands behind
python -m benchmarks llama --recipe fp8-current             Hugging Face's Llama of 1B weights; needs transformers
python -m benchmarks llama --fused --layers 6 --hidden 4096 --width 14336 --batch 2 --sequence 4096  as wide as an 8B
python -m benchmarks llama --fused --layers 2 --hidden 4096 --width 14336 --experts 8       Mixtral, so wide
python -m benchmarks host --profile --recipe fp8-current    where the host's time goes
python -m benchmarks show [PART ...]                        print stored results; needs no GPU
python -m benchmarks page                                   put stored results into docs and benchmarks/NOTES.md
python -m benchmarks.searched                               search the policy of docs/search.md
python -m benchmarks.evidence                               put stored curves of lpq compare into pages
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

import lpq
from benchmarks import (
    casts,
    contenders,
    environment,
    grouped,
    host,
    huggingface,
    layouts,
    linear,
    parallel,
    profiles,
    shapes,
    stack,
    stored,
)
from lpq.bench.timing import QUICK, Effort
from lpq.registry.errors import LpqError

USUAL = ("casts", "linear", "host", "stack")
PARTS = (*USUAL, "grouped", "llama", "parallel", "layouts")
SHARED_OUT = ("stack", "llama", "parallel", "layouts")
OF_SEVERAL = ("parallel", "layouts")
STORED = ("show", "page")
SIZE = (16384, 8192)
COMPILED_IN_MODES = ("linear", "host", "parallel")
MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for; the exit status is 2 where nothing can be measured."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(arguments)
    if options.stored:
        return _stored(options)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if (lack := environment.lacking(ranks)) is not None:
        print(f"benchmarks: {lack}", file=sys.stderr)
        return 2
    if "llama" in options.parts and (lack := huggingface.lacking(options.liger)) is not None:
        print(f"benchmarks: {lack}", file=sys.stderr)
        return 2
    if ranks > 1 and (len(options.parts) > 1 or options.parts[0] not in SHARED_OUT):
        print(f"benchmarks: under torchrun there is one part at a time: {', '.join(SHARED_OUT)}", file=sys.stderr)
        return 2
    for part in set(OF_SEVERAL) & set(options.parts) if ranks == 1 else ():
        print(f"benchmarks: {part} is for several GPUs: start it by torchrun --nproc-per-node 2", file=sys.stderr)
        return 2
    record = environment.record(_without_out(arguments), ranks)
    first = int(os.environ.get("RANK", "0")) == 0
    for part in options.parts:
        stem = _stem(part, ranks, options)
        whole = {}
        with torch.autograd.set_multithreading_enabled(not options.one_thread):
            for result in _measure(part, options):  # what ends this run early leaves what was found before
                if first:
                    whole = stored.save(options.out, stem, record, result)
        if first:
            stored.show(whole)
            stored.plot(options.out, stem, whole)
    return 0


def _stem(part: str, ranks: int, options: argparse.Namespace) -> str:
    """The name of its files: results of several GPUs, of another size or mode and of one thread stand beside others."""
    if part == "casts":
        return part if options.size == SIZE else f"{part}-{options.size[0]}x{options.size[1]}"
    ways = [str(ranks)] if ranks > 1 else []
    if part == "llama" and (decoder := _decoder(options)) != shapes.Decoder():
        inside = [f"{decoder.experts}x{decoder.ffn}"] if decoder.experts else [str(decoder.width)] * (decoder.width > 0)
        ways += [f"{decoder.layers}x{decoder.hidden}", *inside, f"{decoder.batch}x{decoder.sequence}"]
    if part == "layouts":
        ways += [*([options.mixture] if options.mixture else []), f"{options.batch}x{options.sequence}"]
    if options.mode is not None and part in COMPILED_IN_MODES:
        ways.append(options.mode)
    ways += [way for way, on in (("liger", options.liger), ("one-thread", options.one_thread)) if on]
    return "-".join([part, *ways])


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; or one of {', '.join(STORED)}"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, shapes and steps")
    parser.add_argument("--recipe", action="append", help="a recipe of lpq in place of the usual ones; may be repeated")
    parser.add_argument("--no-compile", action="store_true", help="lpq and bf16 without torch.compile only")
    parser.add_argument("--mode", choices=MODES, help="with linear, host and parallel: how layers are compiled")
    parser.add_argument(
        "--profile", action="store_true", help="with host, linear or llama: where the time of a step goes"
    )
    parser.add_argument("--only", action="append", help="whose name begins so, and bf16; may be repeated")
    parser.add_argument("--one-thread", action="store_true", help="all but casts: backward in the thread that calls it")
    parser.add_argument("--fused", action="store_true", help="with llama: lpq also with fused blocks, not compiled")
    parser.add_argument("--liger", action="store_true", help="with llama: all have Liger's rotary positions and loss")
    parser.add_argument("--layout", action="append", help="with layouts: one whose name begins so; may be repeated")
    parser.add_argument("--mixture", choices=sorted(filter(None, shapes.SHARED)), help="with layouts: has experts")
    parser.add_argument("--size", type=_size, default=SIZE, help="with casts: ROWSxCOLUMNS of the matrix")
    for field in fields(shapes.Decoder):
        parser.add_argument(
            f"--{field.name}", type=int, default=field.default, help="with llama: of the model, or a step"
        )
    parser.add_argument("--out", type=Path, default=stored.FOLDER, help="where the results go; default: %(default)s")
    options = parser.parse_args(arguments)
    options.parts = options.parts or list(USUAL)
    if set(options.parts[1:]) & set(STORED):
        parser.error(f"{' and '.join(STORED)} stand first, and alone or before parts: show [PART ...], or page")
    options.stored = options.parts.pop(0) if options.parts[0] in STORED else None
    wrong = [part for part in options.parts if part not in PARTS]
    if options.stored == "page" and options.parts:
        parser.error(f"page takes no parts, and was given {', '.join(options.parts)}")
    if wrong:
        parser.error(f"no such part: {', '.join(wrong)}; choose from {', '.join(PARTS)}, or one of {', '.join(STORED)}")
    if options.mode and (options.no_compile or not {*COMPILED_IN_MODES} & set(options.parts)):
        parser.error("--mode is for what linear, host and parallel compile, not for other parts or with --no-compile")
    for text in options.recipe or ():
        try:
            lpq.policy(text)
        except LpqError as error:
            parser.error(f"--recipe {text}: {error}")
    return options


def _decoder(options: argparse.Namespace) -> shapes.Decoder:
    """The model that is asked for."""
    return shapes.Decoder(**{field.name: getattr(options, field.name) for field in fields(shapes.Decoder)})


def _size(text: str) -> tuple[int, int]:
    rows, _, cols = text.partition("x")
    if not (rows.isdecimal() and cols.isdecimal() and int(rows) and int(cols)):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxCOLUMNS, such as 32768x16384")
    return int(rows), int(cols)


def _measure(part: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The result of a part: as far as it is known again and again, and in the end the whole."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    effort = QUICK if options.quick else Effort()
    if part == "casts":
        yield casts.measure_all(device, options.only, *options.size)
        return
    recipes = tuple(options.recipe or contenders.RECIPES)
    if part == "stack":
        everyone = contenders.of_stacks(recipes, not options.no_compile)
        everyone = contenders.chosen(everyone, options.only)
        with stack.group():
            yield from stack.measure(everyone, shapes.Stack(), 6 if options.quick else stack.STEPS, device)
        return
    if part == "grouped":
        experts = shapes.GROUPED[:1] if options.quick else shapes.GROUPED
        yield from grouped.measure(tuple(options.recipe or grouped.RECIPES), experts, effort, device)
        return
    if part == "parallel":
        everyone = contenders.chosen(parallel.contenders(tuple(options.recipe or parallel.RECIPES)), options.only)
        everyone = contenders.in_mode(everyone, options.mode)
        with stack.group():
            yield from parallel.measure(everyone, shapes.Pair(), effort, device)
        return
    if part == "layouts":
        model = replace(shapes.SHARED[options.mixture or ""], batch=options.batch, sequence=options.sequence)
        everyone = layouts.contenders(tuple(options.recipe or layouts.RECIPES), not options.no_compile, model)
        everyone = contenders.chosen(everyone, options.only)
        with stack.group() as ranks:
            ways = layouts.of_experts(ranks) if options.mixture else layouts.of_blocks(ranks)
            wanted = [way for way in ways if way.name.startswith(tuple(options.layout or [""]))]
            yield from layouts.measure(wanted, everyone, model, 6 if options.quick else layouts.STEPS, device)
        return
    if part == "llama":
        sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1
        recipes = tuple(options.recipe or contenders.MODELS)
        everyone = contenders.of_models(recipes, not options.no_compile, sharded, options.fused)
        everyone = contenders.chosen(everyone, options.only)
        with stack.group() if sharded else nullcontext():
            steps = 6 if options.quick else stack.STEPS
            yield from huggingface.measure(
                everyone, _decoder(options), steps, device, profile=options.profile, liger=options.liger
            )
        return
    everyone = contenders.of_layers(recipes, not options.no_compile)
    everyone = contenders.chosen(everyone, options.only)
    everyone = contenders.in_mode(everyone, options.mode)
    sizes = shapes.QUICK if options.quick else shapes.LINEAR
    if options.profile:
        for shape in sizes if part == "linear" else (shapes.HOST,):
            profiles.show(everyone, shape, device, on_host=part == "host")
    if part == "linear":
        yield linear.measure(everyone, sizes, effort, device)
    else:
        yield host.measure(everyone, effort, device)


def _stored(options: argparse.Namespace) -> int:
    """Print stored results, or put them into the page."""
    try:
        found = stored.load(options.out)
    except stored.StoredError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    if options.stored == "page":
        return _page(found)
    wanted = {stem: result for stem, result in found.items() if not options.parts or result["part"] in options.parts}
    if not wanted:
        print(f"benchmarks: {options.out} has no results of {', '.join(options.parts)}", file=sys.stderr)
        return 2
    for result in wanted.values():
        stored.show(result)
    return 0


def _page(found: dict[str, dict[str, Any]]) -> int:
    for page in stored.PAGES:
        page.write_text(stored.filled(page.read_text(), found))
        for stem in found.keys() & stored.charted(page.read_text()):
            stored.plot(stored.CHARTS, stem, found[stem], prefix="performance-")
    return 0


def _without_out(arguments: Sequence[str]) -> list[str]:
    """The arguments without the folder, which has no effect on what was measured."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith("--out"):
            kept.append(argument)
        skip = argument == "--out"
    return kept


if __name__ == "__main__":
    sys.exit(main())
