"""The table of operations that a kernel may implement.

A row is data, as specs are. The Protocols that it names are in ``lpq.operations.kernel_protocols``. How the
conformance kit compares kernels of each operation with the reference is in ``lpq.testing.kernel_checks``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation on matrices or operands."""

    name: str
    """The value of ``KernelSpec.op``."""
    meaning: str
    """The result or the task of its kernels, and what runs without one if there is no reference."""
    explained: bool = True
    """Whether ``lpq doctor`` tells the meaning: the name does not."""
    impl: str
    """The Protocol of ``KernelSpec.impl``."""
    bind: str | None = None
    """The Protocol of ``KernelSpec.bind``; None: a kernel has none."""
    several: str | None = None
    """The Protocol of ``KernelSpec.several``; None: a kernel has none."""
    formats: tuple[int, ...] = (1,)
    """The numbers of formats that ``KernelSpec.formats`` may name; a format's own kernels name the first number."""
    rounds: bool = False
    """Whether a kernel may round the matrix that it reads: ``KernelSpec.rounds``."""
    reference: bool = True
    """Whether there is a reference, which runs where no kernel does."""
    needs: str | None = None
    """The attribute of a quantizer that tells whether its operands have this operation; None: all have it."""

    def is_of(self, quantizer: object) -> bool:
        """Whether operands of a quantizer have this operation, by a kernel or by the reference."""
        return self.needs is None or bool(getattr(quantizer, self.needs))


TABLE = {
    row.name: row
    for row in (
        Operation(
            name="measure", meaning="the statistics that the operands of a matrix need",
            explained=False, impl="Measure", formats=(1, 2), rounds=True, needs="stats",
        ),
        Operation(
            name="quantize", meaning="the operands of a matrix, and its statistics where they are asked for",
            explained=False, impl="Quantize", bind="BindQuantize", several="BindSeveral", formats=(1, 2), rounds=True,
        ),
        Operation(name="decode", meaning="the matrix that an operand stands for", explained=False, impl="Decode"),
        Operation(
            name="transpose", meaning="the operand of the transposed matrix",
            explained=False, impl="Transpose", bind="BindTranspose", several="BindTransposes", needs="transposable",
        ),
        Operation(
            name="gemm", meaning="the product of two operands",
            explained=False, impl="MakeGemm", bind="BindGemm", formats=(2,),
        ),
        Operation(
            name="exact",
            meaning="an operand in bf16, to multiply it with one of any format; without it both are decoded",
            impl="MakeExact", bind="BindExact", reference=False,
        ),
        Operation(
            name="tile",
            meaning="an operand tile by tile, beside one of any format; without it they are written in turn",
            impl="Tile", reference=False,
        ),
        Operation(
            name="exact_tile",
            meaning="such a tile in bf16, to be multiplied at once; without it, it is encoded and decoded",
            impl="Tile", reference=False,
        ),
        Operation(
            name="reader",
            meaning="how an operand's codes are read, to make the column operand of them; without it they are decoded",
            impl="ReadCodes", reference=False,
        ),
        Operation(
            name="stored_tile",
            meaning="a tile of a row operand in Triton, of AdamW's state; else it is decoded",
            impl="MakeStoredTile", reference=False,
        ),
        Operation(
            name="tile_program",
            meaning="a tile of what a source computes, in Triton; else written first",
            impl="MakeTileProgram", reference=False,
        ),
        Operation(
            name="remember", meaning="the statistics of a step, joined to the statistics of past steps",
            impl="Remember", bind="BindRemember", needs="moves",
        ),
        Operation(
            name="grouped_gemm",
            meaning="rows in groups, as of experts; without it decoded operands are multiplied in bf16",
            impl="GroupedGemm", bind="BindGroupedGemm", reference=False,
        ),
    )
}  # fmt: skip
"""The operations, by their names."""
