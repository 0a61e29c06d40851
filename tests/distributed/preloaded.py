"""The warm-up of the process that ranks and commands are forked from: each of them would have to do the same.

This file is imported after the modules of ``pool.IMPORTED``, and starts no thread that goes on.
"""

from __future__ import annotations

import atexit
import gc
import os
from contextlib import suppress

import gloo_threads  # noqa: F401  (groups that are made later have one thread)
import torch
from seeding import seed_the_cpu_alone
from torch._dynamo.utils import counters
from torch._inductor.exc import InductorError
from tqdm import tqdm

SELDOM = 20_000
"""New objects after which garbage is searched for, as in the process that runs the tests: after 700, as is usual, the
searches take a twentieth of a rank's time."""


def compile_once() -> None:
    """Compile a layer: the first time in a process takes a second, mostly for modules and tables of the compiler."""
    tqdm.monitor_interval = 0  # or its thread waits for the next bar
    layer = torch.compile(torch.nn.Linear(8, 8))
    layer(torch.ones(2, 8)).sum().backward()
    torch.compiler.reset()
    counters.clear()


if hasattr(os, "SCHED_BATCH"):
    # A thread that wakes up takes no processor from another one. Else gloo's thread that reads takes it from one that
    # wrote and still holds a lock, for which it asks again and again, ten million times in half a minute of tests.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
seed_the_cpu_alone()
gc.set_threshold(SELDOM)
# Before anything is compiled: in a first backward after that, torch for CUDA starts threads, without a GPU, too, and
# refuses backward in all processes that are forked then.
torch.ones((), requires_grad=True).backward()
with suppress(InductorError):  # as without a compiler of C++: the tests that compile tell of it
    compile_once()
gc.collect()
gc.freeze()
gc.enable()
atexit.register(gc.unfreeze)  # libraries count what is left of theirs
