"""``lpq doctor`` and ``lpq explain``: which kernel runs, and why not a better one."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lpq import registry
from lpq.cli import first_advice
from lpq.cli.kernels import Rejected, Served
from lpq.kernels import code_cache
from lpq.kernels import table as kernel_table
from lpq.registry.operations import TABLE

KERNELS = """
    from functools import partial
    from lpq.registry import KernelSpec, hookimpl

    def decode(operand, dtype):
        return operand.decode().to(dtype)

    def refuse(quantizer, other=None):
        return f"{quantizer} is too [odd]"

    @hookimpl
    def lpq_register_kernels():
        kernel = partial(KernelSpec, op="decode", formats=("mxfp8",))
        here = "lpq_swift_plugin:"
        return [
            kernel(impl=here + "gone", backend="cuda", priority=30),
            kernel(impl=here + "odd", backend="torch", device="cpu", priority=25, why_not=here + "refuse"),
            kernel(impl=here + "need", backend="triton", device="cpu", priority=20,
                   requires=("a_module_that_is_not_there",)),
            kernel(impl=here + "decode", backend="torch", device="cpu", priority=10),
        ]
"""


def doctor(lpq: Callable, *arguments: str, status: int = 0) -> dict:
    ended = lpq("doctor", "--json", *arguments)
    assert ended.status == status, ended.err
    return json.loads(ended.out)


def test_it_says_what_is_here(lpq: Callable) -> None:
    found = doctor(lpq, "--device", "cpu")
    assert found["versions"]["torch"] == torch.__version__
    assert {"lpq", "python", "triton", "cuda"} <= set(found["versions"])
    assert found["devices"][0]["device"] == "cpu"
    assert {p["name"] for p in found["plugins"]} == {p.name for p in registry.plugins()}
    assert (found["broken_formats"], found["broken_recipes"]) == ({}, {})


def test_it_begins_with_advice_and_lists_kernels_on_request(lpq: Callable) -> None:
    found = doctor(lpq, "--device", "cpu")
    plain = lpq("doctor", "--device", "cpu").out
    assert plain.splitlines()[0] == found["advice"]
    assert found["advice"].startswith(
        "Any recipe runs here, emulated, to see its effect on a model, and none saves time: "
    )
    assert "What runs on cpu" not in plain
    assert "`lpq doctor --all` lists the kernel of each operation" in plain
    assert "What runs on cpu, default options" in lpq("doctor", "--all", "--device", "cpu").out


def test_it_lists_every_operation_of_every_format_that_has_defaults(lpq: Callable) -> None:
    kernels = doctor(lpq, "--device", "cpu")["kernels"]
    assert {k["format"] for k in kernels} == set(registry.formats()) - {"hybrid"}
    ops = {name: [k["op"] for k in kernels if k["format"] == name] for name in registry.formats()}
    optional = ["exact", "tile", "reader", "stored_tile", "tile_program", "grouped_gemm"]
    assert ops["fp8"] == ["measure", "quantize", "decode", "transpose", "gemm", *optional, "remember"]
    assert ops["mxfp8"] == [
        "measure",
        "quantize",
        "decode",
        "gemm",
        "exact",
        "tile",
        "exact_tile",
        "reader",
        "stored_tile",
        "tile_program",
    ]
    assert ops["identity"] == ["quantize", "decode", "transpose", "gemm", "exact"]
    for kernel in kernels:
        if kernel["format"] == "mxfp8":
            assert kernel["backend"] == ("reference" if TABLE[kernel["op"]].reference else "none")


def test_every_kernel_of_the_table_stands_under_its_operation(lpq: Callable) -> None:
    """None of them runs on a CPU, so each is among those that would be better."""
    found = doctor(lpq, "--device", "cpu")
    told = {(k["op"], *k["operands"], entry["impl"]) for k in found["kernels"] for entry in k["why_not"]}
    seen = {(op, impl) for op, *_, impl in told}
    for plugin in registry.plugins():
        for kernel in plugin.kernels:
            if len(set(kernel.formats)) == 1 and kernel.formats[0] not in ("identity", registry.ANY):
                assert (kernel.op, f"{kernel.backend} {kernel.impl}") in seen, kernel
    assert ("remember", "fp8(scaling=delayed)", "cuda lpq_fp8.history:remember") in told
    assert ("transpose", "nvfp4(block=16x16)", "triton lpq_nvfp4.triton:transpose") in told
    table = lpq("doctor", "--all", "--device", "cpu").out
    assert "fp8(scaling=delayed)" in table
    for op in ("exact", "tile", "remember"):
        assert f"\n{op}: " in table


def test_a_kernel_for_two_formats_is_shown(install: Callable, lpq: Callable) -> None:
    own, pair = 'op="decode", formats=("mxfp8",)', 'op="quantize", formats=("mxfp8", "nvfp4")'
    install("swift", "1.0", KERNELS.replace(own, pair))
    pairs = doctor(lpq, "--device", "cpu")["pairs"]
    (found,) = [p for p in pairs if p["operands"] == ["mxfp8", "nvfp4"] and p["op"] == "quantize"]
    assert (found["op"], found["backend"], found["impl"]) == ("quantize", "torch", "lpq_swift_plugin:decode")
    assert "mxfp8 and nvfp4" in lpq("doctor", "--all", "--device", "cpu").out


def test_the_portable_kernels_come_after_the_cuda_kernels(lpq: Callable) -> None:
    """The verdict on each format with a tensor of its own; on a CPU neither runs."""
    for kernel in doctor(lpq, "--device", "cpu")["kernels"]:
        if kernel["format"] not in ("fp8", "mxfp8", "nvfp4") or kernel["op"] not in ("measure", "quantize", "decode"):
            continue
        backends = [entry["impl"].partition(" ")[0] for entry in kernel["why_not"]]
        assert [*dict.fromkeys(backends)] == ["cuda", "triton"]
        portable = kernel["why_not"][backends.index("triton")]
        assert portable["impl"] == f"triton lpq_{kernel['format']}.triton:{kernel['op']}"
        assert portable["reason"] == "runs on cuda, not on cpu"


def test_a_reason_that_holds_for_several_kernels_is_given_once() -> None:
    twice, other = "runs on cuda, not on cpu", "needs the module triton"
    why_not = (Rejected("cuda a:b", twice), Rejected("triton c:d", other), Rejected("cuda e:f", twice))
    served = Served("decode", ("fp8",), "reference", None, why_not)
    assert served.reasons({}) == f"cuda a:b, cuda e:f: {twice}\ntriton c:d: {other}"
    assert served.reasons({twice: "a"}) == f"cuda a:b, cuda e:f (a)\ntriton c:d: {other}"


def test_a_kernel_that_runs_is_named_and_those_that_cannot_say_why(install: Callable, lpq: Callable) -> None:
    install("swift", "1.0", KERNELS)
    (decode,) = [k for k in doctor(lpq, "--device", "cpu")["kernels"] if (k["format"], k["op"]) == ("mxfp8", "decode")]
    assert (decode["backend"], decode["impl"]) == ("torch", "lpq_swift_plugin:decode")
    reasons = {entry["impl"]: entry["reason"] for entry in decode["why_not"]}
    assert "cuda, not on cpu" in reasons["cuda lpq_swift_plugin:gone"]
    assert "mxfp8 is too [odd]" in reasons["torch lpq_swift_plugin:odd"]
    assert "a_module_that_is_not_there" in reasons["triton lpq_swift_plugin:need"]
    assert "torch: mxfp8 is too [odd]" in lpq("doctor", "--all", "--device", "cpu").out
    table = lpq("doctor", "mxfp8", "--device", "cpu").out
    assert "mxfp8 is too [odd]" in table
    assert "lpq_swift_plugin:decode" in table


def test_a_request_that_nothing_meets_is_an_error_in_the_table(lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPQ_KERNELS", "triton")
    found = doctor(lpq, "--device", "cpu", status=1)
    assert found["environment"]["LPQ_KERNELS"] == "triton"
    assert "Allow the reference as well: LPQ_KERNELS=triton,reference. Or unset it." in found["advice"]
    mine = [k for k in found["kernels"] if k["format"] == "mxfp8"]
    for kernel in mine:
        if not TABLE[kernel["op"]].reference:  # these need no kernel
            assert (kernel["backend"], kernel["error"]) == ("none", None)
            assert kernel["why_not"] == [{"impl": "LPQ_KERNELS", "reason": "it allows no kernel that runs here"}]
        else:
            assert kernel["backend"] == "error"
            assert "LPQ_KERNELS=triton" in kernel["error"]


FORMAT = """
    from dataclasses import dataclass, field
    from typing import Literal
    from lpq.core import Buffer, Quantizer, Rotation, Storage
    from lpq.registry import FormatSpec, hookimpl

    class OwnStorage(Storage):
        layout = (Buffer("data", None),)

    @dataclass(frozen=True)
    class Own(Quantizer):
        per: Literal["row", "tensor"] = "row"

    @hookimpl
    def lpq_register_formats():
        return FormatSpec(name="log4", summary="", quantizer="lpq_log4_plugin:Own",
                          storage="lpq_log4_plugin:OwnStorage", effective_bits=8)
"""
OWN_FAULTS = {
    "a default that its type refuses": (
        ('= "row"', '= "col"'),
        "plugin log4 (lpq-log4 1.0) cannot be used: format log4 refuses its own defaults: "
        "log4: option 'per' must be 'row' or 'tensor', not 'col'",
    ),
    "options that may change": (
        ("@dataclass(frozen=True)", "@dataclass"),
        "plugin log4 (lpq-log4 1.0) cannot be used: format log4 has quantizer='lpq_log4_plugin:Own', which is a "
        "dataclass that is not frozen. Remedy: declare Own with @dataclass(frozen=True).",
    ),
    "an option that cannot be hashed": (
        ('per: Literal["row", "tensor"] = "row"', "per: list = field(default_factory=list)"),
        "option 'per' is []; by options quantizers are told apart, so it must be",
    ),
    "a rotation of 12 columns": (
        ("    @hookimpl", "    Own.rotation = property(lambda self: Rotation(signs=(1,) * 12))\n\n    @hookimpl"),
        "plugin log4 (lpq-log4 1.0) cannot be used: log4: what Own declares raised ValueError: signs of a Rotation",
    ),
    "a class that is not there": (('"lpq_log4_plugin:Own"', '"lpq_log4_plugin:Gone"'), "lpq_log4_plugin:Gone"),
}
BROKEN_RECIPES = """
    from lpq.registry import RecipeSpec, hookimpl

    @hookimpl
    def lpq_register_recipes():
        recipes = {"tidy": "mxfp8", "tidy-typo": "fprop=log5, dgrad=bf16, wgrad=bf16", "tidy-odd": {"x": 7}}
        return [RecipeSpec(name=name, summary="", recipe=recipe) for name, recipe in recipes.items()]
"""


@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_what_is_wrong_with_one_format_takes_no_other_away(install: Callable, lpq: Callable, fault: str) -> None:
    (right, wrong), words = OWN_FAULTS[fault]
    before = doctor(lpq, "--device", "cpu")["kernels"]
    install("log4", "1.0", FORMAT.replace(right, wrong))
    found = doctor(lpq, "--device", "cpu", status=1)
    assert list(found["broken_formats"]) == ["log4"]
    assert words in found["broken_formats"]["log4"]
    assert [k for k in found["kernels"] if k["format"] in {k["format"] for k in before}] == before
    table = lpq("doctor", "--all", "--device", "cpu")
    assert "as they have no default options: hybrid (" in table.out
    assert words in table.err


def test_plugins_and_recipes_that_are_broken_are_findings(install: Callable, lpq: Callable) -> None:
    install("tidy", "1.0", BROKEN_RECIPES)
    found = doctor(lpq, "--device", "cpu", status=1)
    assert list(found["broken_recipes"]) == ["tidy-typo", "tidy-odd"]
    words = "plugin tidy (lpq-tidy 1.0) cannot be built: fprop: there is no recipe, policy or format 'log5'"
    assert f"recipe tidy-typo of {words}" in found["broken_recipes"]["tidy-typo"]
    install("sad", "1.3", "import a_library_that_is_not_there")
    (sad,) = [p for p in doctor(lpq, "--device", "cpu", status=1)["plugins"] if p["name"] == "sad"]
    assert "a_library_that_is_not_there" in sad["cause"]
    assert sad["remedy"]
    table = lpq("doctor", "--device", "cpu")
    assert table.status == 1
    assert f"recipe tidy-typo of {words}" in table.err


@pytest.mark.parametrize("command", ["explain", "check"])
@pytest.mark.parametrize("fault", [*list(OWN_FAULTS)[:2], "a rotation of 12 columns"])
def test_other_commands_say_it_in_the_same_words(install: Callable, lpq: Callable, command: str, fault: str) -> None:
    (right, wrong), words = OWN_FAULTS[fault]
    install("log4", "1.0", FORMAT.replace(right, wrong))
    ended = lpq(command, "log4")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith(f"lpq: {words}")


def test_a_format_with_an_option_to_give_is_none(install: Callable, lpq: Callable) -> None:
    """As a hybrid has two."""
    install("log4", "1.0", FORMAT.replace(' = "row"', ""))
    assert doctor(lpq, "--device", "cpu")["broken_formats"] == {}
    assert "as they have no default options: hybrid, log4 (" in lpq("doctor", "--all", "--device", "cpu").out
    assert "log4 has options without a default: write it as log4(per=…)" in lpq("explain", "log4").err


def test_a_kernel_at_fault_is_a_finding_and_its_format_stays(install: Callable, lpq: Callable) -> None:
    broken = KERNELS.replace('here + "gone", backend="cuda"', 'here + "gone", backend="torch", device="cpu"')
    install("swift", "1.0", broken.replace('return f"{quantizer} is too [odd]"', "raise ValueError('oh [no]')"))
    found = doctor(lpq, "--device", "cpu", status=1)
    (decode,) = [k for k in found["kernels"] if (k["format"], k["op"]) == ("mxfp8", "decode")]
    assert (decode["backend"], decode["impl"]) == ("torch", "lpq_swift_plugin:decode")
    assert decode["broken"] == ["torch lpq_swift_plugin:gone", "torch lpq_swift_plugin:odd"]
    reasons = {entry["impl"]: entry["reason"] for entry in decode["why_not"]}
    for impl, words in (("gone", "has no attribute 'gone'"), ("odd", "ValueError: oh [no]")):
        reason = reasons[f"torch lpq_swift_plugin:{impl}"]
        assert "plugin swift (lpq-swift 1.0) is at fault" in reason
        assert words in reason
    assert found["broken_formats"] == {}
    assert "lpq: kernel torch lpq_swift_plugin:gone: plugin swift" in lpq("doctor", "--device", "cpu").err
    assert {k["op"] for k in found["kernels"] if k["format"] == "mxfp8"} >= {"measure", "quantize", "decode", "gemm"}


def test_a_kernel_for_an_absent_format_is_told_and_is_no_error(install: Callable, lpq: Callable) -> None:
    install("swift", "1.0", KERNELS.replace('("mxfp8",)', '("mxpf8",)'))
    unused = doctor(lpq, "--device", "cpu")["unused_kernels"]
    assert unused[0]["impl"] == "cuda lpq_swift_plugin:gone"
    assert len(unused) == 4
    for entry in unused:
        assert "plugin swift (lpq-swift 1.0) has it for 'mxpf8'" in entry["reason"]
        assert "did you mean 'mxfp8'" in entry["reason"]
    ended = lpq("doctor", "--device", "cpu")
    assert ended.status == 0
    assert "Kernel cuda lpq_swift_plugin:gone never runs" in ended.out


def test_a_folder_in_which_compiled_kernels_cannot_be_kept_is_told(
    lpq: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    for folder, problem in ((tmp_path / "new" / "cache", None), (tmp_path / "file" / "cache", "file is no folder")):
        monkeypatch.setenv("LPQ_CACHE_DIR", str(folder))
        found = doctor(lpq, "--device", "cpu")["kernel_cache"]
        assert found["folder"] == str(folder)
        assert found["problem"] == (problem and f"{tmp_path}/{problem}")
        said = " ".join(lpq("doctor", "--device", "cpu").out.split())
        assert ("Compiled CUDA kernels are not kept: " in said) == (problem is not None)
    assert not (tmp_path / "new").exists()

    def closed(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", closed)
    assert code_cache.why_unkept() == f"{tmp_path}/file/cache cannot be reached (Permission denied)"


def test_explain_names_operands_and_quantizers(lpq: Callable) -> None:
    ended = lpq("explain", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", "--device", "cpu", "--json")
    found = json.loads(ended.out)
    assert found["gemms"]["fprop"] == {"x.row": "mxfp8", "w.row": "mxfp8"}
    assert found["gemms"]["dgrad"] == {"dy.row": "nvfp4(stochastic=true)", "w.col": "nvfp4(block=16x16)"}
    assert set(found["gemms"]["wgrad"]) == {"dy.col", "x.col"}
    assert found["runs"]["fprop"]["backend"] == "reference"
    assert found["runs"]["wgrad"]["backend"] == "torch"
    assert set(found["runs"]) == {
        "fprop",
        "dgrad",
        "wgrad",
        "quantize x.row",
        "quantize w.row, w.col",
        "quantize dy.row",
    }


# ---------------------------------------------------------------------------------------------- machines with GPUs


class Machine:
    """One that has GPUs of different kinds, and no NVRTC."""

    names = ("NVIDIA H100", "NVIDIA T4")
    capabilities = ((9, 0), (7, 5))
    fault: Exception | None = None
    current = 1

    def properties(self, index: int) -> types.SimpleNamespace:
        if self.fault is not None:
            raise self.fault
        major, minor = self.capabilities[index]
        return types.SimpleNamespace(name=self.names[index], major=major, minor=minor, total_memory=80 << 30)

    def current_device(self) -> int:
        if self.fault is not None:
            raise self.fault
        return self.current


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    found = Machine()

    @contextlib.contextmanager
    def device(device: torch.device) -> Iterator[None]:
        before, found.current = found.current, device.index
        yield
        found.current = before

    def no_library() -> None:
        raise RuntimeError("Failure finding libnvrtc.so.13\nin many folders")

    monkeypatch.delenv("LPQ_KERNELS", raising=False)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    for name, function in {
        "is_available": lambda: found.fault is None,
        "device_count": lambda: len(found.names),
        "current_device": found.current_device,
        "get_device_properties": found.properties,
        "get_device_capability": lambda device: found.capabilities[device.index],
        "device": device,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(kernel_table, "_installed", lambda module: True)
    bindings = types.SimpleNamespace(nvrtc=types.SimpleNamespace(nvrtcVersion=no_library))
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    registry.refresh()
    yield found
    monkeypatch.undo()
    registry.refresh()


def test_without_nvrtc_each_cuda_kernel_is_listed_with_the_remedy(machine: Machine, lpq: Callable) -> None:
    found = doctor(lpq, "--device", "cuda:0")
    assert found["versions"]["nvrtc"] == "cannot be loaded: Failure finding libnvrtc.so.13 in many folders"
    assert found["device"] == "cuda:0"
    assert {k["backend"] for k in found["kernels"]} == {"triton", "torch", "reference", "none", "none needed"}
    cuda = [e["reason"] for k in found["kernels"] for e in k["why_not"] if e["impl"].startswith("cuda ")]
    assert len(cuda) > 20
    assert all("NVRTC" in reason and "pip install" in reason and "\n" not in reason for reason in cuda)


def test_auto_is_the_current_gpu_and_says_which(machine: Machine, lpq: Callable) -> None:
    found = doctor(lpq)
    assert [d["detail"] for d in found["devices"][1:]] == [
        "compute capability 9.0, 80 GiB", "compute capability 7.5, 80 GiB"
    ]  # fmt: skip
    assert found["device"] == "cuda:1"
    reasons = {e["reason"] for k in found["kernels"] for e in k["why_not"] if e["impl"].startswith("cuda ")}
    least = {reason.partition(" (")[0] for reason in reasons}
    assert least == {f"needs compute capability {sm}, this GPU has 7.5" for sm in ("8.0", "9.0")}


@pytest.mark.parametrize(
    ("major", "installed", "why", "words"),
    [
        (9, False, None, ("Begin with fp8-current, whose codes", "Missing: cuda-core, without which", '"lpq[cuda]"')),
        (
            9,
            True,
            "NVRTC is too old",
            ("Begin with fp8-current,", 'Missing: NVRTC is too old: pip install "lpq[cuda]".'),
        ),
        (9, True, None, ("Begin with fp8-current,", "Nothing is missing.")),
        (10, True, None, ("Begin with fp8-current, then mxfp8 or nvfp4, whose codes",)),
        (8, True, None, ("none saves time: a GPU of compute capability 8.0 multiplies no such codes",)),
    ],
)
def test_the_advice_is_for_the_gpu(
    major: int, installed: bool, why: str | None, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(first_advice.cuda, "why_not", lambda device: why)
    told = first_advice.advice(torch.device("cuda:0"), has_cuda_core=installed)
    for part in words:
        assert part in told


def test_gpus_that_torch_counts_and_cannot_use_are_a_finding(machine: Machine, lpq: Callable) -> None:
    machine.fault = RuntimeError("The NVIDIA driver on your system is too old")
    found = doctor(lpq, status=1)
    assert found["device"] == "cpu"
    assert [d["broken"] for d in found["devices"]] == [False, True, True]
    assert "torch cannot use it: RuntimeError: The NVIDIA driver" in found["devices"][1]["detail"]
    assert "PyTorch counts 2 GPUs and cannot use them" in found["advice"]
    assert "driver on your system is too old" in lpq("doctor").out
    ended = lpq("explain", "mxfp8", "--device", "cuda")
    assert (ended.status, ended.out) == (1, "")
    assert "--device cuda: torch cannot use CUDA here: RuntimeError: The NVIDIA driver" in ended.err


def test_launches_that_are_made_from_python_are_told(
    machine: Machine, lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lack in (None, "there is no C compiler"):
        monkeypatch.setattr("lpq.kernels.native.lacking", lambda lack=lack: lack)
        said = " ".join(lpq("doctor", "--device", "cuda:0").out.split())
        assert ("as long as from C: there is no C compiler." in said) == (lack is not None)
        assert "launched from Python" not in " ".join(lpq("doctor", "--device", "cpu").out.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_is_refused(lpq: Callable) -> None:
    for name in ("cuda", "cuda:3"):
        ended = lpq("doctor", "--device", name)
        assert (ended.status, ended.out) == (1, "")
        assert f"--device {name}: torch sees 0 CUDA devices; use cpu or auto" in ended.err


def test_two_formats_from_one_read_and_their_products_are_listed(machine: Machine, lpq: Callable) -> None:
    pairs = json.loads(lpq("doctor", "--json", "--device", "cuda:0").out)["pairs"]
    four = ("fp8", "mxfp4", "mxfp8", "nvfp4")
    quantized = {tuple(p["operands"]): p for p in pairs if p["op"] == "quantize"}
    assert set(quantized) == {(a, b) for a in four for b in four if a != b}
    for pair in quantized.values():
        assert [k["impl"] for k in pair["why_not"]] == ["cuda lpq.operations.fused_pair:quantize"]
        assert "pip install" in pair["why_not"][0]["reason"]
    products = {tuple(p["operands"]): p for p in pairs if p["op"] == "gemm"}
    assert set(products) >= {("fp8", "mxfp8"), ("fp8", "nvfp4"), ("mxfp8", "nvfp4")}
    assert {p["impl"] for p in products.values()} == {"lpq.emulation.bf16_gemm:gemm"}
    assert all("lpq.emulation.bf16_gemm:gemm_with_alpha" in str(p["why_not"]) for p in products.values())


def test_quantizers_that_are_named_are_listed_alone(lpq: Callable) -> None:
    found = doctor(lpq, "fp8(scaling=block)", "hybrid(row=mxfp8, col=nvfp4(rht=true))", "--device", "cpu")
    assert found["pairs"] == []
    operands = [text for kernel in found["kernels"] for text in kernel["operands"]]
    assert set(operands) == {"fp8(scaling=block)", "mxfp8", "nvfp4(rht=true)"}
    assert {k["op"] for k in found["kernels"]} >= {"measure", "quantize", "decode", "gemm", "tile"}
    ended = lpq("doctor", "fp8(scaling=blok)", "--device", "cpu")
    assert (ended.status, ended.out, "'scaling' must be 'current' or" in ended.err) == (2, "", True)
    assert ["Not listed" in lpq("doctor", *names, "--all").out for names in (["mxfp8"], [])] == [False, True]


def test_the_folder_of_compiled_kernels_is_told_where_it_was_chosen(
    lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LPQ_CACHE_DIR", "/somewhere/else")
    assert doctor(lpq, "--device", "cpu")["environment"]["LPQ_CACHE_DIR"] == "/somewhere/else"
