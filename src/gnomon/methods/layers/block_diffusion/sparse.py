"""How a policy reads less of the prefix: the protocol, and the attention function that follows it.

A policy is asked in every layer and pass of a block for a set of prefix tokens, one for each row and key head; the
block's own keys are always read. The sets' keys and values are gathered once into a compact buffer and stay there as
long as the policy gives the same tensor back.

Shapes: R rows, Hq query and H key heads, B queries of the block, N committed tokens, k chosen ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.layers import unwrap
from gnomon.kernels.sparse_decode.block_reference import gather, importance, top_sets

NAME = "gnomon_block"
"""The attention function's name in Transformers."""


@dataclass
class BlockState:
    """What a policy may know besides the queries and keys it is given."""

    block: int
    """Number of the block in the sequence, from 0."""
    steps: int
    """S, the most denoising passes of a block."""
    prompt: int
    """Tokens of the prompt."""
    queries: Bool[Tensor, "R B"]
    """Positions that were masked when the block began: a prompt's last tokens are no part of an all-masked block."""
    commit: bool = False
    """This is the pass that stores the finished block's keys and values."""
    scaling: float = 1.0
    """Factor of this layer's scores."""
    softcap: float | None = None
    block_keys: Tensor | None = None
    """(R, H, B, d), of this layer and pass."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """What a policy remembers until the block ends."""
    memory: dict[Any, Any] = field(default_factory=dict)
    """What it remembers until the sequence ends."""


@runtime_checkable
class SparsePolicy(Protocol):
    """Chooses the prefix tokens that a block reads."""

    @property
    def keep_block(self) -> bool:
        """True: the block's own keys are read in full. Nothing else is supported."""
        ...

    def select(self, layer: int, q: Tensor, k_prefix: Tensor, step: int, state: BlockState) -> Tensor | None:
        """Indices (R, H, k) below N, unique and ascending; None reads the whole prefix.

        Args:
            q: (R, Hq, B, d), with positions.
            k_prefix: (R, H, N, d), likewise.
            step: of the block, from 1; the commit pass comes one after the last.
        """
        ...


@dataclass(frozen=True)
class Selection:
    """How good a set was, against exact attention of the same pass; means over rows and key heads."""

    block: int
    layer: int
    step: int
    commit: bool
    tokens: int
    """k, tokens of the set."""
    recall: float
    """|S ∩ S*| / k with S* the k tokens that exact attention weighs most."""
    mass: float
    """Weight on S over weight on S*."""


def recall_and_mass(
    idx: Int[Tensor, "*rest k"], exact: Float[Tensor, "*rest N"]
) -> tuple[Float[Tensor, "*rest"], Float[Tensor, "*rest"]]:
    """Recall and mass of sets against the top k of `exact`, k the sets' own size."""
    best = top_sets(exact, idx.shape[-1])
    inside = torch.zeros_like(exact, dtype=torch.bool).scatter(-1, idx, True)
    recall = inside.gather(-1, best).to(exact.dtype).mean(-1)
    mass = exact.gather(-1, idx).sum(-1) / exact.gather(-1, best).sum(-1).clamp(
        min=torch.finfo(exact.dtype).tiny
    )
    return recall, mass


@dataclass
class Reads:
    """KV tokens read, summed over layers; each entry counts for one row and key head."""

    denoise: int = 0
    commit: int = 0
    selecting: float = 0.0
    """Read by the policy to choose; a key without its value is half a token."""
    active: set[int] = field(default_factory=set)
    """Blocks in which some layer read a part of the prefix only."""


class Session:
    """One decoding: which pass it is, the policy, the compact buffers, and the counts."""

    def __init__(self, kind: str, policy: SparsePolicy | None, *, measure: bool) -> None:
        self.kind, self.policy, self.measure = kind, policy, measure
        self.state: BlockState | None = None
        self.step = 0
        self.reads, self.selections = Reads(), list[Selection]()
        self._compact: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def begin(self, state: BlockState | None) -> None:
        """A new block, or None for passes over the prompt."""
        self.state, self.step, self._compact = state, 0, {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The model's own attention over what the policy leaves of the keys."""
        inner = self._inner(module)
        if self.state is None:
            return inner(module, query, key, value, mask, **given)  # type: ignore[no-any-return]
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        block = query.shape[2]
        prefix = key.shape[2] - block
        idx = None
        if self.policy is not None and prefix:
            self.state.scaling = float(given.get("scaling") or query.shape[-1] ** -0.5)
            self.state.softcap = given.get("softcap")
            self.state.block_keys = key[:, :, prefix:]
            idx = self._select(layer, query, key[:, :, :prefix])
        if idx is not None:
            key, value = self._gathered(layer, idx, key, value, prefix)
            self.reads.active.add(self.state.block)
        if self.state.commit:
            self.reads.commit += key.shape[2]
        else:
            self.reads.denoise += key.shape[2]
        given["is_causal"] = False  # the block sees itself in both directions, and all before it
        return inner(module, query, key, value, None, **given)  # type: ignore[no-any-return]

    def _select(self, layer: int, q: Tensor, prefix: Tensor) -> Tensor | None:
        assert self.policy is not None and self.state is not None
        idx = self.policy.select(layer, q, prefix, self.step, self.state)
        if idx is None:
            return None
        rows, heads, n, _ = prefix.shape
        if idx.ndim != 3 or idx.shape[:2] != (rows, heads) or not 1 <= idx.shape[2] <= n:
            raise UsageError(
                f"{type(self.policy).__name__}.select gave indices of shape {list(idx.shape)}; a set for each of "
                f"{rows} rows and {heads} key heads, with 1 to {n} tokens, is needed."
            )
        reads = getattr(self.policy, "reads", None)
        if reads is not None and not self.state.commit:
            self.reads.selecting += float(reads(n))
        if self.measure:
            self._record(layer, idx, q, prefix)
        return idx

    def _record(self, layer: int, idx: Tensor, q: Tensor, prefix: Tensor) -> None:
        state = self.state
        assert state is not None and state.block_keys is not None
        exact = importance(
            q,
            prefix,
            state.block_keys,
            scaling=state.scaling,
            queries=state.queries,
            softcap=state.softcap,
        )
        recall, mass = recall_and_mass(idx, exact)
        row = (state.block, layer, self.step, state.commit, idx.shape[2])
        self.selections.append(Selection(*row, float(recall.mean()), float(mass.mean())))

    def _gathered(
        self, layer: int, idx: Tensor, key: Tensor, value: Tensor, prefix: int
    ) -> tuple[Tensor, Tensor]:
        """[K[S]; K'] and [V[S]; V'] in the layer's buffer; the set's part is written when the set is new."""
        held = self._compact.get(layer)
        chosen = idx.shape[2]
        if held is None or held[0] is not idx:
            rows, heads, _, width = key.shape
            size = chosen + key.shape[2] - prefix
            keys = key.new_empty(rows, heads, size, width)
            values = value.new_empty(rows, heads, size, value.shape[-1])
            keys[:, :, :chosen] = gather(key[:, :, :prefix], idx)
            values[:, :, :chosen] = gather(value[:, :, :prefix], idx)
            held = self._compact[layer] = (idx, keys, values)
        held[1][:, :, chosen:] = key[:, :, prefix:]
        held[2][:, :, chosen:] = value[:, :, prefix:]
        return held[1], held[2]

    def _inner(self, module: nn.Module) -> Callable[..., Any]:
        if self.kind == "eager":  # no entry of the table: each model's file has its own
            found: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            if found is None:
                raise UsageError(
                    f"{type(module).__name__} has no eager attention function. Load the model with "
                    "attn_implementation='sdpa'."
                )
            return found  # type: ignore[no-any-return]
        return ALL_ATTENTION_FUNCTIONS[self.kind]  # type: ignore[no-any-return]


_SESSION: ContextVar[Session | None] = ContextVar("gnomon_block_session", default=None)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **given: Any,
) -> tuple[Tensor, Tensor | None]:
    session = _SESSION.get()
    if session is None:
        raise GnomonError(
            f"Attention {NAME!r} works inside of gnomon.methods.layers.block_diffusion only. "
            "model.set_attn_implementation('sdpa') brings the ordinary one back."
        )
    return session.attend(module, query, key, value, attention_mask, **given)


@contextmanager
def attending(model: nn.Module, session: Session) -> Iterator[None]:
    """Run the model's attention through the session inside the block.

    Raises:
        UsageError: a model whose attention can't be exchanged.
    """
    root: Any = unwrap(model)
    AttentionInterface.register(NAME, _attend)
    before = session.kind
    root.set_attn_implementation(NAME)
    token = _SESSION.set(session)
    try:
        if root.config._attn_implementation != NAME:
            raise UsageError(
                f"{type(root).__name__} doesn't take an attention function of Transformers' AttentionInterface. Use a "
                "model of Transformers 5 that does, such as Llama or Qwen."
            )
        yield
    finally:
        _SESSION.reset(token)
        root.set_attn_implementation(before)
