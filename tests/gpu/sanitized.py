"""Every CUDA kernel under compute-sanitizer, on small matrices of odd shapes: accesses out of bounds (memcheck), races
in shared memory (racecheck), barriers (synccheck), and reads of what nobody wrote (initcheck).

Each check is a process, of one tool. It needs a GPU, lpq[cuda], and compute-sanitizer of the CUDA toolkit. A check
whose tests were skipped has shown nothing, and counts as failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "synccheck")
JOBS = 6
"""More take longer: a GPU is one process's at a time."""
KERNELS = "tests/gpu/test_few_matrices.py::test_each_kernel_equals_the_reference"
LARGE = "tests/gpu/test_kernels.py::test_small_matrices_in_the_way_of_large_ones"
EXACT = "tests/gpu/test_multiplicands.py::test_they_are_the_exact_forms_of_encoded_operands"
FACTOR = "tests/gpu/test_gemms.py::test_what_cannot_be_represented_in_bf16_before_its_factor_can_be_after"
SEVERAL = "tests/gpu/test_several.py"
PRODUCTS = "tests/gpu/test_gemms.py::test_products"
GROUPS = "tests/gpu/test_grouped_products.py"
BYTES = "tests/gpu/test_reference_on_gpu.py::test_bytes_are_those_of_the_cpu"


class Check(NamedTuple):
    tool: str
    what: str
    tests: list[str]

    def __str__(self) -> str:
        return f"{self.tool} {self.what}"


def checks() -> Iterator[Check]:
    for what in (
        "rht",
        "nvfp4 and not rht",
        "fp8 and block",
        "fp8 and not block and not nvfp4 and not mx",
        "mxfp8",
        "mxfp4 and not rht",
    ):
        yield from (Check(tool, what, [KERNELS, "-k", what]) for tool in TOOLS)
    for what in ("rht", "nvfp4 and not rht", "fp8 and block", "fp8 and not block and not nvfp4"):
        tests = [LARGE, "-k", f"cuda and {what}"]
        yield from (Check(tool, f"broad tiles, {what}", tests) for tool in TOOLS)
    for tool in TOOLS:
        yield Check(tool, "exact forms", [EXACT, "-k", "bfloat16"])
        yield Check(tool, "several matrices", [SEVERAL])
        if tool != "racecheck":  # it reports cuBLAS's kernels, of split contractions
            yield Check(tool, "products with a factor", [FACTOR])
    yield Check("memcheck", "products of blocks", [PRODUCTS, "-k", "block"])
    for tool in ("memcheck", "synccheck"):  # racecheck does not follow the copy engine
        yield Check(tool, "products of groups", [GROUPS, "-k", "hopper"])
    yield Check("initcheck", "what formats encode", [BYTES, "-k", "kernels"])


def run(check: Check, sanitizer: str, ours: list[str], started: float) -> tuple[bool, str]:
    """Whether it found nothing, and what to say."""
    options = ["--tool", check.tool, "--error-exitcode", "1", "--print-limit", "20"]
    environment = {**os.environ, "LPQ_KERNELS": "cuda,torch,reference", "OMP_NUM_THREADS": "1"}
    if check.tool in ("memcheck", "initcheck"):  # every tensor has bounds of its own
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if check.tool == "memcheck":  # cuda-core asks the driver for what some lack: such a call's error is no kernel's
        options += ["--report-api-errors", "no"]
    if check.tool != "initcheck":  # PyTorch's own take the most time, but write what ours read
        options += ours
    command = [sanitizer, *options, sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *check.tests]
    begun = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    took = f"{time.monotonic() - begun:.0f} s, at {time.monotonic() - started:.0f} s"
    passed = re.search(r"^\d+ passed.*", done.stdout, re.M)
    found = "; ".join(re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", done.stdout))
    if done.returncode == 0 and passed:
        return True, f"{check}: {found}; {passed[0]} ({took})"
    shown = [line for line in done.stdout.splitlines() if "Host Frame" not in line][-60:]
    return False, "\n".join([f"{check}: FAILED ({took})", *shown])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="some checks, as 'memcheck nvfp4'")
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help=f"how many at a time ({JOBS})")
    parser.add_argument("--sanitizer", default=SANITIZER, metavar="PROGRAM")
    parser.add_argument("--list", action="store_true", help="name the checks, and do nothing")
    options = parser.parse_args()
    asked = [check for check in checks() if re.search(options.only, str(check))]
    if not asked:
        print(f"no check matches {options.only!r}; --list names them")
        return 2
    if options.list:
        print(*asked, sep="\n")
        return 0
    if not shutil.which(options.sanitizer):
        print(f"there is no {options.sanitizer}: it comes with the CUDA toolkit; --sanitizer names another one")
        return 2
    told = subprocess.run([options.sanitizer, "--help"], text=True, capture_output=True, check=False).stdout
    ours = ["--kernel-regex-exclude", "kns=at6native"] if "--kernel-regex-exclude" in told else []
    started, failed = time.monotonic(), 0
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(run, check, options.sanitizer, ours, started) for check in asked]
        for one in as_completed(running):
            good, words = one.result()
            failed += not good
            print(words, flush=True)
    print(f"{len(asked) - failed} of {len(asked)} checks found nothing, in {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
