"""What policies would choose, seen beside exact decoding: recall, mass, sharing, and alignment of queries.

All policies see the same queries and keys, since attention stays exact. Measuring costs an exact pass over the keys for
each layer and pass, and one more for each policy.

Shapes: R rows, Hq query and H key heads, B queries of the block, N prefix tokens, S passes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from gnomon.core.errors import UsageError
from gnomon.kernels.sparse_decode.block_reference import mean_over_queries

from ..block_diffusion import BlockDiffusionConfig, GenerationStats, decoding, generate
from ..block_diffusion.sparse import BlockState, SparsePolicy, recall_and_mass
from .selectors import Selector, group_mean, mass


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One policy's sets in one layer and pass; means over rows and key heads."""

    selector: str
    block: int
    layer: int
    step: int
    tokens: int
    """k of the set."""
    recall: float
    """Of the block's set, against the top k of the block's exact importance."""
    mass: float
    own_recall: float | None = None
    """Of the set that each query would choose by itself, against its own top k; mean over queries that count."""
    shared_recall: float | None = None
    """Of the block's set, against each query's own top k."""


@dataclass(frozen=True, kw_only=True)
class Aligned:
    """Cosines of queries with those of the block's first pass, in one layer and pass."""

    block: int
    layer: int
    step: int
    block_average: float
    """Of the mean over the block's queries that count and the group's heads."""
    single: float
    """Of each query by itself, then averaged."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What :func:`observe` saw."""

    seen: tuple[Seen, ...]
    aligned: tuple[Aligned, ...]
    stats: GenerationStats

    def table(self, *, first: int = 2) -> dict[str, dict[str, float]]:
        """Means by policy over passes from `first` on: tokens, recall, mass, own_recall, shared_recall."""
        found: dict[str, dict[str, float]] = {}
        for name in dict.fromkeys(one.selector for one in self.seen):
            rows = [one for one in self.seen if one.selector == name and one.step >= first]
            columns = ("tokens", "recall", "mass", "own_recall", "shared_recall")
            values = {c: [v for row in rows if (v := getattr(row, c)) is not None] for c in columns}
            found[name] = {c: sum(v) / len(v) for c, v in values.items() if v}
        return found

    def alignment(self, *, first: int = 2) -> tuple[float, float]:
        """Mean cosines of block-average and of single queries, over passes from `first` on; NaN without any."""
        rows = [one for one in self.aligned if one.step >= first]
        if not rows:
            return float("nan"), float("nan")
        return (
            sum(one.block_average for one in rows) / len(rows),
            sum(one.single for one in rows) / len(rows),
        )


class Watch:
    """A policy that reads everything and notes what others would have chosen."""

    keep_block: ClassVar[bool] = True

    def __init__(self, policies: Mapping[str, SparsePolicy]) -> None:
        self.policies = dict(policies)
        self.seen: list[Seen] = []
        self.aligned: list[Aligned] = []
        self._block: int | None = None
        self._kept: dict[str, dict[Any, Any]] = {}
        self._memory: dict[str, dict[Any, Any]] = {name: {} for name in self.policies}
        self._first: dict[int, Tensor] = {}

    def select(
        self,
        layer: int,
        q: Float[Tensor, "R Hq B d"],
        k_prefix: Float[Tensor, "R H N d"],
        step: int,
        state: BlockState,
    ) -> None:
        """Measure, and read everything."""
        if state.commit:
            return
        if state.block != self._block:
            self._block, self._first = state.block, {}
            self._kept = {name: {} for name in self.policies}
        self._align(layer, q, k_prefix.shape[1], step, state)
        exact = mass(q, k_prefix, state)  # (R, H, B, N)
        for name, policy in self.policies.items():
            own = replace(state, kept=self._kept[name], memory=self._memory[name])
            idx = policy.select(layer, q, k_prefix, step, own)
            each = self._by_query(policy, layer, q, k_prefix, step, own)
            if idx is not None:
                self.seen.append(_row(name, layer, step, state, idx, each, exact))

    def _by_query(
        self,
        policy: SparsePolicy,
        layer: int,
        q: Tensor,
        k_prefix: Tensor,
        step: int,
        state: BlockState,
    ) -> Int[Tensor, "R H B k"] | None:
        """Each query's own sets: of this pass, or kept from the block's first where the policy does so."""
        n = k_prefix.shape[2]
        if not isinstance(policy, Selector) or not policy.estimates:
            return None
        if layer < policy.dense_layers or policy.covers(n):
            return None
        name = ("by query", layer)
        if policy.when == "each" or step == 1:
            state.kept[name] = policy.sets(policy.per_query(q, k_prefix, state), n)
        kept: Tensor | None = state.kept.get(name)
        return kept

    def _align(self, layer: int, q: Tensor, heads: int, step: int, state: BlockState) -> None:
        if step == 1:
            self._first[layer] = q
        first = self._first[layer]
        now, then = (mean_over_queries(group_mean(x, heads), state.queries) for x in (q, first))
        single = F.cosine_similarity(q.float(), first.float(), dim=-1)  # (R, Hq, B)
        self.aligned.append(
            Aligned(
                block=state.block,
                layer=layer,
                step=step,
                block_average=float(F.cosine_similarity(now, then, dim=-1).mean()),
                single=float(mean_over_queries(single, state.queries).mean()),
            )
        )


def _row(
    name: str,
    layer: int,
    step: int,
    state: BlockState,
    idx: Int[Tensor, "R H k"],
    each: Int[Tensor, "R H B k2"] | None,
    exact: Float[Tensor, "R H B N"],
) -> Seen:
    recall, share = recall_and_mass(idx, mean_over_queries(exact, state.queries))
    shared = recall_and_mass(idx[:, :, None].expand(-1, -1, exact.shape[2], -1), exact)[0]
    own = None if each is None else recall_and_mass(each, exact)[0]

    def mean(x: Tensor) -> float:
        return float(mean_over_queries(x, state.queries).mean())

    return Seen(
        selector=name,
        block=state.block,
        layer=layer,
        step=step,
        tokens=idx.shape[-1],
        recall=float(recall.mean()),
        mass=float(share.mean()),
        own_recall=None if own is None else mean(own),
        shared_recall=mean(shared),
    )


def observe(
    model: nn.Module,
    input_ids: Int[Tensor, "R P"],
    cfg: BlockDiffusionConfig,
    policies: Mapping[str, SparsePolicy],
    max_new_tokens: int = 128,
    stop_ids: Collection[int] = (),
    *,
    generator: torch.Generator | None = None,
    force: bool = False,
) -> Observation:
    """Decode exactly, as :func:`generate` does, and note what each policy would have chosen.

    Raises:
        UsageError: no policy; as :func:`generate`.
    """
    if not policies:
        raise UsageError("There is no policy to observe.")
    watch = Watch(policies)
    _, stats = generate(
        model, input_ids, cfg, watch, max_new_tokens, stop_ids, generator=generator, force=force
    )
    return Observation(seen=tuple(watch.seen), aligned=tuple(watch.aligned), stats=stats)


def trajectory_nll(
    model: nn.Module,
    input_ids: Int[Tensor, "R T"],
    cfg: BlockDiffusionConfig,
    sparse: SparsePolicy | None,
    order: Int[Tensor, "R B"],
) -> tuple[Float[Tensor, "R S"], Float[Tensor, ""]]:
    """Loss of a known last block, its true tokens revealed in a given order: equal inputs for all policies.

    Pass s sees the first n_1 + … + n_(s−1) positions of `order`; its loss is the mean over those still masked, in nats.

    Args:
        input_ids: whole blocks, the last of which is scored.
        order: a permutation of the block's positions for each row.

    Returns:
        losses of each pass; KV tokens that the passes read, averaged over layers.

    Raises:
        UsageError: T isn't two blocks or more, an order that is no permutation, the mask token among the tokens.
    """
    size = cfg.block_size
    rows, length = input_ids.shape
    if length < 2 * size or bool((input_ids == cfg.mask_token_id).any()):
        raise UsageError(
            f"{length} tokens: give whole blocks of {size}, two or more, without the mask token {cfg.mask_token_id}."
        )
    if order.shape != (rows, size) or not bool((order.sort(-1).values.cpu() == torch.arange(size)).all()):
        raise UsageError(f"order must be a permutation of {size} positions for each of {rows} rows.")
    device = next(model.parameters()).device
    ids, order = input_ids.to(device), order.to(device)
    truth = ids[:, -size:]
    losses: list[Tensor] = []
    with decoding(model, cfg, total=length, prompt=length - size, sparse=sparse) as decoder:
        decoder.prefill(ids[:, :-size])
        masked = torch.ones_like(truth, dtype=torch.bool)
        decoder.begin(masked)
        shown = 0
        for more in cfg.schedule:
            logits = decoder.denoise(truth.masked_fill(masked, cfg.mask_token_id))
            nll = F.cross_entropy(logits.transpose(1, 2), truth, reduction="none")
            losses.append((nll * masked).sum(-1) / masked.sum(-1))
            masked = masked.scatter(1, order[:, shown : shown + more], False)
            shown += more
        read = torch.tensor(decoder.session.reads.denoise / len(decoder.cache.layers))
    return torch.stack(losses, 1).cpu(), read
