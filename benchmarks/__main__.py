"""Measure lpq beside bf16 and beside the other libraries that are installed.

python -m benchmarks                                        casts, linear, host and stack, on one GPU
python -m benchmarks linear host --quick                    two parts, fewer rounds and shapes
torchrun --nproc-per-node 2 -m benchmarks stack             the stack of blocks under FSDP2 on two GPUs
torchrun --nproc-per-node 2 -m benchmarks parallel          two layers that GPUs share out, with their sequence
torchrun --nproc-per-node 2 -m benchmarks llama             Hugging Face's Llama under FSDP2
torchrun --nproc-per-node 8 -m benchmarks llama --model 8b --checkpointing selective    as torchtitan trains its 8B
torchrun --nproc-per-node 4 -m benchmarks layouts           a stack of blocks in every way that ranks can share it out
torchrun --nproc-per-node 4 -m benchmarks layouts --mixture mixtral    blocks with experts
torchrun --nproc-per-node 4 -m benchmarks.saving FOLDER save             what saving costs a training
python -m benchmarks grouped                                a linear layer for each expert, forward and backward
python -m benchmarks.group_choice                           from how many rows of an expert FP8 saves time
python -m benchmarks.states                                 AdamW with states in formats: time, memory
python -m benchmarks.state_losses                           their losses beside fp32 states and other libraries
python -m benchmarks.hot_channels                           losses with a few channels in bf16; needs lpq-hot-channels
python -m benchmarks.oscillation                            losses with oscillating masters set back to their codes
python -m benchmarks.after_step                             what an optimizer could save that leaves operands behind
torchrun --nproc-per-node 2 -m benchmarks.after_step        the same where FSDP2 shards the weights
python -m benchmarks.by_commit COMMIT...                    a step by each of several commits, on two GPUs
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
    recomputing,
    rows,
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
BY_ROWS = ("stack", "llama", "layouts")
"""Those that measure one row after the other, and can go on where a run was cut off."""
STORED = ("show", "page")
SIZE = (16384, 8192)
USUAL_MODEL = "1b"
COMPILED_IN_MODES = ("linear", "host", "parallel")
MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for; the exit status is 2 where nothing can be measured."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(arguments)
    if options.stored:
        return _stored(options)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if not options.tiny and (lack := environment.lacking(ranks)) is not None:
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
    record = environment.record(arguments, ranks)
    first = int(os.environ.get("RANK", "0")) == 0
    for part in options.parts:
        stem = _stem(part, ranks, options)
        whole = {}
        try:
            # Read on each rank before it meets the others, so before the first one writes.
            before = stored.earlier(options.out, stem, record) if options.resume else None
            with torch.autograd.set_multithreading_enabled(not options.one_thread):
                for result in _measure(part, options, before):  # what ends this run early leaves what was found before
                    if first:
                        whole = stored.save(options.out, stem, record, result)
        except contenders.NobodyError as error:
            print(f"benchmarks: {error}", file=sys.stderr)
            return 2
        except (stored.StoredError, rows.OtherSetting) as error:
            print(f"benchmarks: --resume of {stem}: {error}", file=sys.stderr)
            return 2
        if first:
            stored.show(whole)
            stored.plot(options.out, stem, whole)
    return 0


def _stem(part: str, ranks: int, options: argparse.Namespace) -> str:
    """The name of its files: results of several GPUs, of another size or mode and of one thread stand beside others."""
    if part == "casts":
        return part if options.size == SIZE else f"{part}-{options.size[0]}x{options.size[1]}"
    ways = [str(ranks)] if ranks > 1 or (part == "llama" and environment.by_torchrun()) else []
    if part == "llama":
        ways += _of_decoder(options)
        ways += [options.checkpointing] if options.checkpointing != recomputing.NONE else []
    if part == "layouts":
        model = _shared(options)
        ways += [options.mixture] if options.mixture else []
        ways += [f"{options.experts}-experts"] if options.mixture and options.experts else []
        ways.append(f"{model.batch}x{model.sequence}")
    if options.mode is not None and part in COMPILED_IN_MODES:
        ways.append(options.mode)
    told = (
        ("liger", options.liger == huggingface.BOTH), ("liger-positions", options.liger == huggingface.POSITIONS),
        ("recorded", options.recorded), ("one-thread", options.one_thread), ("tiny", options.tiny),
    )  # fmt: skip
    ways += [way for way, on in told if on]
    return "-".join([part, *ways])


def _of_decoder(options: argparse.Namespace) -> list[str]:
    """Words for the model that is asked for, as far as it is not the usual one."""
    decoder = _decoder(options)
    if options.model != USUAL_MODEL:
        return [options.model, *(f"{name}-{value}" for name, value in _sizes(options).items())]
    if decoder in (shapes.MODELS[USUAL_MODEL], shapes.tiny(shapes.MODELS[USUAL_MODEL])):
        return []
    inside = [f"{decoder.experts}x{decoder.ffn}"] if decoder.experts else [str(decoder.width)] * (decoder.width > 0)
    return [f"{decoder.layers}x{decoder.hidden}", *inside, f"{decoder.batch}x{decoder.sequence}"]


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
    parser.add_argument(
        "--recorded", action="store_true", help="with llama: each also with its whole step recorded in a CUDA graph"
    )
    parser.add_argument(
        "--liger", nargs="?", choices=(huggingface.POSITIONS, huggingface.BOTH), const=huggingface.BOTH,
        help="with llama: all have Liger's rotary positions, and its loss but for --liger positions",
    )  # fmt: skip
    parser.add_argument("--layout", action="append", help="with layouts: one whose name begins so; may be repeated")
    parser.add_argument("--mixture", choices=sorted(filter(None, shapes.SHARED)), help="with layouts: has experts")
    parser.add_argument("--size", type=_size, default=SIZE, help="with casts: ROWSxCOLUMNS of the matrix")
    parser.add_argument("--leave-out", action="append", default=[], help="whose name has this in it; may be repeated")
    parser.add_argument("--model", choices=list(shapes.MODELS), default=USUAL_MODEL, help="with llama: weights, about")
    parser.add_argument(
        "--checkpointing", choices=recomputing.WAYS, default=recomputing.NONE, help="with llama: of activations"
    )
    for field in fields(shapes.Decoder):
        parser.add_argument(f"--{field.name}", type=int, help="with llama: of the model, or a step; see layouts")
    parser.add_argument(
        "--resume", action="store_true", help=f"with {', '.join(BY_ROWS)}: keep stored rows, and measure the others"
    )
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # to try the benchmark itself, anywhere
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
    if options.resume and {*options.parts} - {*BY_ROWS}:
        parser.error(f"--resume is for {', '.join(BY_ROWS)}, which measure one row after the other")
    for text in options.recipe or ():
        try:
            lpq.policy(text)
        except LpqError as error:
            parser.error(f"--recipe {text}: {error}")
    return options


def _sizes(options: argparse.Namespace) -> dict[str, int]:
    """The options by which a run differs from the model's own."""
    given = {field.name: getattr(options, field.name) for field in fields(shapes.Decoder)}
    usual = shapes.MODELS[options.model]
    return {name: value for name, value in given.items() if value is not None and value != getattr(usual, name)}


def _decoder(options: argparse.Namespace) -> shapes.Decoder:
    """The model that is asked for."""
    asked = replace(shapes.MODELS[options.model], **_sizes(options))
    return shapes.tiny(asked) if options.tiny else asked


def _shared(options: argparse.Namespace) -> shapes.Stack:
    """The model that is asked for, and that ranks share out in many ways."""
    usual = shapes.MODELS[USUAL_MODEL]
    model = replace(
        shapes.SHARED[options.mixture or ""],
        batch=options.batch or usual.batch, sequence=options.sequence or usual.sequence,
        **({"experts": options.experts} if options.mixture and options.experts else {}),
    )  # fmt: skip
    return shapes.tiny(model) if options.tiny else model


def _size(text: str) -> tuple[int, int]:
    rows, _, cols = text.partition("x")
    if not (rows.isdecimal() and cols.isdecimal() and int(rows) and int(cols)):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxCOLUMNS, such as 32768x16384")
    return int(rows), int(cols)


def _measure(part: str, options: argparse.Namespace, before: rows.Row | None = None) -> Iterator[dict[str, Any]]:
    """The result of a part: as far as it is known again and again, and in the end the whole."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    effort = QUICK if options.quick else Effort()
    steps = 6 if options.quick else layouts.STEPS if part == "layouts" else stack.STEPS
    if options.tiny:
        steps = 2
    if part == "casts":
        yield casts.measure_all(device, options.only, *options.size)
        return
    recipes = tuple(options.recipe or contenders.RECIPES)
    if part == "stack":
        everyone = contenders.of_stacks(recipes, not options.no_compile)
        everyone = contenders.chosen(everyone, options.only, options.leave_out)
        blocks = shapes.tiny(shapes.Stack()) if options.tiny else shapes.Stack()
        with stack.group():
            yield from stack.measure(everyone, blocks, steps, device, before)
        return
    if part == "grouped":
        experts = shapes.GROUPED[:1] if options.quick else shapes.GROUPED
        yield from grouped.measure(tuple(options.recipe or grouped.RECIPES), experts, effort, device)
        return
    if part == "parallel":
        everyone = parallel.contenders(tuple(options.recipe or parallel.RECIPES))
        everyone = contenders.chosen(everyone, options.only, options.leave_out)
        everyone = contenders.in_mode(everyone, options.mode)
        with stack.group():
            yield from parallel.measure(everyone, shapes.Pair(), effort, device)
        return
    if part == "layouts":
        model = _shared(options)
        everyone = layouts.contenders(tuple(options.recipe or layouts.RECIPES), not options.no_compile, model)
        everyone = contenders.chosen(everyone, options.only, options.leave_out)
        with stack.group() as ranks:
            ways = layouts.of_experts(ranks) if options.mixture else layouts.of_blocks(ranks)
            wanted = [way for way in ways if way.name.startswith(tuple(options.layout or [""]))]
            yield from layouts.measure(wanted, everyone, model, steps, device, before)
        return
    if part == "llama":
        sharded = environment.by_torchrun()
        recipes = tuple(options.recipe or contenders.MODELS)
        everyone = contenders.of_models(recipes, not options.no_compile, sharded, options.fused, options.recorded)
        everyone = contenders.chosen(everyone, options.only, options.leave_out)
        with stack.group() if sharded else nullcontext():
            yield from huggingface.measure(
                everyone, _decoder(options), steps, device, checkpointing=options.checkpointing,
                profile=options.profile, liger=options.liger, before=before,
            )  # fmt: skip
        return
    everyone = contenders.of_layers(recipes, not options.no_compile)
    everyone = contenders.chosen(everyone, options.only, options.leave_out)
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


if __name__ == "__main__":
    sys.exit(main())
