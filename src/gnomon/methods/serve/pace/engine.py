"""A small engine that decodes branches of many requests in one packed sequence, on any Transformers decoder.

Each step feeds one token of every admitted row: one sequence of n tokens with their own position ids and a mask of
n × slots, so that rows share the physical keys and values of their prefix and see no sibling. What is deferred is left
out of the step and nothing else: its keys and values stay where they are.

Here:  `PackedBranchEngine`: `submit`, `step`, `run`; stages by length or script (`stages`), greedy or sampled.
Not here: paged kernels, batching of prefills, tensor parallelism. Serve models with vLLM or SGLang; this engine is for
       measuring a policy on a real model and for seeing that outputs don't depend on it.
Inferred: positions restart at the fork for each branch and go on from the longest one after the join (Multiverse's).
Limits: attention runs over all slots of all requests under the mask, so its cost grows with n × slots; masks are
       additive, since eager attention takes a boolean one for 0 and 1. State-space layers have no slots: refused.
       Sampling depends on no schedule because each branch has a random stream of its own.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError, number
from gnomon.core.layers import unwrap
from gnomon.core.scoring import evaluating

from .config import PaceConfig
from .deadlines import DeadlineBook
from .policies import AdmissionPolicy, Plan, make_policy
from .pool import KVPool
from .predictor import LatencyPredictor
from .report import ServeLog, ServeReport
from .rows import BranchRow, build_groups
from .stages import BranchSpec, Stages, checked_stages

__all__ = ["Deferral", "PackedBranchEngine"]

PREFILL = 512
"""Tokens that are prefilled at a time; bounds the mask to 512 × slots."""
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(eq=False)
class _Branch:
    """A branch in decoding. `path` holds the branches it sees, its own among them."""

    row: int
    """Its number among all rows ever; what plans speak of."""
    id: int
    """Its tag in the pool; used again by others once it has been joined."""
    request: int
    spec: BranchSpec
    path: list[int]
    position: int
    """Of its next token."""
    prefix: int
    """Tokens that it shares with its siblings."""
    context: int
    """Tokens it sees, the pending one not counted."""
    pending: int = 0
    """The token to be fed next."""
    out: list[int] = field(default_factory=list)
    ended: bool = False
    generator: torch.Generator | None = None


@dataclass(eq=False)
class _Request:
    number: int
    prompt: tuple[int, ...]
    stages: Stages
    arrival: float
    stage: int = -1
    main: _Branch | None = None
    rows: list[_Branch] = field(default_factory=list)
    outputs: list[list[list[int]]] = field(default_factory=list)
    first: float = math.nan
    steps: int = 0
    branching_then: int = 0


@dataclass(frozen=True, kw_only=True)
class Deferral:
    """What happened to memory in a step that deferred rows (`audit=True`).

    Attributes:
        rows: deferred.
        allocated, freed: blocks beyond those that the admitted tokens filled.
        moved: slots of deferred rows whose place, tags, keys or values changed.
    """

    rows: int
    allocated: int
    freed: int
    moved: int


class PackedBranchEngine:
    """Decode requests that branch.

    Args:
        model: a decoder of Transformers that runs sdpa or eager attention.
        block_size: slots of a KV block, for the counters.
        stop_ids: tokens that end a branch early.
        temperature: 0 takes the most likely token; above it each branch draws from a stream of its own.
        seed: of those streams.
        audit: look at the memory of deferred rows before and after each step (slow).
        clock: seconds; a steady one.

    Raises:
        UsageError: a model that takes no masks of four dimensions or no position ids.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        block_size: int = 16,
        stop_ids: Collection[int] = (),
        temperature: float = 0.0,
        seed: int = 0,
        audit: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self._windows = _windows(model)
        parameter = next(p for p in model.parameters() if p.is_floating_point())
        self.dtype, self.device = parameter.dtype, parameter.device
        if block_size < 1 or not 0 <= number(temperature) < math.inf:
            raise UsageError(
                f"block_size={block_size} must be at least 1, and temperature={temperature} 0 or more."
            )
        self.pool = KVPool(self.device, block_size=block_size)
        self.stop_ids, self.temperature, self.seed = frozenset(stop_ids), temperature, seed
        self.audit, self.clock = audit, clock
        self.deferrals: list[Deferral] = []
        self.outputs: dict[int, list[list[list[int]]]] = {}
        self._keeps = "logits_to_keep" in inspect.signature(unwrap(model).forward).parameters
        self._waiting: list[_Request] = []
        self._live: dict[int, _Request] = {}
        self._rows: dict[int, _Branch] = {}
        self._free_ids: list[int] = []
        self._ids = self._submitted = self._rows_ever = 0
        self._book = DeadlineBook(PaceConfig())
        self._reset_notes()

    # ------------------------------------------------------------------------------------------ requests

    def submit(self, prompt: Sequence[int], stages: Sequence[Sequence[BranchSpec]]) -> int:
        """Queue a request.

        Returns:
            its number, the key of `outputs`.

        Raises:
            UsageError: as :func:`checked_stages`.
        """
        request = _Request(self._submitted, tuple(prompt), checked_stages(prompt, stages), self.clock())
        self._submitted += 1
        self._waiting.append(request)
        return request.number

    def let_in(self, *, concurrency: int | None = None) -> None:
        """Prefill queued requests until so many are in flight (None: all)."""
        while self._waiting and (concurrency is None or len(self._live) < concurrency):
            request = self._waiting.pop(0)
            if concurrency is not None:
                request.arrival = self.clock()  # a closed loop sends the next request when one has ended
            self._live[request.number] = request
            self._book.arrive(request.number, request.arrival)
            main = self._branch(request, BranchSpec((), 1), [], 0, 0, 0)
            request.main = main
            self._feed([(main, list(request.prompt[:-1]))])
            main.pending = request.prompt[-1]
            self._next_stage(request)

    def ready(self) -> list[BranchRow]:
        """Rows that can run now."""
        now = self.clock()
        self._book.resident(self._rows, now)
        return [
            BranchRow(
                row.row,
                row.request,
                row.context + 1,
                self._book.deadline(row.request, row.row, now),
                len(row.out),
                row.prefix,
            )
            for row in self._rows.values()
        ]

    # ------------------------------------------------------------------------------------------ steps

    def step(self, plan: Plan) -> float:
        """Run the admitted rows, one token each.

        Returns:
            seconds that the forward pass and the choice of tokens took, without forks, joins and prefills.

        Raises:
            UsageError: a row that isn't ready.
        """
        if unknown := [row for row in plan.admitted if row not in self._rows]:
            raise UsageError(
                f"Row {unknown[0]} isn't ready; {len(self._rows)} rows are. Plan on what ready() returns."
            )
        rows = [self._rows[k] for k in plan.admitted]
        before = self._memory(plan) if self.audit and plan.deferred else None
        started = self.clock()
        logits = self._forward(rows, [row.pending for row in rows], wanted=range(len(rows)))
        chosen = self._choose(rows, logits)
        ended = self.clock()
        if before is not None:
            self._compare(plan, before, len(rows))
        for row, token in zip(rows, chosen, strict=True):
            row.context += 1
            row.position += 1
            row.pending = token
            row.out.append(token)
            row.ended = len(row.out) == row.spec.length or (
                row.spec.script is None and token in self.stop_ids
            )
        self._stamp(rows, started, ended)
        for request in [self._live[k] for k in dict.fromkeys(row.request for row in rows)]:
            for row in request.rows:
                if row.ended:
                    self._rows.pop(row.row, None)
            if all(row.ended for row in request.rows):
                self._join(request)
        return ended - started

    def run(
        self,
        policy: str | AdmissionPolicy,
        *,
        predictor: LatencyPredictor | None = None,
        config: PaceConfig | None = None,
        concurrency: int | None = None,
        warm_up: int = 0,
    ) -> ServeReport:
        """Decode everything that was submitted.

        Args:
            predictor: what the planner believes; it learns from each step. Without one it begins uncalibrated.
            concurrency: requests in flight in a closed loop; None lets all in at once.
            warm_up: first steps that the predictor doesn't learn from.

        Raises:
            UsageError: nothing was submitted.
        """
        if not self._waiting and not self._live:
            raise UsageError("There is no request to decode. Call submit first.")
        chosen, config = make_policy(policy), config or PaceConfig()
        predictor = predictor if predictor is not None else LatencyPredictor()
        self._book = DeadlineBook(config)
        for request in self._live.values():
            self._book.arrive(request.number, request.arrival)
        self._reset_notes()
        begun = self.clock()
        self._origin = begun
        while self._waiting or self._live:
            self.let_in(concurrency=concurrency)
            groups = build_groups(self.ready())
            now = self.clock()
            plan = chosen.select(groups, predictor, config, now)
            planning = self.clock() - now
            places = {int(k): at for at, k in enumerate(groups.row_index)}
            run = [places[k] for k in plan.admitted]
            context = int(groups.context[run].sum())
            branched = groups.widths > 1
            self._several = bool(branched.any())
            start = self.clock()
            seconds = self.step(plan)
            wide = len(run) - int((~branched).sum())
            counts = (len(groups), len(run), groups.rows, context, int(branched.sum()), wide)
            self._steps.append(
                (start - begun, seconds, *counts, plan.t0, plan.min_slack, plan.budget, planning)
            )
            if len(self._steps) > warm_up:
                predictor.record(len(run), context, seconds, now=self.clock())
        real = self.clock() - begun
        log = ServeLog.of_rows(self._finished, self._steps, measured=(0.0, real))
        return ServeReport.of(log, policy=chosen.name, slo_s=config.tpot_slo_s, real_s=real)

    # ------------------------------------------------------------------------------------------ branches

    def _branch(
        self, request: _Request, spec: BranchSpec, path: list[int], position: int, prefix: int, context: int
    ) -> _Branch:
        if self._free_ids:
            id = self._free_ids.pop()
        else:
            id, self._ids = self._ids, self._ids + 1
        self._rows_ever += 1
        row = _Branch(self._rows_ever, id, request.number, spec, [*path, id], position, prefix, context)
        if self.temperature > 0:
            row.generator = torch.Generator()
        return row

    def _next_stage(self, request: _Request) -> None:
        """Fork the next stage's branches off the main one: tags for each, and their headers prefilled."""
        main = request.main
        assert main is not None
        request.stage += 1
        stage = request.stages[request.stage]
        if request.stage == 0 and (len(stage) > 1 or stage[0].header):
            self._feed([(main, [main.pending])])  # else the first step feeds the prompt's last token
        if len(stage) == 1:
            main.spec, main.out, main.ended = stage[0], [], False
            main.prefix = main.context
            request.rows = [main]
            self._feed([(main, self._opened(main))])
        else:
            request.rows = [
                self._branch(request, spec, main.path, main.position, main.context, main.context)
                for spec in stage
            ]
            self._feed([(row, self._opened(row)) for row in request.rows])
        for k, row in enumerate(request.rows):
            self._rows[row.row] = row
            if row.generator is not None:
                stream = np.random.SeedSequence((self.seed, request.number, request.stage, k))
                row.generator.manual_seed(int(stream.generate_state(1)[0]))

    @staticmethod
    def _opened(row: _Branch) -> list[int]:
        """Header tokens to prefill; the last one is fed by the first step. An empty header goes on from `pending`."""
        if not row.spec.header:
            return []
        tokens = list(row.spec.header[:-1])
        row.pending = row.spec.header[-1]
        return tokens

    def _join(self, request: _Request) -> None:
        """All branches have ended: their last tokens enter the pool, and their slots become the main branch's."""
        main = request.main
        assert main is not None
        rows = request.rows
        request.outputs.append([list(row.out) for row in rows])
        last = request.stage + 1 == len(request.stages)
        if not last:
            self._feed([(row, [row.pending]) for row in rows])
        if rows != [main]:
            own = sum(row.context - row.prefix for row in rows)
            main.position = max(row.position for row in rows)
            main.context += own
            self.pool.relabel([row.id for row in rows], main.id)
            self._free_ids += [row.id for row in rows]
        if last:
            self._finish(request)
        else:
            self._next_stage(request)

    def _finish(self, request: _Request) -> None:
        assert request.main is not None
        self.pool.drop([request.main.id])
        self._free_ids.append(request.main.id)
        del self._live[request.number]
        self._book.finish(request.number)
        self.outputs[request.number] = request.outputs
        tokens = sum(len(out) for stage in request.outputs for out in stage)
        parallel = max(map(len, request.stages)) > 1
        times = (request.arrival - self._origin, request.first - self._origin, self._now - self._origin)
        self._finished.append(
            (parallel, *times, tokens, request.steps, self._branching - request.branching_then)
        )

    # ------------------------------------------------------------------------------------------ forward

    def _feed(self, what: list[tuple[_Branch, list[int]]]) -> None:
        """Put known tokens of several branches into the pool; their logits aren't needed."""
        flat = [(row, token) for row, tokens in what for token in tokens]
        for start in range(0, len(flat), PREFILL):
            part = flat[start : start + PREFILL]
            offsets: dict[int, int] = {}
            positions = []
            for row, _ in part:
                positions.append(row.position + offsets.get(row.id, 0))
                offsets[row.id] = offsets.get(row.id, 0) + 1
            self._forward([row for row, _ in part], [token for _, token in part], positions=positions)
            for row in {id(row): row for row, _ in part}.values():
                row.position += offsets[row.id]
                row.context += offsets[row.id]

    def _forward(
        self,
        rows: Sequence[_Branch],
        tokens: Sequence[int],
        *,
        positions: Sequence[int] | None = None,
        wanted: Sequence[int] = (0,),
    ) -> Float[Tensor, "w V"]:
        """One packed sequence of n tokens; logits of the wanted ones."""
        at = np.array([row.position for row in rows] if positions is None else positions, dtype=np.int64)
        branch = np.array([row.id for row in rows], dtype=np.int64)
        path = np.zeros((len(rows), self._ids), dtype=bool)
        for k, row in enumerate(rows):
            path[k, row.path] = True
        self.pool.reserve(branch, at)
        masks = {kind: self._mask(path, at, window) for kind, window in self._windows.items()}
        index = torch.tensor(list(wanted), device=self.device)
        with evaluating(self.model):
            logits: Tensor = self.model(
                input_ids=torch.tensor([list(tokens)], device=self.device),
                position_ids=torch.from_numpy(at)[None].to(self.device),
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                past_key_values=self.pool,
                use_cache=True,
                **({"logits_to_keep": index} if self._keeps else {}),
            ).logits
        self.pool.commit(len(rows))
        return logits[0] if self._keeps else logits[0, index]

    def _mask(
        self, path: np.ndarray, at: Int[np.ndarray, " n"], window: int | None
    ) -> Float[Tensor, "1 1 n S"]:
        seen = torch.from_numpy(self.pool.seen(path, at, window=window)).to(self.device)
        zero = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return zero.masked_fill(~seen, torch.finfo(self.dtype).min)[None, None]

    def _choose(self, rows: Sequence[_Branch], logits: Float[Tensor, "n V"]) -> list[int]:
        """The next token of each row: scripted, most likely, or drawn from the row's own stream."""
        if bool(logits.isnan().any()):
            raise NumericalFailure(
                "Logits aren't numbers. Load the model in float32 or bfloat16, and look for NaN in its weights."
            )
        found: list[int] = logits.argmax(-1).tolist()
        for k, row in enumerate(rows):
            if row.spec.script is not None:
                found[k] = row.spec.script[len(row.out)]
            elif row.generator is not None:
                share = torch.softmax(logits[k].double().cpu() / self.temperature, -1)
                found[k] = int(torch.multinomial(share, 1, generator=row.generator))
        return found

    # ------------------------------------------------------------------------------------------ notes

    def _reset_notes(self) -> None:
        self._steps: list[tuple[float, ...]] = []
        self._finished: list[tuple[float, ...]] = []
        self._origin = self._now = self.clock()
        self._branching, self._several = 0, False

    def _stamp(self, rows: Sequence[_Branch], started: float, ended: float) -> None:
        self._book.advanced({row.row: row.request for row in rows}, started, ended)
        self._now = ended
        for key in dict.fromkeys(row.request for row in rows):
            request = self._live[key]
            if request.steps == 0:
                request.first, request.branching_then = ended, self._branching + self._several
            request.steps += 1
        self._branching += self._several

    def _memory(self, plan: Plan) -> tuple[np.ndarray, list[Tensor], int, int, int]:
        """Slots and contents of what deferred rows see, and the pool's counters."""
        paths = {k for row in plan.deferred for k in self._rows[row].path}
        slots = self.pool.slots_of(sorted(paths))
        return slots, self.pool.contents(slots), self.pool.used, self.pool.allocated, self.pool.freed

    def _compare(
        self, plan: Plan, before: tuple[np.ndarray, list[Tensor], int, int, int], admitted: int
    ) -> None:
        slots, contents, used, allocated, freed = before
        paths = {k for row in plan.deferred for k in self._rows[row].path}
        still = self.pool.slots_of(sorted(paths))
        still = still[still < used]  # an admitted sibling in the main branch may have added its own
        moved = len(set(slots.tolist()) ^ set(still.tolist()))
        changed = torch.zeros(len(slots), dtype=torch.bool, device=self.device)
        for old, new in zip(contents, self.pool.contents(slots), strict=True):
            changed |= (old != new).any(dim=2).any(dim=0)
        size = self.pool.block_size
        needed = -(-(used + admitted) // size) - -(-used // size)
        self.deferrals.append(
            Deferral(
                rows=len(plan.deferred),
                allocated=self.pool.allocated - allocated - needed,
                freed=self.pool.freed - freed,
                moved=moved + int(changed.sum()),
            )
        )


def _windows(model: nn.Module) -> dict[str, int | None]:
    """Window of each kind of attention layer; None where all is seen.

    Raises:
        UsageError: a model whose attention can't be told by a mask who sees whom.
    """
    root = unwrap(model)
    config: Any = getattr(root, "config", None)
    name = type(root).__name__
    if config is None or not hasattr(root, "generate"):
        raise UsageError(f"{name} is no language model of Transformers.")
    kind = str(getattr(config, "_attn_implementation", "eager"))
    if kind not in ("sdpa", "eager"):
        raise UsageError(
            f"{name} runs {kind}, which takes no mask of four dimensions. Load it with attn_implementation='sdpa'."
        )
    if "position_ids" not in inspect.signature(root.forward).parameters:
        raise UsageError(f"{name} takes no position_ids, without which packed branches have wrong positions.")
    config = config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := kinds - {FULL, SLIDING}:
        raise UsageError(
            f"{name} has layers of {', '.join(sorted(other))}. Use a model with attention in all layers."
        )
    if any("mamba" in type(m).__name__.lower() or "ssm" in type(m).__name__.lower() for m in root.modules()):
        raise UsageError(f"{name} has state-space layers, whose state can't be shared by branches.")
    if kinds == {FULL, SLIDING}:
        return {FULL: None, SLIDING: window}
    return {SLIDING: window} if window and kinds != {FULL} else {FULL: None}
