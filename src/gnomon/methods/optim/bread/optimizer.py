"""The optimizer: Adam on one block, a cheap expansion on the others, one backward pass for both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.layers import decoder_stack
from gnomon.core.memory import state_bytes, tensor_bytes

from .blocks import Block, Kind, Order, Turns, make_blocks
from .checks import MARK, check_autocast, check_model, check_options, check_reentrant, check_unwrapped
from .expansion import Adapters, Expansion, LoRAExpansion, SGDExpansion, linears_of, pick_targets
from .inner import MasteredOptimizer, require_base
from .on_the_fly import OnTheFly, no_copy, sparse
from .ranks import average_, copy_from_first, from_first, launched, world_size

logger = logging.getLogger(__name__)


class BlockOptimizer(torch.optim.Optimizer):
    """Block coordinate descent with landscape expansion; without an expansion it is BAdam.

    One block at a time gets `switch_every` steps of `base`, on a float32 copy and with a fresh state, both dropped
    when the next block's turn comes. With an expansion the other matrices of the blocks are updated in the same
    backward pass. Parameters in no block (by default embeddings, final norm, head) are frozen until :meth:`close`.

    Groups hold every parameter that is ever trained and never change, so schedulers, clipping and trainers work as
    usual. Their `kind` is "block", "always", "u" or "v"; norms and biases have groups without weight decay. What is
    frozen at the moment has no gradient.

    Batches of one step: accumulate gradients with losses divided by their number, as trainers do.

    Several processes: leave the model unwrapped, gradients are averaged here (`gnomon.core.train` knows). Under a
    launcher all is frozen until the first forward pass, because Accelerate, and so the Trainer, leaves a model on
    a GPU unwrapped if nothing in it is trainable; on CPUs it wraps even that.

    Args:
        model: a Transformers decoder, or any module if `blocks` lists names.
        base: a class of Adam's family.
        lr, betas, eps, weight_decay: of `base`; the paper's learning rate for mathematics, 1e-6 for instructions.
        blocks, always_active, include_embeddings, include_head: see :func:`make_blocks`.
        switch_every: K, steps a block. BAdam suggests n/(B·D), clipped to [50, 100].
        order: see :class:`Turns`.
        expansion: :class:`LoRAExpansion`, :class:`SGDExpansion` or None.
        scope: which inactive matrices take part: "all" (the default), or "partial": those in deeper layers, whose
            derivatives are needed anyway.
        master_dtype: of the active block's copy and of adapters.
        generator: of the order; adapters are drawn from its seed. None is seed 0.

    Raises:
        UsageError: an option out of range, a contradiction, a name that matches nothing, a model that is wrapped,
            sharded, in float16 or already has such an optimizer.
    """

    averages_gradients = True
    """For training loops: over the ranks, so that the model is left unwrapped."""

    def __init__(
        self,
        model: nn.Module,
        base: Any = torch.optim.AdamW,
        *,
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        blocks: Kind | Sequence[Sequence[str]] = "layer",
        switch_every: int = 100,
        order: Order = "random",
        always_active: Sequence[str] = (),
        include_embeddings: bool = False,
        include_head: bool = False,
        expansion: Expansion | None = None,
        scope: Literal["all", "partial"] | None = None,
        master_dtype: torch.dtype = torch.float32,
        generator: torch.Generator | None = None,
    ) -> None:
        require_base(base)
        hyper: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_options(hyper, switch_every, expansion, scope, master_dtype, generator)
        hyper["betas"] = tuple(betas)
        check_model(model)
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        self.partition = make_blocks(
            model,
            blocks,
            always_active=always_active,
            include_embeddings=include_embeddings,
            include_head=include_head,
        )
        self.turns = self._make_turns(order, generator)
        self.model, self.base, self.switch_every = model, base, switch_every
        self.expansion, self.scope = expansion, scope or "all"
        self.master_dtype, self.step_in_block = master_dtype, 0
        self.dropped_bytes = 0
        """Of the whole state when the last turn ended, just before the block's was dropped."""
        self._params: dict[str, Tensor] = dict(model.named_parameters())
        self._found = {name: p.requires_grad for name, p in self._params.items()}
        linears: dict[str, nn.Module] = {}
        if isinstance(expansion, LoRAExpansion):
            linears = pick_targets(linears_of(model, self.partition.depths), expansion.targets)
        self.adapters: Adapters | None = None
        if isinstance(expansion, LoRAExpansion) and expansion.rank:
            draw = torch.Generator().manual_seed((generator.initial_seed() + 1) % 2**63)
            self.adapters = Adapters(linears, expansion, dtype=master_dtype, generator=draw)
        self.on_the_fly = OnTheFly(expansion) if isinstance(expansion, SGDExpansion) else None
        self._block: MasteredOptimizer | None = None
        self._kept: MasteredOptimizer | None = None
        self._handles: list[Any] = []
        self._closed = self._built = self._freed = False
        super().__init__(self._groups(hyper), hyper)
        self._built = True
        self._group_of = {p: group for group in self.param_groups for p in group["params"]}
        self._names = {
            p: name
            for group in self.param_groups
            for p, name in zip(group["params"], group["param_names"], strict=True)
        }
        for p in self._params.values():
            p.requires_grad_(False)
        object.__setattr__(model, MARK, True)
        self._activated = False
        self._watch = _runner(model).register_forward_pre_hook(self._watching(_runner(model)))
        if not launched():
            self._activate()

    # ------------------------------------------------------------------------------------------ asking

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.partition.blocks

    def active_block(self) -> Block:
        """The block whose turn it is (of several the first)."""
        return self.active_blocks()[0]

    def active_blocks(self) -> tuple[Block, ...]:
        """All blocks whose turn it is: one, unless a subclass takes several."""
        return tuple(self.blocks[i] for i in self.turns.active)

    def expanded(self) -> list[str]:
        """J: names of the parameters outside the active block that the next backward pass may update."""
        if self.expansion is None:
            return []
        active = {name for i in self.turns.active for name in self.blocks[i].parameters}
        deepest = max(self.blocks[i].depth for i in self.turns.active)
        if self.adapters is not None:
            able = [f"{name}.weight" for name in self.adapters.modules]
        elif isinstance(self.expansion, SGDExpansion):
            every = [name for block in self.blocks for name in block.parameters]
            able = [name for name in every if self.expansion.vectors or self._params[name].ndim > 1]
        else:
            able = []
        depths = self.partition.depths
        return [
            name for name in able if name not in active and (self.scope == "all" or depths[name] > deepest)
        ]

    def memory_report(self) -> dict[str, int]:
        """Bytes that are held now, by kind; right after a backward pass `gradients` is at its largest."""
        adapters = [p for group in self.param_groups if group["kind"] in "uv" for p in group["params"]]
        own = {id(p) for p in adapters}
        weights = [p for p in self.model.parameters() if id(p) not in own]
        report = {"weights": tensor_bytes(weights), "adapters": tensor_bytes(adapters)}
        masters = [state["master"] for state in self.state.values() if "master" in state]
        every = [t for state in self.state.values() for t in state.values() if isinstance(t, Tensor)]
        report |= {"masters": tensor_bytes(masters), "moments": tensor_bytes(every) - tensor_bytes(masters)}
        grads = [t.grad for t in [*weights, *adapters, *masters] if t.grad is not None]
        return report | {"gradients": tensor_bytes(grads)}

    # ------------------------------------------------------------------------------------------ training

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the blocks decide what is trained."""
        if getattr(self, "_built", False):
            raise UsageError(
                "Groups can't be added to a BlockOptimizer, whose blocks decide what is trained when. Name "
                "the parameters "
                "in blocks= or always_active=."
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One Adam step of the active block, of what is always active, and of the adapters of J.

        Returns:
            what `closure` returned, called with gradients switched on.

        Raises:
            NumericalFailure: a gradient isn't finite; the active block, adapters and all states are as before.
            UsageError: nothing to do: the active block or all adapters of J got no gradient.
        """
        self._require_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_gradients()
        if self._block is None:
            self._block = self._inner({"block"}, self._active_params())
        self._block.step()
        kept = {p for g in self.param_groups if g["kind"] != "block" for p in g["params"]}
        if kept and self._kept is None:
            self._kept = self._inner({"always", "u", "v"}, kept)
        if self._kept is not None:
            self._kept.step()
        self._publish()
        self.step_in_block += 1
        if self.step_in_block == self.switch_every:
            self.dropped_bytes = state_bytes(self)
            self._switch()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in every optimizer; also forgets what on-the-fly updates saw in a backward pass that is given up."""
        super().zero_grad(set_to_none)
        if self.on_the_fly is not None:
            self.on_the_fly.forget()

    def merge(self) -> None:
        """Fold the adapters into the weights: W_j ← W_j + C_j, U_j ← 0, and their states begin anew."""
        if self.adapters is None:
            return
        masters = {} if self._block is None else {p: m for p, m in self._block.pairs() if m is not p}
        self.adapters.merge(masters)
        if self._kept is not None:
            for group in self.param_groups:
                for p in group["params"] if group["kind"] in "uv" else ():
                    self._kept.optimizer.state.pop(p, None)
        self._publish()

    def close(self, *, merge: bool = True) -> None:
        """Leave a plain model: adapters merged (or dropped), hooks gone, `requires_grad` as it was found."""
        if self._closed:
            return
        if merge:
            self.merge()
        self._detach()
        self._watch.remove()
        if self.adapters is not None:
            self.adapters.remove()
        for name, p in self._params.items():
            p.requires_grad_(self._found[name])
        if self._freed:
            self.model.enable_input_require_grads()  # type: ignore[operator]
        if hasattr(self.model, MARK):
            object.__delattr__(self.model, MARK)
        self._block = self._kept = self.adapters = None
        self.state.clear()
        self._closed = True

    # ---------------------------------------------------------------------------------------- checkpoints

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, which would have no blocks and hooks.

        Raises:
            UsageError: always.
        """
        raise no_copy(self)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights: whose turn it is and for how long, states and wide copies, draws to come."""
        packed, start = [], 0
        for group in self.param_groups:
            own = {key: value for key, value in group.items() if key != "params"}
            packed.append({**own, "params": list(range(start, start + len(group["params"])))})
            start += len(group["params"])
        return {
            "state": {},
            "param_groups": packed,
            "bread": {
                "settings": self._settings(),
                "world": world_size(),
                "turns": self.turns.state_dict(),
                "step_in_block": self.step_in_block,
                "block": None if self._block is None else self._block.state_dict(),
                "kept": None if self._kept is None else self._kept.state_dict(),
                "on_the_fly": None if self.on_the_fly is None else self.on_the_fly.state_dict(),
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict()` was taken, in the middle of a block too. Load the model's weights first.

        Raises:
            UsageError: the state is of another optimizer, another schedule of blocks, or another number of processes.
        """
        self._require_open()
        saved = state_dict.get("bread")
        if saved is None:
            raise UsageError(
                "The saved state isn't a BlockOptimizer's: it names no blocks. Resume with the optimizer "
                "that wrote it, "
                "or load the model alone and begin a new run."
            )
        self._require_same(saved)
        for own, old in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update({key: value for key, value in old.items() if key != "params"})
        self.turns.load_state_dict(saved["turns"])
        self.step_in_block = saved["step_in_block"]
        if self._activated:
            self._activate()
        self._block = self._kept = None
        if saved["block"] is not None:
            self._block = self._inner({"block"}, self._active_params())
            self._block.load_state_dict(saved["block"])
        if saved["kept"] is not None:
            kept = {p for g in self.param_groups if g["kind"] != "block" for p in g["params"]}
            self._kept = self._inner({"always", "u", "v"}, kept)
            self._kept.load_state_dict(saved["kept"])
        if self.on_the_fly is not None:
            self.on_the_fly.load_state_dict(saved["on_the_fly"])
        self._publish()

    def _settings(self) -> dict[str, Any]:
        """What must be equal for a saved state to mean the same here."""
        expansion = None if self.expansion is None else asdict(self.expansion)
        return {
            "kind": type(self).__name__,
            "expansion": "none" if expansion is None else f"{type(self.expansion).__name__} {expansion}",
            "scope": self.scope if self.expansion is not None else "none",
            "switch_every": self.switch_every,
            "order": self.turns.order,
            "blocks": [list(block.parameters) for block in self.blocks],
            "always": list(self.partition.always),
        }

    def _require_same(self, saved: Mapping[str, Any]) -> None:
        own, old = self._settings(), saved["settings"]
        if changed := [name for name in own if own[name] != old.get(name)]:
            name = changed[0]
            told = (
                f"{name}={old.get(name)!r} there, {own[name]!r} here"
                if name not in ("blocks", "always")
                else f"{len(old[name])} {name} there, {len(own[name])} here, or others"
            )
            raise UsageError(
                f"The saved state belongs to another schedule of blocks: {told}. The turn and step within it "
                "would mean "
                "something else. Build the optimizer with the saved settings, or load the model alone and begin anew."
            )
        if saved["world"] != world_size():
            raise UsageError(
                f"The saved state was written by {saved['world']} processes, here are {world_size()}: unless "
                "every process "
                "reads another share of the same batches, steps and draws are others. Launch as many processes; if the "
                "batches are the same, set state['bread']['world'] to the new number."
            )

    # ------------------------------------------------------------------------------------------- inside

    def _make_turns(self, order: str, generator: torch.Generator) -> Turns:
        return Turns([block.depth for block in self.partition.blocks], order, generator)

    def _groups(self, hyper: Mapping[str, Any]) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = []
        inside = [name for block in self.partition.blocks for name in block.parameters]
        for kind, names in (("block", inside), ("always", list(self.partition.always))):
            for vectors in (False, True):
                own = [
                    (name, self._params[name]) for name in names if (self._params[name].ndim < 2) == vectors
                ]
                decay = 0.0 if vectors else hyper["weight_decay"]
                groups.append({"kind": kind, "params": own, **hyper, "weight_decay": decay})
        if self.adapters is not None and isinstance(self.expansion, LoRAExpansion):
            pairs = {name: self.adapters.pair(name) for name in self.adapters.modules}
            for kind, position, ratio in (("v", 1, 1.0), ("u", 0, self.expansion.lr_ratio_u)):
                own = [(f"{name}.bread_{kind}", pair[position]) for name, pair in pairs.items()]
                rates = {"lr": hyper["lr"] * ratio, "weight_decay": 0.0}
                groups.append({"kind": kind, "params": own, **hyper, **rates})
        return [group for group in groups if group["params"]]

    def _active_params(self) -> set[Tensor]:
        return {self._params[name] for i in self.turns.active for name in self.blocks[i].parameters}

    def _inner(self, kinds: set[str], params: set[Tensor]) -> MasteredOptimizer:
        rows = [
            (group, [p for p in group["params"] if p in params])
            for group in self.param_groups
            if group["kind"] in kinds
        ]
        return MasteredOptimizer(self.base, [row for row in rows if row[1]], self.master_dtype)

    def _switch(self) -> None:
        for p in self._active_params():
            p.grad = None
        self._block = None
        self.step_in_block = 0
        self.turns.advance()
        self._activate()
        self._publish()

    def _activate(self) -> None:
        """Let exactly those parameters have gradients that the present turn updates."""
        self._detach()
        trained = self._active_params()
        trained |= {p for group in self.param_groups if group["kind"] == "always" for p in group["params"]}
        expanded = self.expanded()
        if self.adapters is not None:
            for name in expanded:
                trained |= set(self.adapters.pair(name.removesuffix(".weight")))
        stray = [] if self.on_the_fly is None else [(name, self._params[name]) for name in expanded]
        wanted = trained | {p for _, p in stray}
        for group in self.param_groups:
            for p in group["params"]:
                p.requires_grad_(p in wanted)
                if p not in wanted:
                    p.grad = None
        if self.on_the_fly is not None:
            self.on_the_fly.attach([(name, p, self._group_of[p]) for name, p in stray])
        if launched():
            for p in trained:
                self._handles.append(p.register_post_accumulate_grad_hook(_average))  # type: ignore[no-untyped-call]
        self._activated = True
        logger.debug("active: %s, %d expanded", self.active_block().name, len(expanded))

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.on_the_fly is not None:
            self.on_the_fly.detach()

    def _watching(self, runner: nn.Module) -> Callable[..., None]:
        """A function and no method: a deep copy of the model would copy the optimizer along with a method."""

        def watch(module: nn.Module, _: Any) -> None:
            if module is runner and torch.is_grad_enabled():
                self._before_forward()

        return watch

    def _before_forward(self) -> None:
        if not self._activated:
            copy_from_first([*self.model.parameters(), *self.model.buffers()])
            self.turns.load_state_dict(from_first(self.turns.state_dict()))
            self._activate()
        if self.step_in_block == 0:
            check_reentrant(self.model)
            self._free_inputs()
        check_unwrapped(self.model)
        if self.on_the_fly is not None:
            check_autocast(next(iter(self._params.values())).device.type)

    def _free_inputs(self) -> None:
        """Undo what gradient_checkpointing_enable() does for reentrant checkpointing.

        It makes the embeddings' output require a gradient, so that every backward pass would run to the bottom and
        block descent's saving be lost. Checkpointing that isn't reentrant has no need of it.
        """
        if getattr(self.model, "_require_grads_hooks", None):
            self.model.disable_input_require_grads()  # type: ignore[operator]
            self._freed = True
            logger.info(
                "Embeddings no longer pass on gradients, so backward passes stop at the active block."
            )

    def _publish(self) -> None:
        """Show the states under their parameters, where tools that read `optimizer.state` look."""
        self.state.clear()
        for inner in (self._block, self._kept):
            if inner is not None:
                self.state.update({p: own for p, own in inner.view().items() if own})

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("This optimizer was closed. Build a new one to train on.")

    def _require_gradients(self) -> None:
        """One look at all gradients before anything changes; one synchronisation with the device."""
        if self.on_the_fly is not None:
            self.on_the_fly.require_finite()
        held = [p for p in self._names if p.grad is not None]
        for p in held:
            if p.grad is not None and p.grad.is_sparse:
                raise UsageError(sparse(self._names[p]))
        active = self._active_params()
        if not any(p in active for p in held):
            raise UsageError(
                f"The active block {self.active_block().name!r} got no gradient. Call step() after a backward "
                "pass of this "
                "very model, with gradient checkpointing non-reentrant."
            )
        if self.adapters is not None:
            names = [name.removesuffix(".weight") for name in self.expanded()]
            if names and all(p.grad is None for name in names for p in self.adapters.pair(name)):
                raise UsageError(
                    f"None of {len(names)} adapters got a gradient: the model doesn't call its linear maps as "
                    "modules, so "
                    "LoRA can't reach them. Use SGDExpansion()."
                )
        zeros = torch.stack(
            [(p.grad * 0).sum().float().to(held[0].device) for p in held if p.grad is not None]
        )
        if not bool((zeros == 0).all()):
            bad = [self._names[p] for p, fine in zip(held, (zeros == 0).tolist(), strict=True) if not fine]
            raise NumericalFailure(
                f"The gradients of {len(bad)} of {len(held)} parameters hold NaN or infinity, first that of "
                f"{bad[0]}. The "
                "active block, adapters and all states are as before this step. Lower the learning rate, clip "
                "gradients, or skip the batch."
            )


def _average(p: Tensor) -> None:
    if p.grad is not None:
        average_(p.grad)


def _runner(model: nn.Module) -> nn.Module:
    """Where a forward pass can be seen even if a trainer has replaced the model's own `forward`."""
    try:
        return decoder_stack(model).runner
    except UsageError:
        return model
