"""The matrices that NF12 is timed on, in all forms, and the checks that come before any timing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from common import Copies, Report
from torch import Tensor

from gnomon.core.timing import threads_set
from gnomon.kernels import bf16
from gnomon.kernels.huffman import cpu as huffman
from gnomon.kernels.huffman.reference import Coded
from gnomon.methods.compress.nf12 import NF12Tensor, encode, linear
from gnomon.studies.nf12_timing import copy_of, matrix


@dataclass(frozen=True)
class Shape:
    """Of a weight: rows, columns, and the share of exact zeros in it."""

    rows: int
    columns: int
    zeros: float

    @classmethod
    def of(cls, text: str) -> Shape:
        """From 49152x576 or 49152x576:0.01.

        Raises:
            ValueError: it is neither.
        """
        size, _, zeros = text.partition(":")
        rows, columns = (int(part) for part in size.split("x"))
        shape = cls(rows, columns, float(zeros or 0))
        if min(rows, columns) < 1 or not 0 <= shape.zeros < 1:
            raise ValueError(f"{text!r} has to be ROWSxCOLUMNS, or ROWSxCOLUMNS:SHARE_OF_ZEROS")
        return shape

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}" + (f" ({self.zeros:.0%} zeros)" if self.zeros else "")


@dataclass(frozen=True)
class Operands:
    """A matrix in all forms, in as many separate copies as a timing cycles through."""

    shape: Shape
    plain: list[Tensor]
    coded: list[NF12Tensor]
    huffman: list[Coded]

    @classmethod
    def of(cls, shape: Shape, report: Report, *, copies: int | None) -> Operands:
        """Draw and encode once, copy often enough."""
        w = matrix(shape.rows, shape.columns, shape.zeros)
        t, h = encode(w), huffman.encode(w)
        if copies is None:
            decided = Copies.of(
                min(t.nbytes, h.nbytes), t.nbytes + h.nbytes + 4 * w.nbytes
            )  # + FP32 and a result
            report.note(f"{shape}: {decided.told()}")
            copies = decided.count
        return cls(
            shape,
            [w, *(w.clone() for _ in range(copies - 1))],
            [t, *(copy_of(t) for _ in range(copies - 1))],
            [h, *(_copy_of_code(h) for _ in range(copies - 1))],
        )


def _copy_of_code(coded: Coded) -> Coded:
    """The same code elsewhere in memory."""
    parts = {name: getattr(coded, name).clone() for name in ("sm", "lengths", "starts", "stream")}
    return dataclasses.replace(coded, **parts)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit."""
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


def check(report: Report, of: Operands, threads: Sequence[int]) -> None:
    """Decoding against the original bits, products against the matched kernel and float64 sums."""
    w, t, n, k = of.plain[0], of.coded[0], of.shape.rows, of.shape.columns
    share = t.exceptions / t.ex.numel()
    report.check(
        f"{of.shape}: NF12 decodes to the same bits",
        same(t.decode(), w),
        f"{t.bits_per_weight:.3f} bits a weight, {share:.2%} of groups are exceptions",
    )
    report.check(
        f"{of.shape}: so does Huffman",
        same(huffman.decode(of.huffman[0]), w),
        f"{8 * of.huffman[0].nbytes / w.numel():.3f} bits a weight",
    )
    for dtype, bound in ((torch.bfloat16, 5e-3), (torch.float32, 1e-6)):
        x = torch.randn(4, k, generator=torch.Generator().manual_seed(1)).to(dtype)
        exact = torch.cat([x.double() @ w[i : i + 1024].double().T for i in range(0, n, 1024)], dim=1)
        outputs = []
        for number in threads:
            with threads_set(number):
                outputs += [linear(x, t, mode="fused"), linear(x[:1], t, mode="fused"), bf16.linear(x, w)]
        alike = all(same(y, outputs[2][: len(y)]) for y in outputs)
        name = str(dtype).removeprefix("torch.")
        report.check(
            f"{of.shape}, {name}: fused = matched kernel, bit for bit, with {list(threads)} threads", alike
        )
        error = float((outputs[0] - exact).norm() / exact.norm())
        report.check(f"{of.shape}, {name}: error under {bound:g}", error < bound, f"{error:.1e}")
