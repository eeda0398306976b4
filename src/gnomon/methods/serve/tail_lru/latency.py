"""From seconds to blocks: the latency model, the budget that cannot hurt the tail, and an engine's settings.

Everything here is arithmetic on integers and floats: no torch, no engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gnomon.core.errors import UsageError, number

__all__ = ["LatencyModel", "PolicySettings", "settings_for_slo", "tel_safe_budget"]


def tel_safe_budget(history: int, qhat: int, xi: int) -> int:
    r"""Blocks of a conversation that its next turn needs to stay within the threshold.

    .. math:: B = \max(0,\; L + \hat Q - \xi)

    Keeping more than B cannot lower the tail excess latency, so blocks at positions B, B + 1, … may go for free.

    Args:
        history: L, length of the whole history *after* serving, prompt and response included; not what is cached.
        qhat: estimate of the next prompt's length, rounded up.
        xi: threshold, rounded down. All three in one unit (blocks, or tokens).

    >>> tel_safe_budget(10, 2, 5), tel_safe_budget(2, 1, 10)
    (7, 0)
    """
    return max(0, history + qhat - xi)


@dataclass(frozen=True)
class LatencyModel:
    r"""Time to first token of a prefill that isn't batched with others: :math:`\beta + \alpha b`, b uncached blocks.

    Attributes:
        alpha_s_per_block: α, seconds per uncached block, > 0. A block may be a single token.
        beta_s: β, seconds of an empty prefill, ≥ 0.
    """

    alpha_s_per_block: float
    beta_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < number(self.alpha_s_per_block) < math.inf:
            raise UsageError(
                f"LatencyModel: alpha_s_per_block={self.alpha_s_per_block!r} must be a positive number of seconds "
                "per uncached block (1e-4 is 0.1 ms)."
            )
        if not 0 <= number(self.beta_s) < math.inf:
            raise UsageError(
                f"LatencyModel: beta_s={self.beta_s!r} must be seconds ≥ 0; a fit below 0 means too few lengths."
            )

    @classmethod
    def fit(cls, uncached: Sequence[float], seconds: Sequence[float]) -> LatencyModel:
        """Least squares through measured (uncached blocks, seconds); β is clipped at 0 and α fitted again.

        Raises:
            UsageError: fewer than two different lengths, sizes that differ, values that are not finite, or seconds
                that don't grow with the length.
        """
        b, t = np.asarray(uncached, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
        if b.ndim != 1 or b.shape != t.shape or len(np.unique(b)) < 2:
            raise UsageError(
                f"LatencyModel.fit needs seconds for at least two different numbers of uncached blocks, got shapes "
                f"{b.shape} and {t.shape} with {len(np.unique(b))} different lengths."
            )
        if not (np.isfinite(b).all() and np.isfinite(t).all()):
            raise UsageError("LatencyModel.fit: every length and every time must be finite.")
        centred = b - b.mean()
        alpha = float(centred @ t / (centred @ centred))
        beta = float(t.mean() - alpha * b.mean())
        if beta < 0:  # an empty prefill can't take less than no time
            alpha, beta = float(b @ t / (b @ b)), 0.0
        if not alpha > 0:
            raise UsageError(
                f"LatencyModel.fit found {alpha:.3g} s per block: times don't grow with the length, so they measure "
                "something else. Time prefills that aren't batched with others."
            )
        return cls(alpha, beta)

    def seconds(self, uncached: float) -> float:
        """TTFT of so many uncached blocks."""
        return self.beta_s + self.alpha_s_per_block * uncached

    def threshold_blocks(self, slo_s: float) -> int:
        r"""ξ of a threshold in seconds, :math:`\lfloor(\xi_s-\beta)/\alpha\rfloor`: whole blocks, rounded down.

        Raises:
            UsageError: `slo_s` is negative, not a number, or below β, which no cache can reach.
        """
        if not number(slo_s) >= 0:
            raise UsageError(f"A threshold of {slo_s!r} s must be a number ≥ 0, in seconds.")
        if slo_s < self.beta_s:
            raise UsageError(
                f"A threshold of {slo_s:g} s lies below the {self.beta_s:g} s that an empty prefill takes: no cache "
                "can reach it. Take a larger one."
            )
        blocks = (slo_s - self.beta_s) / self.alpha_s_per_block
        if blocks > 2**53:
            raise UsageError(
                f"A threshold of {slo_s:g} s is {blocks:.3g} blocks, more than any history has. Is it in milliseconds?"
            )
        return math.floor(blocks * (1 + 4e-16) + 1e-12)  # 0.15 s / 1e-4 s is 1500, not 1499.9999999999998


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """ξ and Q̂ of an engine, in tokens and in its blocks.

    Attributes:
        xi_tokens, xi_blocks: threshold, rounded down.
        qhat_tokens, qhat_blocks: estimate of the next prompt, rounded up.
        block_size: tokens of a block.
    """

    xi_tokens: int
    qhat_tokens: int
    block_size: int = 1

    def __post_init__(self) -> None:
        for name, low in (("xi_tokens", 0), ("qhat_tokens", 0), ("block_size", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise UsageError(f"{name}={value!r} must be a whole number ≥ {low}.")

    @property
    def xi_blocks(self) -> int:
        """Threshold in whole blocks, rounded down."""
        return self.xi_tokens // self.block_size

    @property
    def qhat_blocks(self) -> int:
        """Estimate of the next prompt in blocks, rounded up."""
        return -(-self.qhat_tokens // self.block_size)

    def budget_blocks(self, history_tokens: int) -> int:
        """:func:`tel_safe_budget` in blocks; the history is rounded up, so that no needed block is called safe."""
        return tel_safe_budget(-(-history_tokens // self.block_size), self.qhat_blocks, self.xi_blocks)


def settings_for_slo(
    slo_s: float,
    *,
    seconds_per_token: float,
    beta_s: float = 0.0,
    qhat_tokens: int = 200,
    block_size: int = 1,
    margin: float = 0.75,
) -> PolicySettings:
    """ξ and Q̂ for an SLO on the time to first token.

    A trimmed turn lands exactly on ξ when its prompt is as long as Q̂, and beyond it when it is longer. So ξ is set a
    bit below the SLO that is reported, `margin` times it; ξ at the SLO raised violations where this was measured.

    Args:
        slo_s: the SLO in seconds.
        seconds_per_token: α of the engine; measure it with :meth:`LatencyModel.fit`.
        margin: ξ as a share of the SLO, in (0, 1].

    >>> settings_for_slo(0.2, seconds_per_token=1e-4, block_size=16)
    PolicySettings(xi_tokens=1500, qhat_tokens=200, block_size=16)
    """
    if not 0 < number(margin) <= 1:
        raise UsageError(f"margin={margin!r} must be a share of the SLO in (0, 1].")
    if not number(slo_s) > 0:
        raise UsageError(f"slo_s={slo_s!r} must be a positive number of seconds.")
    xi = LatencyModel(seconds_per_token, beta_s).threshold_blocks(slo_s * margin)
    return PolicySettings(xi_tokens=xi, qhat_tokens=qhat_tokens, block_size=block_size)
