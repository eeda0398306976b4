"""One linear layer as a frozen weight between two rotations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.layers import is_conv1d

from .cayley import norm_bound, rotation, skew
from .config import POETConfig, blocks_of, initial_weight
from .primitives import draw, full_precision, multiply, multiply_ckpt, rotate, transformed

logger = logging.getLogger(__name__)

_SETTINGS = ("seed", "merge_interval", "neumann_terms", "variant")


class POETLinear(nn.Module):
    """y = R_o W R_i x + bias, where W is frozen and only the rotations' numbers q_out and q_in are trained.

    The bias is added after the rotation, so that it stays with its neuron, and is trained as before. q is float32
    or better, whatever the weight's dtype: a step on it is small beside what bfloat16 can hold.

    State: `base_weight` (W̃, permuted), `q_out`, `q_in`, the permutations `perm_out` and `perm_in`, the bias, and
    as extra state the merges and the steps since the last one, with the settings that a resumed run must share.

    Made by :meth:`from_linear`; :func:`apply_poet` puts it into a model.
    """

    q_out: nn.Parameter
    q_in: nn.Parameter
    base_weight: nn.Parameter
    bias: nn.Parameter | None
    perm_out: Tensor
    perm_in: Tensor
    back_out: Tensor
    back_in: Tensor

    def __init__(self, linear: nn.Module, cfg: POETConfig, generator: torch.Generator | None) -> None:
        super().__init__()
        self.cfg = cfg
        self._kind = type(linear) if is_conv1d(linear) else nn.Linear
        weight = _weight_of(linear)
        self.out_features, self.in_features = weight.shape
        self._blocks = blocks_of(self.out_features, cfg), blocks_of(self.in_features, cfg)
        self.merges = 0
        """Merges so far."""
        self.steps = 0
        """Optimizer steps since the last one."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        for side, (n, b) in zip(("out", "in"), self._blocks, strict=True):
            q = torch.zeros(n, b * (b - 1) // 2, dtype=wide, device=weight.device)
            self.register_parameter(f"q_{side}", nn.Parameter(q))
        self.base_weight = nn.Parameter(
            torch.empty(weight.shape, dtype=weight.dtype, device=weight.device), requires_grad=False
        )
        self.register_parameter("bias", linear.bias)  # type: ignore[arg-type]
        w0 = initial_weight(weight, cfg.init, generator)
        for side, d in (("out", self.out_features), ("in", self.in_features)):
            empty = torch.empty(d, dtype=torch.long, device=weight.device)
            self.register_buffer(f"perm_{side}", empty)
            self.register_buffer(f"back_{side}", empty.clone(), persistent=False)
        self._begin(w0, *self.draw(generator))
        self.train(linear.training)

    @classmethod
    def from_linear(
        cls, linear: nn.Module, cfg: POETConfig, generator: torch.Generator | None = None
    ) -> POETLinear:
        """A layer in place of an `nn.Linear` (or Transformers' Conv1D), whose bias it shares.

        Args:
            generator: of the initial weight and the permutations; by default made from `cfg.seed`.

        Raises:
            UsageError: no such layer, a weight that isn't a matrix of real numbers, or block sizes that don't fit.
            NumericalFailure: with init="keep", a weight that isn't finite.
        """
        if reason := why_not(linear):
            raise UsageError(
                f"{type(linear).__name__} {reason}. POET wraps nn.Linear layers with a weight of real numbers."
            )
        require_finite(type(linear).__name__, linear, cfg)
        if generator is None:
            generator = torch.Generator().manual_seed(cfg.seed)
        with torch.no_grad():
            return cls(linear, cfg, generator)

    # ------------------------------------------------------------------------------------------- function

    def rotations(self) -> tuple[Float[Tensor, "n_o b_o b_o"], Float[Tensor, "n_i b_i b_i"]]:
        """The blocks (G_o, G_i), in the permuted frame."""
        return rotation(self.q_out, self.cfg.terms), rotation(self.q_in, self.cfg.terms)

    def effective_weight(self) -> Float[Tensor, "o i"]:
        """W_eff = R_o W R_i, differentiable, in float32 or better even under autocast."""
        with torch.autocast(self.base_weight.device.type, enabled=False):
            g_out, g_in = self.rotations()
            w = transformed(self.base_weight.to(g_out.dtype), g_out, g_in)
            return w.index_select(0, self.back_out).index_select(1, self.back_in)

    @property
    def weight(self) -> Tensor:
        """W_eff in the dtype of the wrapped weight, for code that reads `layer.weight`; computed at each access."""
        return self.effective_weight().to(self.base_weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.cfg.forward == "weight":
            return F.linear(x, self.effective_weight().to(x.dtype), self.bias)
        g_out, g_in = self.rotations()
        product = multiply if self.cfg.forward == "input" else multiply_ckpt
        y = product(x[..., self.perm_in], self.base_weight, g_out, g_in)[..., self.back_out]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dense_rotations(self) -> tuple[Float[Tensor, "o o"], Float[Tensor, "i i"]]:
        """(R_o, R_i) written out, for a look at them: large."""
        g_out, g_in = self.rotations()
        found = []
        for g, back in ((g_out, self.back_out), (g_in, self.back_in)):
            eye = torch.eye(len(back), dtype=g.dtype, device=g.device)
            found.append(rotate(eye, g).mT[back][:, back])  # rows of rotate(I) are columns of Diag(G)
        return found[0], found[1]

    # ---------------------------------------------------------------------------------------------- merging

    def draw(self, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """(p_out, p_in) of the next primitives."""
        ordered = self.cfg.variant == "fs"
        sides = zip((self.out_features, self.in_features), self._blocks, strict=True)
        p_out, p_in = (draw(d, n, b, generator, ordered=ordered) for d, (n, b) in sides)
        return p_out, p_in

    def merge_and_reinit(self, generator: torch.Generator | None = None) -> None:
        """W ← R_o W R_i in float32 or better, rounded once; q ← 0; new permutations. The function stays the same.

        The moments of q in an optimizer belong to the old frame: :class:`MergeSchedule` clears them, too.

        Args:
            generator: draws the permutations; by default one made from the seed and the number of merges.

        Raises:
            NumericalFailure: q isn't finite; the layer is then as before.
        """
        self.require_rotation()
        self.reinit(*self.draw(self.generator() if generator is None else generator))

    @torch.no_grad()
    def reinit(self, p_out: Tensor, p_in: Tensor) -> None:
        """The merge itself, with given permutations and without a look at q."""
        w = self.merged()
        self.q_out.zero_()
        self.q_in.zero_()
        self.q_out.grad = self.q_in.grad = None  # of the old frame
        self.merges, self.steps = self.merges + 1, 0
        self._begin(w, p_out, p_in)

    @torch.no_grad()
    def merged(self) -> Float[Tensor, "o i"]:
        """W_eff without autocast and TF32."""
        with full_precision(self.base_weight.device):
            return self.effective_weight()

    def generator(self, index: int = 0) -> torch.Generator:
        """Equal on all ranks and after a resume; another one for each merge and each `index` of a layer."""
        mixed = (self.cfg.seed * 1_000_003 + self.merges + 1) * 1_000_003 + index
        return torch.Generator().manual_seed(mixed % 2**63)

    def to_linear(self) -> nn.Module:
        """The plain layer with the merged weight, of the class that was wrapped.

        Raises:
            NumericalFailure: q isn't finite.
        """
        self.require_rotation()
        w = self.merged().to(self.base_weight.dtype)
        if self._kind is nn.Linear:
            plain: nn.Module = nn.Linear(
                self.in_features, self.out_features, self.bias is not None, device="meta", dtype=w.dtype
            )
        else:
            with torch.device("meta"):
                plain = self._kind(self.out_features, self.in_features)
            w = w.T.contiguous()
        plain.weight = nn.Parameter(w)
        if self.bias is not None:
            plain.bias = self.bias
        return plain.train(self.training)

    @torch.no_grad()
    def _begin(self, w: Tensor, p_out: Tensor, p_in: Tensor) -> None:
        """Take W in its natural order and live in the frame of these permutations."""
        for mine, new in ((self.perm_out, p_out), (self.perm_in, p_in)):
            mine.copy_(new)
        self._invert()
        self.base_weight.copy_(w.index_select(0, self.perm_out).index_select(1, self.perm_in))

    def _invert(self) -> None:
        for side in ("out", "in"):
            back, order = getattr(self, f"back_{side}"), getattr(self, f"perm_{side}").argsort()
            if back.device == order.device:
                back.copy_(order)
            else:  # load_state_dict(…, assign=True) took the permutations off the meta device
                setattr(self, f"back_{side}", order)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> POETLinear:
        """A model that is cast to bfloat16 takes its weight along, but rotations stay in float32 or better."""
        own = {id(t) for q in (self.q_out, self.q_in) for t in (q, q.grad) if t is not None}

        def kept(t: Tensor) -> Tensor:
            new = fn(t)
            return t.to(new.device) if id(t) in own and new.dtype.itemsize < 4 else new

        super()._apply(kept, recurse)  # type: ignore[no-untyped-call]
        return self

    def require_rotation(self) -> None:
        """q is finite, and inside the Neumann form's ‖Q‖₂ < 1, of which leaving is only logged."""
        bounds = torch.stack([norm_bound(q.detach()).max() for q in (self.q_out, self.q_in)])
        bound = float(bounds.max()) if not bounds.is_meta else 0.0
        if not bound < float("inf"):
            raise NumericalFailure(
                f"The rotations of a {self.out_features} x {self.in_features} layer hold NaN or infinity, so merging "
                "would destroy its weight. Resume before that with a lower learning rate of the rotations."
            )
        if bound >= 1 and self.cfg.neumann_terms != "exact":
            norms = [torch.linalg.matrix_norm(skew(q.detach()), 2).max() for q in (self.q_out, self.q_in)]
            if (norm := float(max(norms))) >= 1:
                logger.warning(
                    "‖Q‖₂ = %.3g of a %d x %d layer is past 1 after %d steps, where the Neumann form with %d terms is "
                    "no rotation: the spectrum moves, though the loss may look good. Lower poet_lr, merge more often "
                    "or set neumann_terms='exact'.",
                    norm,
                    self.out_features,
                    self.in_features,
                    self.steps,
                    self.cfg.neumann_terms,
                )

    # -------------------------------------------------------------------------------------------------- state

    def _settings(self) -> tuple[int, ...]:
        cfg = self.cfg
        terms = -1 if cfg.neumann_terms == "exact" else int(cfg.neumann_terms)
        return cfg.seed, cfg.merge_interval, terms, int(cfg.variant == "fs")

    def get_extra_state(self) -> Tensor:
        """Counts and settings as one tensor, since safetensors holds nothing else."""
        return torch.tensor([self.merges, self.steps, *self._settings()])

    def set_extra_state(self, state: Tensor) -> None:
        self.merges, self.steps = int(state[0]), int(state[1])

    def check_state(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Refuse a state that isn't of this layer's kind.

        Raises:
            UsageError: plain weights, or another run's settings.
        """
        name = prefix.removesuffix(".") or type(self).__name__
        if f"{prefix}weight" in state_dict:
            raise UsageError(
                f"The state of {name} is that of a plain or merged layer, but the model is wrapped: its rotations "
                "and permutations are missing. Load it into the plain model and then call apply_poet with init='keep'."
            )
        for side in ("out", "in"):
            perm = state_dict.get(f"{prefix}perm_{side}")
            if isinstance(perm, Tensor) and not perm.is_meta and not _permutes(perm):
                raise UsageError(
                    f"perm_{side} in the state of {name} is no permutation, so outputs would be mixed up without a "
                    "word. The file is damaged: take an earlier checkpoint."
                )
            q, mine = state_dict.get(f"{prefix}q_{side}"), getattr(self, f"q_{side}")
            if isinstance(q, Tensor) and q.shape != mine.shape:
                raise UsageError(
                    f"The state of {name} has rotations of shape {tuple(q.shape)} on its {side} side, the model "
                    f"{tuple(mine.shape)}: it was saved with other block sizes. Build the model with its POETConfig."
                )
        extra = state_dict.get(f"{prefix}_extra_state")
        if not isinstance(extra, Tensor):
            return
        if extra.shape != self.get_extra_state().shape:
            raise UsageError(
                f"The counts in the state of {name} have the shape {tuple(extra.shape)}, not "
                f"{tuple(self.get_extra_state().shape)}. The file is damaged, or of another version of Gnomon."
            )
        theirs = tuple(int(v) for v in extra[2:])
        if theirs != self._settings():
            told = [
                f"{key}={old} there, {new} here"
                for key, old, new in zip(_SETTINGS, _told(theirs), _told(self._settings()), strict=True)
                if old != new
            ]
            raise UsageError(
                f"The state of {name} was saved with other settings ({'; '.join(told)}): the run would go on as "
                "neither of the two. Build the model with the saved settings; to change them on purpose, finish with "
                "merge_poet, save the plain model and wrap it again with init='keep'."
            )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        self.check_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._invert()

    def extra_repr(self) -> str:
        (n_o, b_o), (n_i, b_i) = self._blocks
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.cfg.variant}: {n_o} x {b_o} out, {n_i} x {b_i} in, terms={self.cfg.neumann_terms}, "
            f"{self.cfg.forward}"
        )


def why_not(linear: nn.Module) -> str | None:
    """What stands against wrapping this module, as the end of a sentence; None if nothing."""
    if isinstance(linear, POETLinear):
        return "is wrapped already"
    if not is_conv1d(linear) and not (
        isinstance(linear, nn.Linear) and type(linear).forward is nn.Linear.forward
    ):
        return "is no plain linear layer"
    weight = linear.weight
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return f"has a weight of shape {tuple(getattr(weight, 'shape', ()))}, which is no matrix"
    if not weight.is_floating_point():
        return f"has a weight of dtype {weight.dtype}, so it is quantised"
    if hasattr(weight, "full_tensor"):
        return "is sharded; POET keeps whole copies, so wrap first and use data parallelism"
    return None


def require_finite(name: str, linear: nn.Module, cfg: POETConfig) -> None:
    """A weight that is kept must hold numbers."""
    weight = _weight_of(linear)
    if cfg.init == "keep" and not weight.is_meta and not bool(torch.isfinite(weight).all()):
        raise NumericalFailure(
            f"The {weight.shape[0]} x {weight.shape[1]} weight of {name} holds NaN or infinity, which a rotation would "
            "spread over all of it. Load a sound checkpoint, or use an init other than 'keep'."
        )


def _weight_of(linear: nn.Module) -> Tensor:
    """(outputs, inputs)"""
    weight: Tensor = linear.weight.detach()  # type: ignore[operator]
    return weight.T if is_conv1d(linear) else weight


def _permutes(p: Tensor) -> bool:
    return torch.equal(p.sort().values.long().cpu(), torch.arange(p.numel()))


def _told(settings: tuple[int, ...]) -> tuple[object, ...]:
    seed, interval, terms, fs = settings
    return seed, interval, "exact" if terms == -1 else terms, "fs" if fs else "bs"
