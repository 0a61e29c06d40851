"""The command itself: help, errors in words, and how it is called."""

from __future__ import annotations

import io
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from lpq.__main__ import COMMANDS, NAMES, load, main


def test_help_lists_every_command(lpq: Callable) -> None:
    ended = lpq("--help")
    assert ended.status == 0
    for name, (_, line) in COMMANDS.items():
        assert name in ended.out
        assert line in ended.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_that_speaks_of_every_option(command: str, lpq: Callable) -> None:
    ended = lpq(command, "--help")
    assert ended.status == 0
    parameters = load(command).params
    assert parameters
    for parameter in parameters:
        assert parameter.help, f"lpq {command}: {parameter.name} has no help"
        assert max(parameter.opts, key=len).lower() in ended.out.lower()


def test_version(lpq: Callable) -> None:
    assert lpq("--version").out.strip() == f"lpq {metadata.version('lpq')}"


NOWHERE = "there is no recipe, policy or format"
WRONG: list[tuple[tuple[str, ...], int, tuple[str, ...]]] = [
    (("explain", "mxfp9"), 2, (NOWHERE, "mxfp9", "mxfp8")),
    (("explain", "nvfp4(blok=16x16)"), 2, ("nvfp4 has no option 'blok': did you mean 'block'?",)),
    (("explain", "nvfp4(block="), 2, ("nvfp4(block=", "^")),
    (("explain", "fprop=mxfp8"), 2, ("nothing is said of dgrad and wgrad",)),
    (("explain", "nowhere.toml"), 1, ("nowhere.toml cannot be read",)),
    (("explain", "foo=1"), 2, ("unknown key 'foo'",)),
    (("explain", "wgard=mxfp8, fprop=bf16"), 2, ("unknown key 'wgard': did you mean 'wgrad'",)),
    (("explain", "*=mxfp8"), 2, ()),
    (("explain", "x" * 300), 2, (NOWHERE,)),
    (("explain", "hybrid(row=" * 3000), 2, ("a recipe or a quantizer has at most",)),
    (("explain", "fprop=mxfp9, dgrad=nvfp4, wgrad=bf16"), 2, (f"fprop: {NOWHERE} 'mxfp9'", "mxfp8")),
    (("memory", "tiny", "--recipe", "mxfp9"), 2, (f"lpq: {NOWHERE} 'mxfp9' here: did you mean",)),
    (("memory", "tiny", "--recipe", "nvfp4(blok=16x16)"), 2, ("lpq: nvfp4 has no option 'blok': did you mean",)),
    (("memory", "tiny", "--recipe", "fprop=mxfp9, dgrad=nvfp4, wgrad=bf16"), 2, (f"lpq: fprop: {NOWHERE} 'mxfp9'",)),
    (("memory", "tiny", "--recipe", "fprop=mxfp8"), 2, ("lpq: nothing is said of dgrad and wgrad",)),
    (("memory", "tiny", "--recipe", "nowhere.toml"), 1, ("lpq: nowhere.toml cannot be read",)),
    (("memory", "llama-3-7b"), 2, ("there is no shape 'llama-3-7b': did you mean 'llama-3-70b' or 'llama-3-8b'?",
                                   "lpq.observe.memory counts your model")),
    (("train", "--recipe", "mxfp9", "--steps", "1"), 2, ("mxfp9", "mxfp8")),
    (("train", "--weights", "quantised", "--steps", "1"), 2, ("weights = 'quantised'", "did you mean 'quantized'?")),
    (("train", "--device", "banana", "--steps", "1"), 2, ("banana", "cpu")),
    (("explain", "nvfp4-pretrain"), 2,
     ("nvfp4-pretrain is a policy and not a recipe: it is for `lpq train --policy nvfp4-pretrain`",)),
    (("calibrate", "a", "b", "--percentile", "10"), 2, ("--percentile", "50")),
    (("bench", "--shape", "1,2"), 2, ("--shape 1,2: it is not M,K,N, such as 8192,4096,14336",)),
    (("bench", "--shape", "0,2,2"), 2, ("it is not M,K,N",)),
    (("bench", "--shape", "1,2,3", "--model", "tiny"), 2, ("--shape and --model: give one of them",)),
    (("bench", "--model", "lama"), 2, ("--model: 'lama' is no shape",)),
    (("bench", "--model", "math:pi"), 2, ("--model: math:pi is of type float, and no function that makes the model",)),
    (("bench", "--recipe", "nvfp5"), 2, ("nvfp5",)),
    (("bench", "--recipe", "nvfp4-pretrain"), 2, ("is a policy and not a recipe",)),
    (("advise", "tiny", "--gpu", "h1000"), 2, ("--gpu h1000: did you mean 'h100'",)),
    (("advise", "tini", "--gpu", "h100"), 2, ("MODEL: 'tini' is no shape",)),
    (("advise", "torch.nn:Identity", "--gpu", "h100"), 1, ("reaches no linear layer",)),
    (("advise", "tiny", "--gpu", "h100", "--recipe", "nvfp4-pretrain"), 2, ("is a policy and not a recipe",)),
    (("memory", "tiny", "--recipe", "nvfp4-pretrain"), 2,
     ("nvfp4-pretrain is a policy and not a recipe: give the recipe of one of its rules",)),
    (("train", "--recipe", "nvfp4-pretrain"), 2,
     ("nvfp4-pretrain is a policy and not a recipe: give it as --policy nvfp4-pretrain",)),
    (("train", "--policy", "nope"), 2, (f"{NOWHERE} 'nope' here",)),
    (("explain", "fprop=mxfp8,", "dgrad=nvfp4,", "wgrad=bf16"), 2,
     ("(dgrad=nvfp4, wgrad=bf16). A recipe with commas is one argument: put it between quotes. See lpq explain",)),
    (("train", "--recipe", "fprop=mxfp8,", "dgrad=nvfp4,", "wgrad=bf16"), 2, ("put it between quotes",)),
    (("train", "nvfp4"), 2, ("(nvfp4). A recipe is given as --recipe NAME. See lpq train --help",)),
    (("recipes", "nvfp4"), 2, ("argument(s) (nvfp4). See lpq recipes --help",)),
    (("train", "--lr", "0"), 2, ("lr = 0",)),
    (("train", "--seq", "1"), 2, ("seq = 1", "at least 2")),
    (("train", "--steps", "0"), 2, ("steps = 0", "at least 1")),
    (("check", "mxfp9"), 2, ("did you mean 'mxfp8'",)),
    (("check", "mxfp8", "nvfp5"), 2, ("did you mean 'nvfp4'",)),
    (("check", "nvfp4(block=16x16"), 2, ("expected ',' or ')'",)),
    (("check", "mxfp8(foo=1)"), 2, ("mxfp8 has no option 'foo'",)),
    (("check", "x" * 300), 2, ("there is no format",)),
    (("doctor", "x" * 300), 2, ("there is no format",)),
    *(
        ((*command, "--device", device), 1 + (device in ("meta", "gpu")), (f"--device {device}: {words}",))
        for command in (("doctor",), ("explain", "nvfp4"))
        for device, words in (
            ("meta", "it holds no numbers, so that nothing runs there"), ("vulkan", "torch cannot use it here: "),
            ("cuda:99", "torch sees "), ("gpu", "no such device"),
        )
    ),
    (("new-plugin", "x" * 300), 2, ("cannot be the name of a format: use lower-case letters",)),
    *(
        (("new-plugin", name), 2, (words,))
        for name, words in {
            "2bit": "use lower-case letters, digits and _, a letter first",
            "my-format": "use lower-case letters, digits and _, a letter first",
            "Int8": "use lower-case letters, digits and _, a letter first",
            "lpq_int8": "lpq_: lpq new-plugin int8 makes lpq-int8",
            "lpq-int8": "lpq-: lpq new-plugin int8 makes lpq-int8",
            "lpq_2": "lpq_: lpq new-plugin NAME makes lpq-NAME",
            "none": "in a quantizer string it means None",
            "skip": "'skip' cannot be a name: in a rule of a policy it leaves layers alone",
            "mxfp8": "'mxfp8' is taken by plugin mxfp8 (lpq ",
            "bf16": "'bf16' is taken by plugin bf16 (lpq ",
        }.items()
    ),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "status", "words"), WRONG)
def test_an_error_is_words(
    arguments: tuple[str, ...], status: int, words: tuple[str, ...], lpq: Callable, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Said once, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    ended = lpq(*arguments)
    assert (ended.status, ended.out) == (status, ""), ended.err
    assert ended.err.startswith("lpq: ")
    assert len(ended.err) < 2500
    for word in words:
        assert word in ended.err
        assert len(word) < 20 or ended.err.count(word) == 1
    assert not list(tmp_path.iterdir())


def test_a_plugin_whose_recipe_names_nothing_is_not_the_users_mistake(lpq: Callable, install: Callable) -> None:
    install(
        "broken",
        "1.0",
        """
        from lpq.registry import RecipeSpec, hookimpl

        @hookimpl
        def lpq_register_recipes():
            return [RecipeSpec(name="broken", recipe="fprop=mxfp9, dgrad=mxfp8, wgrad=mxfp8", summary="Nothing.")]
        """,
    )
    for command in (("explain", "broken"), ("memory", "tiny", "--recipe", "broken")):
        ended = lpq(*command)
        assert ended.status == 1
        assert "recipe broken of plugin broken (lpq-broken 1.0) cannot be built: fprop: there is no recipe" in ended.err


def test_a_recipe_that_the_allowed_kernels_cannot_run_is_status_1(
    lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lpq("explain", "fp8-current", "--device", "cpu").status == 0
    monkeypatch.setenv("LPQ_KERNELS", "cuda")
    for options in ((), ("--json",)):
        ended = lpq("explain", "fp8-current", "--device", "cpu", *options)
        assert ended.status == 1
        assert "LPQ_KERNELS=cuda leaves no kernel for gemm of fp8 and fp8 on cpu" in ended.out


@pytest.mark.parametrize("command", [("doctor",), ("doctor", "--json"), ("explain", "mxfp8")])
def test_a_misspelt_backend_is_told_once(
    command: tuple[str, ...], lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LPQ_KERNELS", "tritn")
    ended = lpq(*command)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == "lpq: LPQ_KERNELS=tritn: unknown tritn; choose from reference, torch, triton, cuda\n"


@pytest.mark.parametrize("arguments", [("no-such-command",), ("formats", "--no-such-option"), ("explain",), ("--no",)])
def test_wrong_usage_is_status_2(arguments: tuple[str, ...], lpq: Callable) -> None:
    ended = lpq(*arguments)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("lpq: ")
    assert ended.err.count("\n") == 1
    assert "--help" in ended.err


def test_alone_it_prints_its_help(lpq: Callable) -> None:
    ended = lpq()
    assert (ended.status, ended.err) == (2, "")
    assert "Usage: lpq" in ended.out


def test_a_command_that_is_not_there_is_told_beside_the_one_that_was_meant(lpq: Callable) -> None:
    ended = lpq("explai")
    assert ended.status == 2
    assert "there is no command 'explai': did you mean 'explain'?" in " ".join(ended.err.split())


@pytest.mark.parametrize(("typed", "offered"), [("lpq ad", "advise"), ("lpquant formats --j", "--json")])
def test_a_shell_completes_commands_and_options(
    typed: str, offered: str, lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = typed.split()[0]
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{name}"])
    monkeypatch.setenv(f"_{name.upper()}_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert lpq().out.split() == [offered]


def test_the_installed_scripts_are_this_command_and_print_no_traceback() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == dict.fromkeys(NAMES, "lpq.__main__:main")
    done = subprocess.run([sys.executable, "-m", "lpq", "new-plugin", "Not-A-Name"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("lpq: ")
    assert "Traceback" not in done.stderr


def test_a_terminal_that_lacks_a_character_shows_another(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(SystemExit, match="0"):
        main(["explain", "nvfp4"])
    terminal.flush()
    assert b"?" in terminal.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [["formats"], ["--help"]], ids=" ".join)
def test_output_that_finds_no_space_is_told_in_words(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "lpq", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 1
    assert ended.stderr == "lpq: No space left on device: what was being written is not complete\n"
