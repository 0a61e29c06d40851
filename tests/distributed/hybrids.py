"""Hybrids of two formats. The conformance kit has every pair."""

from __future__ import annotations

MIXED = [
    "fp8", "fp8(scaling=delayed, history=4)", "fp8(scaling=row)", "fp8(scaling=block)", "mxfp8", "nvfp4",
    "nvfp4(block=16x16)", "identity(dtype=bfloat16)", "mxfp4",
]  # fmt: skip
FEW = [f"hybrid(row={a}, col={b})" for a, b in zip(MIXED, MIXED[1:] + MIXED[:1], strict=True)]
"""Each on both sides, beside two others."""
