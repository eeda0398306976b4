"""The stage of the MGLU study that times products of one row of x. It is declared exclusive.

Timings are seconds per call with the repeat's number as item; contenders take turns within a repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gnomon.lab import StageContext

if TYPE_CHECKING:
    from torch import Tensor

SIGMA = 0.02
"""Of the Gaussian matrices that are timed."""
CHECKED = 256
"""Rows that are compared with float64 sums."""
EXACT, ROUNDED = 5e-3, 3e-2
"""Relative errors: of sums in float32 that are rounded once, and of torch's, which round every step to bfloat16."""
MATCHED, TORCH, READING = "GLU, same kernel", "GLU, torch", "reading"


def flash(n: int) -> str:
    """Name of the kernel with n masks."""
    return f"FlashMGLU, {_counted(n)}"


def naive(n: int) -> str:
    """Name of the plain form with n masks."""
    return f"naive, {_counted(n)}"


def bound(n: int) -> str:
    """Name of what reading the bytes takes."""
    return f"byte bound, {_counted(n)}"


def _counted(n: int) -> str:
    return f"{n} mask{'s' if n > 1 else ''}"


def products(
    ctx: StageContext,
    *,
    rows: int,
    columns: int,
    masks: Sequence[int],
    threads: int,
    repeats: int,
    copies: int,
    seed: int,
) -> dict[str, Any]:
    """One row of x through the kernel at each number of masks, through both GLUs, and in the naive form.

    Kernels and GLUs pass through as many copies of their operands as make four times the last-level cache. A naive
    call reads and writes so much more that it is made once a repeat, always after others have passed through theirs.

    Args:
        copies: 0 takes as many as that, 1 and more exactly so many.
        seed: repeats of seed 0 choose the best cell, those of seed 1 judge it.
    """
    import statistics

    import torch

    from gnomon.core.models import as_device
    from gnomon.core.timing import Contender, copies_for, interleaved, threads_set
    from gnomon.kernels import memory
    from gnomon.kernels.mglu import choice, flash_mglu, glu, reference
    from gnomon.kernels.mglu.planes import by_rows, unpack

    where = as_device(None)
    g = torch.Generator().manual_seed(rows + columns)
    w, v = ((SIGMA * torch.randn(rows, columns, generator=g)).bfloat16().to(where) for _ in range(2))
    x = torch.randn(1, columns, generator=torch.Generator().manual_seed(seed)).bfloat16().to(where)
    width = -(-columns // 8)
    bits = torch.randint(0, 256, (max(masks), rows, width), generator=g, dtype=torch.uint8).to(where)
    planes = {n: by_rows(bits[:n]) if where.type == "cpu" else bits[:n].contiguous() for n in masks}
    dense = unpack(bits, columns).bfloat16()
    check(x, w, v, planes, dense)
    fewest = w.nbytes + planes[min(masks)].nbytes
    count = copies or copies_for(fewest)
    weights, values = ([t, *(t.clone() for _ in range(count - 1))] for t in (w, v))
    stored = {n: [t, *(t.clone() for _ in range(count - 1))] for n, t in planes.items()}

    def contender(name: str, calls: Sequence[Any]) -> Contender:
        """On a GPU calls only begin, so the last one waits for all of them."""
        if where.type != "cuda":
            return Contender(name=name, calls=calls)

        def last() -> None:
            calls[-1]()
            torch.cuda.synchronize()

        return Contender(name=name, calls=[*calls[:-1], last])

    pairs = list(zip(weights, values, strict=True))
    contenders = [
        contender(MATCHED, [partial(glu, x, *pair) for pair in pairs]),
        contender(TORCH, [partial(torch_glu, x, *pair) for pair in pairs]),
    ]
    if where.type == "cpu":
        contenders.append(contender(READING, [partial(memory.read, one) for one in weights]))
    for n in masks:  # a naive call stands between kernels, so that what it reads was pushed out of the cache
        calls = [partial(flash_mglu, x, a, b, n) for a, b in zip(weights, stored[n], strict=True)]
        contenders.append(contender(flash(n), calls))
        contenders.append(contender(naive(n), [partial(reference.naive, x, w, dense[:n], "silu")]))
    with threads_set(threads), torch.inference_mode():
        times = interleaved(contenders, repeats=repeats)
    tags: dict[str, Any] = {"shape": f"{rows} x {columns}", "threads": threads}
    if READING in times:
        # The bandwidth of a repeat is the best of plain reading and of the two GLUs.
        turns = zip(times[READING], times[MATCHED], times[TORCH], strict=True)
        bandwidths = [w.nbytes / min(one, a / 2, b / 2) for one, a, b in turns]
        for n in masks:
            size = w.nbytes + planes[n].nbytes
            times[bound(n)] = [size / bandwidth for bandwidth in bandwidths]
    by_name = {name(n): n for n in masks for name in (flash, naive, bound)}
    for name, seconds in times.items():
        for repeat, value in enumerate(seconds):
            ctx.record(
                method=name,
                metric="time",
                value=value,
                unit="s",
                better="lower",
                item=repeat,
                tags={**tags, "masks": by_name.get(name, 0)},
            )
    for n in masks:
        for rival in (TORCH, MATCHED, naive(n)):
            gains = [slow / fast for slow, fast in zip(times[rival], times[flash(n)], strict=True)]
            allowed = {} if rival == naive(n) else {"bytes allow": 32 / (16 + n)}
            ctx.record(
                method=flash(n),
                metric=f"times as fast as {'naive' if rival == naive(n) else rival}",
                value=statistics.median(gains),
                better="higher",
                tags={**tags, "masks": n, **allowed},
            )
    kernel = choice(where.type).name
    return {"copies": count, "bytes": w.nbytes, "kernel": kernel, "repeats": repeats}


def torch_glu(x: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    """Two of torch's products, then the activation."""
    from torch.nn import functional as F

    return F.silu(F.linear(x, gate)) * F.linear(x, value)


def check(x: Tensor, w: Tensor, v: Tensor, planes: dict[int, Tensor], dense: Tensor) -> None:
    """Every contender against float64 sums, on some rows of the matrix.

    Raises:
        AssertionError: one is wrong; nothing is to be timed then.
    """
    from gnomon.kernels.mglu import flash_mglu, glu, reference

    wide, top_w, top_v = x.double(), w[:CHECKED], v[:CHECKED]
    exact_glu = reference.glu(wide, top_w.double(), top_v.double(), "silu")
    _close(glu(x, w, v)[:, :CHECKED], exact_glu, EXACT, MATCHED)
    _close(torch_glu(x, top_w, top_v), exact_glu, ROUNDED, TORCH)
    for n, bits in planes.items():
        part = bits[:, :CHECKED].contiguous()
        exact = reference.mglu(wide, top_w.double(), part, "silu")
        _close(flash_mglu(x, w, bits, n)[:, :CHECKED], exact, EXACT, flash(n))
        _close(reference.naive(x, top_w, dense[:n, :CHECKED], "silu"), exact, ROUNDED, naive(n))


def _close(found: Tensor, exact: Tensor, limit: float, name: str) -> None:
    error = float((found.double() - exact).norm() / exact.norm())
    if not error < limit:
        raise AssertionError(f"{name} is off by {error:.1e} of the sum in float64; nothing was timed.")
