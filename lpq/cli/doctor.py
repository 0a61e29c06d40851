"""``lpq doctor``: what this machine can run, and what is in the way of more."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Annotated, Any

import torch
import typer

import lpq
from lpq import registry
from lpq.cli.first_advice import advice, refused
from lpq.cli.kernels import (
    Served,
    pick_device,
    served_by_format,
    served_by_pair,
    served_by_quantizer,
    show,
)
from lpq.cli.listing import broken_recipes, described, fault
from lpq.cli.output import Json, as_json, print_text
from lpq.cli.overview import show_meanings, show_overview
from lpq.kernels import KernelError, code_cache, native, nvrtc_cache
from lpq.kernels.table import ENVIRONMENT, allowed_backends
from lpq.registry.errors import OptionError, suggestion, words
from lpq.registry.tables import table

ABSENT = "not installed"
VARIABLES = (ENVIRONMENT, "LPQ_LOAD_PLUGINS", code_cache.CACHE)
Device = Annotated[str, typer.Option(help="Where kernels would run: cpu, cuda, cuda:N, or auto.")]
Quantizers = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="QUANTIZER",
        help="Quantizers whose kernels to list, as 'fp8(scaling=block)'; default: the quantizers of all formats.",
    ),
]

Every = Annotated[
    bool, typer.Option("--all", help="Which backend runs each operation of each format, and why no better one.")
]
Full = Annotated[bool, typer.Option("--full", help="A row for each operation, and the reason for each kernel.")]


def doctor(
    quantizers: Quantizers = None, device: Device = "auto", whole: Every = False, full: Full = False, json: Json = False
) -> None:
    """Advise which recipe to begin with on this machine, and what is missing; show versions, devices and plugins.

    With --all: the kernel of each operation. A kernel that would be better and cannot run here is listed with the
    reason. The exit status is 1 if anything is broken.
    """
    where = pick_device(device)
    allowed_backends()  # a misspelt one is refused once, and not beside every operation
    by_text = {str(q): q for q in map(registry.quantizer, quantizers or ())}
    plugins = [described(plugin) for plugin in registry.plugins()]
    kernels, broken = examine(where)
    unbuilt = broken_recipes(registry.plugins())
    gpus = devices()
    pairs = [] if by_text else served_by_pair(where, kernels)
    if by_text:
        kernels = {name: served_by_quantizer(q, where) for name, q in by_text.items()}
    every = [*(s for own in kernels.values() for s in own), *pairs]
    text = refused(every, where) or advice(where, has_cuda_core=installed("cuda-core") != ABSENT)
    faults = {r.impl: r.words for s in every for r in s.why_not if r.impl in s.broken}
    wrong = [p for p in plugins if p["status"] in ("broken", "missing")]
    if json:
        as_json(
            {
                "advice": text,
                "versions": versions(),
                "devices": gpus,
                "environment": environment(),
                "plugins": plugins,
                "device": str(where),
                "kernels": [{"format": name, **s.plain()} for name, own in kernels.items() for s in own],
                "pairs": [s.plain() for s in pairs],
                "broken_formats": broken,
                "broken_recipes": unbuilt,
                "unused_kernels": unused_kernels(),
                "kernel_cache": {"folder": str(code_cache.cache_dir() or ""), "problem": code_cache.why_unkept()},
            }
        )
    else:
        if not by_text:
            print_text(text)
        show_machine(gpus, plugins)
        if by_text or full:
            options = "" if by_text else ", default options"
            show(f"Kernels on {where}{options}", ("format", "operation"), titles(every), full=full)
            show_meanings({s.op for s in every} if full else ())
        elif whole:
            show_overview(kernels, pairs, where)
        else:
            print_text("`lpq doctor --all` lists the kernel of each operation, and why no better one runs.")
        if (whole or full) and not by_text and (without := set(registry.formats()) - set(kernels) - set(broken)):
            names = ", ".join(sorted(without))
            print_text(f"Not listed, as they have no default options: {names} (`lpq doctor QUANTIZER` lists one).")
        for remark in remarks(where):
            print_text(remark)
        for kind, problems in (("format", broken), ("recipe", unbuilt), ("kernel", faults)):
            for name, problem in problems.items():
                typer.echo(f"lpq: {kind} {name}: {problem}", err=True)
    if wrong or broken or unbuilt or faults or any(s.error for s in every) or any(d["broken"] for d in gpus):
        raise typer.Exit(1)


def remarks(device: torch.device) -> Iterator[str]:
    """Sentences on what keeps kernels from being kept, launched fast or run at all."""
    if (problem := code_cache.why_unkept()) is not None:
        remedy = f"Set {code_cache.CACHE} to a folder that you can write, and nobody else"
        yield f"Compiled CUDA kernels are not kept: {problem}. {remedy}, or each process compiles them anew."
    if device.type == "cuda" and (lack := native.lacking()) is not None:
        yield f"CUDA kernels are launched from Python, which takes the host twice as long as from C: {lack}."
    for kernel in unused_kernels():
        yield f"Kernel {kernel['impl']} never runs: {kernel['reason']}"


def examine(device: torch.device) -> tuple[dict[str, list[Served]], dict[str, str]]:
    """The kernels of each format that has default options; the formats that cannot be used, and why."""
    kernels: dict[str, list[Served]] = {}
    broken: dict[str, str] = {}
    for plugin in registry.plugins():
        for name in plugin.formats:
            try:
                kernels[name] = served_by_format(name, device)
            except OptionError:
                continue  # it has options without a default, as one that is made of other formats does
            except Exception as error:
                broken[name] = fault(plugin, error)
    return kernels, broken


def show_machine(gpus: list[dict[str, Any]], plugins: list[dict[str, Any]]) -> None:
    """Print versions, devices, the variables that are set, and the plugins; a plugin in order takes its name only."""
    print_text("Versions: " + ", ".join(f"{what}{':' * (' ' in text)} {text}" for what, text in versions().items()))
    for gpu in gpus:
        print_text(f"Device {gpu['device']}: {', '.join(filter(None, (gpu['name'], gpu['detail'])))}")
    for name, value in environment().items():
        print_text(f"{name}={value}")
    fine: dict[str, list[str]] = {}
    for plugin in plugins:
        if plugin["status"] == "ok":
            fine.setdefault(f"{plugin['distribution']} {plugin['version']}", []).append(plugin["name"])
    for distribution, names in fine.items():
        print_text(f"Plugins of {distribution}: {', '.join(names)}")
    if others := [p for p in plugins if p["status"] != "ok"]:
        origins = (f"{p['distribution']} {p['version']}" for p in others)
        rows = [(p["name"], o, p["status"], p["cause"], p["remedy"]) for p, o in zip(others, origins, strict=True)]
        table("Plugins that are not used", ("name", "from", "status", "what is wrong", "remedy"), rows)
    typer.echo()


def titles(served: list[Served]) -> Iterator[tuple[tuple[str, str], Served]]:
    """Name each by its operands, with options that are no defaults, and by its operation."""
    return (((" and ".join(dict.fromkeys(s.operands)), s.op), s) for s in served)


def unused_kernels() -> list[dict[str, str]]:
    """The kernels for a format that is not here. That is no error, as the plugin of the format may be absent."""
    formats = registry.formats()
    return [
        {
            "impl": f"{kernel.backend} {kernel.impl}",
            "reason": f"{plugin.title} has it for {absent!r}, a format that is not here: {suggestion(absent, formats)}",
        }
        for plugin in registry.plugins()
        for kernel in plugin.kernels
        for absent in sorted({*kernel.formats} - {*formats, registry.ANY})
    ]


def versions() -> dict[str, str]:
    return {
        "lpq": lpq.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "cuda": torch.version.cuda or "torch is built without it",
        "cuda-core": installed("cuda-core"),
        "nvrtc": compiler(),
    }


def compiler() -> str:
    """The version of the compiler of CUDA kernels, or the reason why there is none."""
    try:
        return nvrtc_cache.compiler_version()
    except KernelError as error:
        return f"cannot be loaded: {' '.join(str(error.__cause__).split())}"


def installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ABSENT


def devices() -> list[dict[str, Any]]:
    """The devices that torch lists, also those that it cannot use."""
    threads = f"threads: {torch.get_num_threads()}"
    rows = [{"device": "cpu", "name": platform.machine(), "detail": threads, "broken": False}]
    for index in range(torch.cuda.device_count()):
        name, broken = "", False
        try:
            gpu = torch.cuda.get_device_properties(index)
            name, detail = gpu.name, f"compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
        except Exception as error:  # as where the driver is too old: it counts GPUs that nobody can use
            broken, detail = True, f"torch cannot use it: {words(error)}"
        rows.append({"device": f"cuda:{index}", "name": name, "detail": detail, "broken": broken})
    return rows


def environment() -> dict[str, str]:
    """The variables that lpq reads, where they are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}
