"""NF12: what BF16 weights hold, what twelve bits of fixed length cost, and what they gain.

Settings, stages and claims. What each stage measures is in `nf12_stages.py` (weights and format),
`nf12_timing.py` (kernels) and `nf12_serving.py` (a whole model), the figures in `nf12_figures.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gnomon.core.errors import UsageError
from gnomon.lab import Lab, StudyConfig
from gnomon.lab.claims import AllOf, Count, FullScale, Paired, Ratio, Rule, Tolerance, UpTo, Withheld
from gnomon.studies.nf12_figures import bulk_decoding, cache_room, products_grid, sizes, windows
from gnomon.studies.nf12_serving import capacity, generation, qwen3_memory, server
from gnomon.studies.nf12_stages import file_sizes, instructions, patterns, trained, weights
from gnomon.studies.nf12_timing import bulk, products

BASES = tuple(range(1, 240))


@dataclass(frozen=True, kw_only=True)
class NF12Study(StudyConfig):
    """Settings, stages and claims of the study."""

    model: str = "smollm2-135m"
    """Any Transformers decoder: embedded name, `tiny:`, folder or hub id."""
    data: str = "mixed"
    """Text that prompts are cut from."""
    min_elements: int = 1 << 16
    """Smaller matrices stay as they are (the card's default)."""
    small: str = "tiny:llama-0.5m"
    """The model trained here."""
    small_data: str = "stdlib"
    small_steps: int = 150
    small_batch: int = 8
    small_length: int = 128
    small_lr: float = 2e-3
    small_min_elements: int = 1 << 13
    """Its matrices are small ones."""
    bases: tuple[int, ...] = (1, 97, 112, 239)
    """First exponents of the window under which every pattern is decoded."""
    shapes: tuple[str, ...] = ("16384x8192", "49152x576")
    """Matrices that products are timed on; the second is the embedded model's LM head."""
    zeros: tuple[float, ...] = (0.0, 0.01)
    """Share of exact zeros in each of them."""
    cores: tuple[int, ...] = (1, 2)
    """Numbers of threads that are timed."""
    repeats: int = 15
    """Interleaved repeats of a timing."""
    bulk_shape: str = "8192x8192"
    prompt: int = 192
    """Tokens of a request's prompt; with long ones few requests fit a small cache."""
    new: int = 32
    """Tokens that are generated."""
    requests: int = 11
    """Requests that the small servers answer."""
    free_share: float = 4.7 / 65.5
    """Bytes that the BF16 server has for its cache, as a share of its weights' (the paper's proportion)."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the small model's training and of the servers' requests."""

    slug: ClassVar[str] = "nf12"
    sources: ClassVar[tuple[str, ...]] = ("model", "data", "small_data")
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "model": "tiny:llama-0.5m",
            "data": "generated:12",
            "min_elements": 1 << 10,
            "small": "tiny:llama-10k",
            "small_data": "generated:30",
            "small_steps": 4,
            "small_batch": 4,
            "small_length": 64,
            "small_min_elements": 1 << 8,
            "bases": (97, 112),
            "shapes": ("1024x2048", "8192x96"),
            "cores": (1,),
            "repeats": 2,
            "bulk_shape": "256x512",
            "prompt": 8,
            "new": 4,
            "requests": 8,
            "seeds": (0, 1),
        },
        "full": {
            "small": "tiny:llama-3m",
            "small_steps": 600,
            "small_lr": 1e-3,
            "small_min_elements": 1 << 15,
            "bases": BASES,
            "repeats": 31,
            "bulk_shape": "16384x8192",
            "prompt": 128,
            "new": 128,
            "requests": 26,
            "seeds": (0, 1, 2, 3, 4),
        },
        "gpu": {
            "model": "Qwen/Qwen3-32B",
            "small": "tiny:llama-3m",
            "small_steps": 600,
            "bases": BASES,
            "shapes": ("25600x5120", "5120x25600", "151936x5120"),
            "zeros": (0.0, 0.0, 0.0),
            "repeats": 31,
            "seeds": (0, 1, 2, 3, 4),
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("small_steps", "small_batch", "small_length", "repeats", "prompt", "new", "requests"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if len(self.shapes) != len(self.zeros) or not self.shapes:
            raise UsageError(f"{len(self.shapes)} shapes and {len(self.zeros)} zeros; give one of each.")
        for shape in (*self.shapes, self.bulk_shape):
            rows_and_columns(shape)
        if not self.bases or not all(base in BASES for base in self.bases):
            raise UsageError(f"bases must lie in 1 … 239, got {self.bases}.")
        if not self.cores or min(self.cores) < 1:
            raise UsageError(f"cores must be numbers of threads from 1 on, got {self.cores}.")
        if not 0 < self.free_share < 10:
            raise UsageError(f"free_share={self.free_share} must be a positive share of the weights' bytes.")
        if not all(0 <= share < 1 for share in self.zeros):
            raise UsageError(f"zeros must be shares in [0, 1), got {self.zeros}.")

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model, self.small)

    def check(self) -> None:
        from gnomon.core.data import corpus

        super().check()
        for data in (self.data, self.small_data):
            corpus(data)

    def run(self, lab: Lab) -> None:
        lab.stage(weights, model=self.model, min_elements=self.min_elements)
        for seed in lab.seeds:
            lab.stage(
                trained,
                small=self.small,
                data=self.small_data,
                steps=self.small_steps,
                batch=self.small_batch,
                length=self.small_length,
                lr=self.small_lr,
                min_elements=self.small_min_elements,
                seed=seed,
            )
        lab.stage(file_sizes, model=self.model)
        lab.stage(patterns, bases=self.bases)
        lab.stage(instructions)
        lab.stage(qwen3_memory)
        room: dict[str, Any] = {"model": self.model, "free_share": self.free_share}
        lab.stage(capacity, min_elements=self.min_elements, **room)
        rows, columns = rows_and_columns(self.bulk_shape)
        for threads in self.cores:
            timed: dict[str, Any] = {"threads": threads, "repeats": self.repeats}
            for shape, zeros in zip(self.shapes, self.zeros, strict=True):
                n, k = rows_and_columns(shape)
                for seed in (0, 1):  # repeats that choose the best cell, and repeats that judge it
                    lab.stage(products, exclusive=True, rows=n, columns=k, zeros=zeros, seed=seed, **timed)
            lab.stage(bulk, exclusive=True, rows=rows, columns=columns, seed=0, **timed)
            lab.stage(
                generation,
                exclusive=True,
                min_elements=self.min_elements,
                model=self.model,
                data=self.data,
                prompt=min(16, self.prompt),
                new=self.new,
                seed=0,
                threads=threads,
                repeats=max(3, self.repeats // 3),  # shown, not judged
            )
        for seed in lab.seeds:
            lab.stage(
                server,
                exclusive=True,
                data=self.data,
                requests=self.requests,
                prompt=self.prompt,
                new=self.new,
                min_elements=self.min_elements,
                threads=max(self.cores),
                seed=seed,
                **room,
            )
        self._claims(lab)
        for figure in (sizes, windows, products_grid, bulk_decoding, cache_room):
            lab.figure(figure)

    def _claims(self, lab: Lab) -> None:
        def about_weights(id: str, part: str, rule: Rule) -> None:
            """A claim about trained weights; random ones can neither support nor refute it."""
            if self.model.startswith("tiny:"):
                rule = Withheld(rule, f"{self.model} has random weights")
            lab.claim(id, part=part, rule=rule, grade="R")

        kinds = ("pretrained", "trained here")
        entropy = Tolerance(metric="joint entropy, all matrices", around=10.5, limit=0.3)
        share = Count(metric="share in the window, all matrices", minimum=0.997)
        about_weights("nf12.1", "a", AllOf({kind: replace(entropy, method=kind) for kind in kinds}))
        about_weights("nf12.1", "b", AllOf({kind: replace(share, method=kind) for kind in kinds}))
        lab.claim(
            "nf12.2",
            part="lossless",
            rule=AllOf(
                {
                    "patterns": Count(metric="patterns that differ", equals=0, at_least=6),
                    "weights": Count(metric="weights that differ", equals=0),
                }
            ),
            grade="X",
        )
        lab.claim(
            "nf12.2", part="size", rule=Tolerance(metric="bits beyond 12 + 16 f", limit=1e-9), grade="X"
        )
        lab.claim(
            "nf12.2",
            part="instructions",
            rule=Count(metric="instructions per group", where={"chosen": True}, maximum=16),
            grade="X",
        )
        cells: list[dict[str, str | int | float | bool]] = [
            {"shape": "{} x {}".format(*rows_and_columns(shape)), "threads": threads}
            for shape in self.shapes
            for threads in self.cores
        ]
        for part, to, number in (("a", "BF16, matched", 1.21), ("b", "BF16, torch", 1.35)):
            ratio = Ratio(metric="time", method="NF12", to=to, number=number)
            direction = replace(ratio, part="direction")
            lab.claim("nf12.3", part=f"{part}, direction", rule=UpTo(direction, cells), grade="R")
            lab.claim("nf12.3", part=f"{part}, number", rule=UpTo(ratio, cells), grade="R")
        optimum = Ratio(metric="time", method="NF12", to="entropy bound", number=0.71)
        lab.claim("nf12.3", part="c", rule=UpTo(optimum, cells), grade="R")
        here: dict[str, str | int | float | bool] = {"threads": max(self.cores)}
        first = {**here, "shape": cells[0]["shape"], "seed": 0}
        gain = Ratio(
            metric="time",
            method="BF16, matched",
            to="Huffman, then BF16",
            number=1.0,
            part="direction",
            where=first,
        )
        lab.claim("nf12.4", part="no gain", rule=gain, grade="R")
        decoding = Ratio(metric="decoding time", method="NF12", to="Huffman", number=3.3, where=here)
        for peer in ("Huffman", "ZipNN"):
            against = replace(decoding, to=peer)
            direction = replace(against, part="direction")
            lab.claim("nf12.4", part=f"{peer}, direction", rule=direction, grade="R")
            lab.claim("nf12.4", part=f"{peer}, number", rule=against, grade="R")
        peak = replace(decoding, to="copy", number=0.6)
        lab.claim("nf12.4", part="peak", rule=peak, grade="R")
        arithmetic = AllOf(
            {
                "freed": Tolerance(metric="freed", around=16.4, limit=0.1),
                "free before": Tolerance(metric="free before, for 4.5 times", around=4.7, limit=0.1),
            }
        )
        lab.claim("nf12.5", part="arithmetic", rule=arithmetic, grade="X")
        predicted = Tolerance(metric="cached tokens, measured over predicted", around=1, limit=0.02)
        lab.claim("nf12.5", part="room", rule=predicted, grade="R")
        faster = Paired(
            metric="tokens per second", method="NF12", to="BF16, matched", side="above", equal=("tokens",)
        )
        lab.claim("nf12.5", part="throughput", rule=faster, grade="R")
        equal = Count(metric="tokens unlike BF16's", method="NF12", equals=0)
        lab.claim("nf12.5", part="tokens", rule=equal, grade="R")
        reason = "4.5 and 2.67 times are Qwen3-32B's on one 80 GB GPU"
        lab.claim("nf12.5", part="full size", rule=FullScale(reason), grade="R")


def rows_and_columns(shape: str) -> tuple[int, int]:
    """(rows, columns) of `ROWSxCOLUMNS`.

    Raises:
        UsageError: another form, or fewer than one.
    """
    rows, _, columns = shape.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise UsageError(f"{shape!r} is no shape; write ROWSxCOLUMNS, such as 16384x8192.")
    return int(rows), int(columns)
