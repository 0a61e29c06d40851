"""The time that a step takes longer when it is watched, beside the time of a step.

python -m benchmarks.watching              Hugging Face's Llama of a billion weights, on one GPU
python -m benchmarks.watching --layers 2   of fewer blocks

A watched step stands amidst others, as in a run: the host gets ahead of the GPU in them, and waits for it at the end
alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import lpq

RECIPES = ("fp8-current", "mxfp8", "nvfp4")
AROUND, ROUNDS = 4, 5
"""Steps before a watched one and behind it, and how often each is timed."""


def measured(recipe: str, layers: int, hidden: int, tokens: int, device: torch.device) -> tuple[float, float]:
    """The seconds of a step, and the seconds more of a watched one; medians."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 256, 1), vocab_size=32000,
    )  # fmt: skip
    with device:
        model = lpq.convert(LlamaForCausalLM(config).bfloat16(), recipe)
        ids = torch.randint(0, config.vocab_size, (4, tokens // 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    watch = lpq.observe.numerics(model, every=1)

    def plain() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def watched() -> None:
        with watch.step():
            plain()

    def amidst(step: Callable[[], None]) -> float:
        _wait(device)
        start = time.perf_counter()
        for each in (*[plain] * AROUND, step, *[plain] * AROUND):
            each()
        _wait(device)
        return time.perf_counter() - start

    for _ in range(3):  # kernels are compiled, and graphs recorded
        watched()
    amidst(plain)
    alone = statistics.median(amidst(plain) for _ in range(ROUNDS))
    return alone / (2 * AROUND + 1), statistics.median(amidst(watched) for _ in range(ROUNDS)) - alone


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192)
    sizes = vars(parser.parse_args())
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{torch.cuda.get_device_name() if where.type == 'cuda' else 'CPU'}, torch {torch.__version__}, {sizes}")
    print("| recipe | ms a step | ms more of a watched one | % of a run that watches each 100th |")
    print("|---|---:|---:|---:|")
    for name in RECIPES:
        step, more = measured(name, device=where, **sizes)
        print(f"| {name} | {1e3 * step:.0f} | {1e3 * more:.0f} | {more / step:.2f} |", flush=True)
