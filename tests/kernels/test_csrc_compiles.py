"""Every CUDA source compiles for every architecture that lpq serves, and with all macros that the plugins ask for.

Of the sets of macros that they ask for, those are compiled that have every two macros that go together in any. (What
they compute is shown where a CPU imitates a GPU.) By nvcc where it is on the PATH, many at once (``merged``); else by
NVRTC, as on a user's machine. Neither needs a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import imitated
import merged
import pytest
import torch
from compiling import Macros, by_nvcc
from tile_sides import on_cuda, serves, side_of

from lpq import registry
from lpq.core import Quantizer
from lpq.formats.sections import Sections
from lpq.kernels import nvrtc_cache, tiles
from lpq.kernels.amaxes import MACROS, bind_amaxes
from lpq.kernels.cuda import CudaKernel
from lpq.operations import produced_tiles, sectioned
from lpq.operations.binding import Encoding, Operand, cached_by_shape
from lpq.operations.fused_pair import Pair
from lpq.operations.produced_tiles import SourceOutput
from lpq.operations.recoding import bind_sides
from lpq.operations.several_sides import bind_side
from lpq.operations.source import ACTIVATIONS
from lpq.registry import KernelSpec
from lpq.testing.calls import calls
from lpq.testing.kernel_checks import pairs
from lpq.testing.operands import encode
from lpq.testing.options import family

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
SOURCES = sorted(nvrtc_cache.csrc().glob("**/*.cu"))
FOLDERS = sorted({source.parent.name for source in SOURCES})
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INPUTS = ("LPQ_BF16", "LPQ_FP16", "LPQ_FP32")
SHAPES = ((512, 256), (250, 381))
"""Whole tiles, broad ones too, and ragged ones."""
MANY = (512, 1)
"""How many tiles are many: a matrix of that size is taken by broader ones."""
OF_ROWS = (
    "nvfp4(scaling=row)",
    "nvfp4(scaling=row, stochastic=unbiased)",
    "nvfp4(scaling=row, search=four_over_six, norm=256)",
)
TILED = [name for name in registry.formats() if registry.kernels("tile", (name,))]
"""The formats that are made tile by tile."""


def by_nvrtc(source: Path, macros: Macros, architecture: str, out: Path) -> str | None:
    try:
        out.write_bytes(nvrtc_cache.compile_source(source, macros, architecture))
    except nvrtc_cache.KernelError as error:
        return str(error)
    return None


def compiler() -> Callable[[Path, Macros, str, Path], str | None] | None:
    if shutil.which("nvcc"):
        return by_nvcc
    return by_nvrtc if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core") else None


BEGINS = re.compile(r"^\s*(?:template *<[^;{]*> *)?(?:[\w:<>,*&]+ +)+[*&]?\w+\([^;]*\)(?: const)? \{", re.MULTILINE)
"""The first line of a definition of a function, of a statement such as ``if``, too."""
STATEMENT = re.compile(r"^\s*(else|return)\b")


def of_no_device(source: str) -> list[str]:
    """The lines at which functions begin that would be the host's, which NVRTC refuses."""
    found = (match.group().strip("\n") for match in BEGINS.finditer(source))
    return [line for line in found if not re.search(r"__(device|global)__", line) and not STATEMENT.match(line)]


def test_every_function_is_one_of_the_device() -> None:
    """Where a CPU imitates a GPU, a function of the host compiles, too."""
    assert of_no_device("constexpr int needs(bool busy) { return 80; }")
    assert not of_no_device("__device__ int f(int a) {")
    for source in nvrtc_cache.csrc().glob("**/*.cu*"):
        assert not of_no_device(source.read_text()), source


def test_every_kernel_waits_before_it_does_anything() -> None:
    """They are launched while the kernel before may still run; a GPU would seldom show that one does not wait."""
    found = 0
    for source in sorted(nvrtc_cache.csrc().glob("**/*.cu*")):
        text = source.read_text()
        bodies = re.findall(r'extern "C" __global__[^{]*\{((?:[^;]*;){2})', text)
        assert len(bodies) == text.count("__global__"), source.name
        for body in bodies:
            first = [line.strip(" \n\\") for line in body.split(";")]
            waits = first[first[0] == "let_the_next_one_come()"]
            assert waits == "wait_for_the_one_before()", (source.name, first)
        found += len(bodies)
    assert found


# ---------------------------------------------------------------------------------------------- macros


@functools.cache
def asked_for() -> dict[Path, set[Macros]]:
    """The macros that each source is compiled with when the kernels of the table are called with all options.

    Their launches are written down and not made, so that a CPU's tensors do.
    """
    found: dict[Path, set[Macros]] = {}

    def launch(self: CudaKernel, device: int, macros: Macros, blocks: int, *arguments: float) -> None:
        found.setdefault(self.source.resolve(), set()).add(macros)

    with pytest.MonkeyPatch.context() as patch, imitated.in_place_of_launches(launch):
        patch.setattr(tiles, "multiprocessors", lambda device: 132)
        for many, plugin, kernel in ((m, p, k) for m in MANY for p in registry.plugins() for k in p.kernels):
            set_many(patch, many)
            if kernel.backend == "cuda" and kernel.op in ("measure", "quantize", "decode", "transpose"):
                for name in set(kernel.formats) & set(plugin.formats):
                    with contextlib.suppress(Exception):  # it needs a GPU before it launches: its macros are guessed
                        call(kernel, name)
            elif kernel.op == "reader":
                for name in set(kernel.formats) & set(plugin.formats):
                    call_reader(kernel, name)
            elif kernel.op == "exact_tile":
                for name in set(kernel.formats) & set(plugin.formats):
                    call_beside_its_own(kernel, name)
        for many in MANY:
            set_many(patch, many)
            call_pairs()
            call_in_sections()
        call_whole_rows()
        call_several()
        call_producers()
    return found


def set_many(patch: pytest.MonkeyPatch, many: int) -> None:
    """Set how many tiles are many. Bound kernels have counted their tiles already, and are bound anew."""
    if many != tiles.MANY_TILES:
        patch.setattr(tiles, "MANY_TILES", many)
        registry.refresh()


def call(kernel: KernelSpec, name: str) -> None:
    """Every way to call a kernel of a format."""
    impl = registry.resolve(kernel.impl)
    for quantizer, dtype, shape in itertools.product(family(name).quantizers, DTYPES, SHAPES):
        x = torch.zeros(shape, dtype=dtype)
        for row, col in pairs(kernel, quantizer):
            if refuses(kernel, tuple(side for side in (row, col) if side is not None)):
                continue
            _, arguments = next(calls(kernel.op, row, col, x))
            if kernel.op == "decode":
                impl(arguments[0], dtype)
            else:
                impl(*arguments)
            if kernel.op == "quantize":  # the statistics measured on the way, and asked for or, as by layers, not
                impl(x, [], *arguments[2:6], dtype is not torch.bfloat16)


def call_pairs() -> None:
    """Every operand that is made tile by tile, and every two formats of these.

    What an operand is compiled to does not depend on the one beside it, which is another one in each direction. Dtypes,
    and whether statistics are wanted, take turns: what they are compiled to, each format's own kernels show.
    """
    inputs = itertools.cycle(itertools.product(DTYPES, (False, True)))
    defaults = [registry.quantizer(name) for name in TILED]
    every = [quantizer for name in TILED for quantizer in family(name).quantizers]
    beside = every[len(every) // 2 :] + every[: len(every) // 2]
    for row, col in [*itertools.product(defaults, defaults), *zip(every, beside, strict=True)]:
        call_pair(row, col, *next(inputs))


def call_beside_its_own(kernel: KernelSpec, name: str) -> None:
    """Every exact form of a format beside its default."""
    inputs = itertools.cycle(itertools.product(DTYPES, (False, True)))
    default = registry.quantizer(name)
    for quantizer in family(name).quantizers:
        if serves(kernel, quantizer):
            call_pair(quantizer, default, *next(inputs), ops=("exact_tile", "tile"))
            call_pair(default, quantizer, *next(inputs), ops=("tile", "exact_tile"))


def call_reader(kernel: KernelSpec, name: str) -> None:
    """A column operand of the format is made of every row operand whose codes can be read."""
    for quantizer, shape in itertools.product(family(name).quantizers, SHAPES):
        if 0 in shape:
            continue
        row, col, device = quantizer.side("row"), quantizer.side("col"), torch.device("cpu")
        reader, side = registry.resolve(kernel.impl)(row), side_of(col, "col")
        recode = bind_sides(reader, side, Operand(row, shape, torch.bfloat16), col, device)
        if recode is not None:
            recode(encode(row, torch.zeros(shape)).tensors())


def call_pair(
    row: Quantizer, col: Quantizer, dtype: torch.dtype, measure: bool, ops: tuple[str, str] = ("tile", "tile")
) -> None:
    sides = row.side("row"), col.side("col")
    made = [side_of(side, which, op) for side, which, op in zip(sides, ("row", "col"), ops, strict=True)]
    cached_by_shape(Pair(*made).bind)(torch.zeros(SHAPES[0], dtype=dtype), [], *sides, torch.tensor(0), 0, measure)


def call_whole_rows() -> None:
    """An amax for each row, which the kit does not try, of rows that a block of threads holds."""
    for text, dtype, shape in itertools.product(OF_ROWS, DTYPES, (*SHAPES, (64, 4096))):
        quantizer = registry.quantizer(text)
        kernel = on_cuda("quantize", quantizer)
        assert kernel is not None
        x, measure = torch.zeros(shape, dtype=dtype), dtype is not torch.bfloat16
        registry.resolve(kernel.impl)(x, [], quantizer, None, torch.tensor(0), 0, measure)


def call_several() -> None:
    """Every way to measure several matrices, and to encode them by each kernel that takes several. Tile by tile, dtypes
    and whole tiles take turns."""
    device, shape = torch.device("cpu"), SHAPES[0]
    for dtype in DTYPES:
        for of in MACROS:
            bind_amaxes([(0, 0, shape)], of, dtype, device).run()
        for kernel in (k for p in registry.plugins() for k in p.kernels if k.op == "quantize" and k.several):
            for quantizer in family(kernel.formats[0]).quantizers:
                at = registry.resolve(kernel.several)(quantizer, [shape], dtype, device)
                if at is not None:
                    one = torch.zeros(shape)
                    at([one], [[one] * len(quantizer.stats)], [[one] * len(quantizer.layout)]).run()
    inputs = itertools.cycle(itertools.product(DTYPES, (shape, (512, 384))))
    for name, direction in itertools.product(TILED, ("row", "col")):
        for quantizer in (q.side(direction) for q in family(name).quantizers if not q.stochastic):
            side, (dtype, size) = side_of(quantizer, direction), next(inputs)
            if side is not None and not quantizer.stochastic:
                one = torch.zeros(size)
                at = bind_side(side, direction, [size], dtype, device)
                at([one], [[one] * len(quantizer.stats)], [[one] * len(quantizer.layout)]).run()


def call_producers() -> None:
    """Every source, with the operands of each format and of two.

    The code of a side does not depend on the source, and is seen in pairs.
    """
    dtypes, sizes = itertools.cycle(DTYPES[:2]), itertools.cycle((SHAPES[0], (250, 384)))
    formats = [registry.quantizer(name) for name in TILED]
    silu = ACTIVATIONS["silu"]
    for source, i in itertools.product((*silu.gated, silu.alone.product), range(len(formats))):
        dtype, shape = next(dtypes), next(sizes)
        dtype = torch.float32 if source is silu.alone.product else dtype
        sides = formats[i].side("row"), formats[i - 1].side("col")
        e = Encoding(*sides, shape, dtype, dtype, torch.device("cpu"), measure=bool(i % 2), dispatched=True)
        first, second = side_of(sides[0], "row"), side_of(sides[1], "col")
        outputs = [SourceOutput(e, first, second), SourceOutput(e._replace(row=None), None, second), None]
        run = produced_tiles.bind(source, shape, dtype, e.device, outputs[: source.outputs], [True] * source.outputs)
        run(
            [torch.zeros(shape, dtype=dtype)] * len(source.inputs),
            [()] * source.outputs,
            [torch.tensor(0)] * source.outputs,
        )


def call_in_sections() -> None:
    """Every operand of groups of rows or of a stack, encoded or as what it decodes to, beside another format's.

    Each format's default is alone, too. Dtypes take turns, and so do whole tiles and ragged ones, as far as there are.
    """
    dtypes, sizes = itertools.cycle(DTYPES), itertools.cycle((*SHAPES, *((2, *shape) for shape in SHAPES)))
    every = [quantizer for name in TILED for quantizer in family(name).quantizers]
    alone = [registry.quantizer(name) for name in TILED]
    beside = zip(every, every[len(every) // 2 :] + every[: len(every) // 2], strict=True)
    for row, col in [*beside, *((one, None) for one in alone), *((None, one) for one in alone)]:
        sides: list[Any] = [
            (one.side(which), side_of(one.side(which), which)) if one is not None else (None, None)
            for one, which in ((row, "row"), (col, "col"))
        ]
        for decoded in ((False, False), (True, True)):
            any(call_sections(next(sizes), sides, decoded, next(dtypes)) for _ in range(4))


def call_sections(shape: tuple[int, ...], sides: list[Any], decoded: tuple[bool, bool], dtype: torch.dtype) -> bool:
    """Return whether a kernel makes them."""
    (row, first), (col, second) = sides
    *count, _, cols = shape
    number = count[0] if count else 3
    x = torch.zeros(shape, dtype=dtype)
    e = Encoding(
        row, col, (x.numel() // cols, cols), dtype, dtype, x.device, exact=decoded,
        sections=Sections(number, bool(count), at_once=True),
    )  # fmt: skip
    run = sectioned.bind_sides(e, first, second) if sectioned.why_not(e) is None else None
    if run is not None:
        run(x, None if count else torch.tensor([200, 200, 250], dtype=torch.int32), torch.arange(number))
    return run is not None


def refuses(kernel: KernelSpec, operands: tuple[Quantizer, ...]) -> bool:
    return kernel.why_not is not None and registry.resolve(kernel.why_not)(*operands) is not None


def guessed(source: Path) -> Iterator[Macros]:
    """Macros for a source that no kernel of the table uses: those that it asks about, one at a time, in each dtype."""
    asked = set(re.findall(r"#if(?:n?def| defined\()\s*(LPQ_\w+)", source.read_text()))
    for i, switch in enumerate([None, *sorted(asked - {"LPQ_INPUT", "LPQ_OUTPUT"})]):
        yield (f"LPQ_INPUT={INPUTS[i % 3]}", f"LPQ_OUTPUT={INPUTS[i % 3]}", *([switch] if switch else []))


def macros_of(source: Path) -> list[Macros]:
    return sorted(asked_for().get(source.resolve(), ())) or list(guessed(source))


def dealt(source: Path, architecture: str) -> list[Macros]:
    """Each set of macros for one of the architectures in turn, as there are many; one at least for each of them."""
    sets, first = macros_of(source), ARCHITECTURES.index(architecture)
    return sets[first :: len(ARCHITECTURES)] or [sets[first % len(sets)]]


def sights(sets: Iterable[tuple[str, Macros]], names: Sequence[str]) -> list[set[tuple[str, ...]]]:
    """What is to be seen of each set: its architecture, each two of its macros together, and each of them for an old
    and for a new one, by which sources tell what there is.

    That a macro is absent counts as one, too. The two sides of a pair of formats know nothing of each other.
    """
    together = [(a, b) for a, b in itertools.combinations(names, 2) if not of_two_sides(a, b, names)]
    found = []
    for architecture, macros in sets:
        given = {macro.partition("=")[0]: macro for macro in macros}
        value = {name: given.get(name, f"no {name}") for name in names}
        pairs = ((value[a], value[b]) for a, b in together)
        found.append({(architecture,), *pairs, *((kind(architecture), one) for one in value.values())})
    return found


def kind(architecture: str) -> str:
    return "old" if architecture == "sm_80" else "new"


def of_two_sides(a: str, b: str, names: Sequence[str]) -> bool:
    """Whether one macro is the row side's and the other the column side's of a source that is made for any two."""
    return "LPQ_ROW_HEADER" in names and {a[:7], b[:7]} == {"LPQ_ROW", "LPQ_COL"}


def names_of(source: Path) -> list[str]:
    return sorted({macro.partition("=")[0] for macros in macros_of(source) for macro in macros})


@functools.cache
def chosen(source: Path) -> dict[str, list[Macros]]:
    """Of what is dealt, as few sets as show all that is to be seen of all: always the one that shows most that is new.

    A source has at most some ten macros, and what does not compile is due to one or two of them.
    """
    every = [(architecture, macros) for architecture in ARCHITECTURES for macros in dealt(source, architecture)]
    seen = sights(every, names_of(source))
    left, found = set().union(*seen), dict[str, list[Macros]]()
    while left:
        best = max(range(len(every)), key=lambda i: len(seen[i] & left))  # the first of those
        left -= seen[best]
        found.setdefault(every[best][0], []).append(every[best][1])
    return found


# ---------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merged.headers(tmp_path_factory.mktemp("csrc"))


def all_in_one(sets: list[tuple[Path, Macros]], architecture: str, copies: Path, out: Path) -> str | None:
    """Return the errors of nvcc, which compiles these sources, each with its macros, at once."""
    source = out.with_suffix(".all.cu")
    source.write_text(merged.merged(sets, copies))
    return by_nvcc(source, (), architecture, out, places=(copies / "common",))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_it_compiles(folder: str, architecture: str, copies: Path, tmp_path: Path) -> None:
    """By NVRTC each source with each set of macros; by nvcc all at once, and one by one to tell which one does not."""
    compile_one, out = compiler(), tmp_path / "out.cubin"
    if compile_one is None:
        pytest.skip("needs nvcc on the PATH, or cuda-core with NVRTC (pip install 'lpq[cuda]')")
    sets = [(source, macros) for source in SOURCES if source.parent.name == folder
            for macros in chosen(source)[architecture]]  # fmt: skip
    assert sets
    together = all_in_one(sets, architecture, copies, out) if compile_one is by_nvcc else ""
    if together is not None:
        for source, macros in sets:
            words = compile_one(source, macros, architecture, out)
            assert words is None, f"{source.name} {macros} {architecture}:\n{words}"
            assert out.stat().st_size
        assert not together, f"each compiles, and all together do not: {together}"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc: NVRTC reads a header of its own")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.parent.name}/{source.name}")
def test_no_name_is_one_of_cudas(source: Path, tmp_path: Path) -> None:
    """And CUDA has the functions that the lean header declares: its whole header is read, alone and as it is."""
    architecture = ARCHITECTURES[SOURCES.index(source) % len(ARCHITECTURES)]
    words = by_nvcc(source, chosen(source)[architecture][0], architecture, tmp_path / "out.cubin", headers=())
    assert words is None, words


def test_there_are_sources_and_the_plugins_use_most_of_them() -> None:
    used = {source for source in SOURCES if source.resolve() in asked_for()}
    assert len(used) > len(SOURCES) / 2
    for source in SOURCES:
        assert {m for a in ARCHITECTURES for m in dealt(source, a)} == set(macros_of(source))
    macros = {macro for source in used for macros in macros_of(source) for macro in macros}
    assert any("LPQ_ROW" in macro for macro in macros)
    assert {"LPQ_WIDE=128", "LPQ_WIDE=256", "LPQ_TALL=64", "LPQ_TALL=256"} <= macros
    (pair,) = (source for source in SOURCES if source.name == "pair.cu")
    in_sections = {a for a in ARCHITECTURES for macros in chosen(pair)[a] if "LPQ_SECTIONS" in macros}
    assert in_sections == {*ARCHITECTURES}
    assert {"sections.cu", "section_amaxes.cu"} <= {source.name for source in used}


def test_what_is_chosen_shows_all_that_is_to_be_seen() -> None:
    """Reckoned in another way than it was chosen."""

    def value(macros: Macros, name: str) -> str | None:
        return next((macro for macro in macros if macro.split("=")[0] == name), None)

    few = many = 0
    for source in SOURCES:
        sets, names = [m for a in ARCHITECTURES for m in chosen(source)[a]], names_of(source)
        assert set(sets) <= set(macros_of(source))
        for a, b in itertools.combinations_with_replacement(names, 2):
            both = macros_of(source), sets
            wanted, found = ({(value(m, a), value(m, b)) for m in some} for some in both)
            apart = source.name == "pair.cu" and "ROW" in a + b and "COL" in a + b
            assert apart or found == wanted, (source, a, b)
        assert all(chosen(source)[architecture] for architecture in ARCHITECTURES)
        for some, name in itertools.product((ARCHITECTURES[:1], ARCHITECTURES[1:]), names):
            all_of = (dealt(source, a) for a in some), (chosen(source)[a] for a in some)
            wanted, found = ({value(m, name) for sets in each for m in sets} for each in all_of)
            assert found == wanted, (source, some, name)
        few, many = few + len(sets), many + len(macros_of(source))
    assert few < many


def test_a_source_that_does_not_compile_is_noticed(tmp_path: Path) -> None:
    compile_one = compiler()
    if compile_one is None:
        pytest.skip("needs nvcc on the PATH, or cuda-core with NVRTC (pip install 'lpq[cuda]')")
    source = tmp_path / "wrong.cu"
    source.write_text(
        '#include "numbers.cuh"\nextern "C" __global__ void f() {\n#ifdef WRONG\nthere is none\n#endif\n}\n'
    )
    assert compile_one(source, (), "sm_90a", tmp_path / "out.cubin") is None
    words = compile_one(source, ("WRONG",), "sm_90a", tmp_path / "out.cubin")
    assert words is not None
    assert "there" in words


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_one_that_does_not_compile_is_noticed_among_others(tmp_path: Path) -> None:
    copies = merged.headers(tmp_path / "csrc")
    wrong, other = (source for source in SOURCES if source.name in ("alpha.cu", "words.cu"))
    copy = copies / wrong.parent.name / wrong.name
    copy.write_text(copy.read_text() + "#ifdef WRONG\nthere is none\n#endif\n")
    right: list[tuple[Path, Macros]] = [(other, ("WRONG",)), (wrong, ())]
    assert all_in_one(right, "sm_90a", copies, tmp_path / "out.cubin") is None
    words = all_in_one([*right, (wrong, ("WRONG",)), (other, ())], "sm_90a", copies, tmp_path / "out.cubin")
    assert words is not None
    assert "alpha.cu" in words
