"""How long a step takes: T = a + b n + c L for n rows with L tokens of context in all.

Paper: Pace's predictor, refitted by least squares over a window of observed steps.
Inferred: coefficients are kept non-negative, since Algorithm 1 needs a T that grows with n and L, and least squares on
       steps in which n and L grew together can return b < 0 or c < 0.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, overload

import numpy as np
from jaxtyping import Float

from gnomon.core.errors import GnomonError, UsageError, number

__all__ = ["H200_32B", "LatencyPredictor", "fit_latency"]

H200_32B = (6.991055847584451e-3, 3.9378319196954575e-5, 1.427312349692437e-8)
"""a, b, c of a 32B model on 8 H200 (tensor-parallel, bfloat16), from the authors' repository."""
_TOLERANCE = 1e-12
"""Relative singular value below which columns count as collinear."""


def fit_latency(
    n: Sequence[float] | Float[np.ndarray, " N"],
    L: Sequence[float] | Float[np.ndarray, " N"],
    seconds: Sequence[float] | Float[np.ndarray, " N"],
) -> tuple[float, float, float]:
    """Non-negative least squares of seconds on 1, n and L.

    The optimum is plain least squares on those columns that it uses, so all seven sets of columns are tried and the
    best non-negative fit is taken; columns are centred (with the constant) and scaled first. Sets with collinear
    columns are passed over: a smaller one fits as well.

    Raises:
        UsageError: fewer than one observation, or numbers that aren't finite.
    """
    columns = np.stack([np.ones(len(n)), np.asarray(n, dtype=float), np.asarray(L, dtype=float)], axis=1)
    y = np.asarray(seconds, dtype=float)
    if not len(y) or not np.isfinite(columns).all() or not np.isfinite(y).all():
        raise UsageError(f"A fit needs finite observations, at least one; got {len(y)}.")
    best, found = math.inf, np.zeros(3)
    for size in (1, 2, 3):
        for used in combinations(range(3), size):
            coefficients = _least_squares(columns[:, used], y, constant=used[0] == 0)
            if coefficients is None or (coefficients < 0).any():
                continue
            error = float(((columns[:, used] @ coefficients - y) ** 2).sum())
            if error < best:
                best, found = error, np.zeros(3)
                found[list(used)] = coefficients
    return float(found[0]), float(found[1]), float(found[2])


def _least_squares(
    x: Float[np.ndarray, "N k"], y: Float[np.ndarray, " N"], *, constant: bool
) -> Float[np.ndarray, " k"] | None:
    """Coefficients, or None where columns are collinear; the first column is the constant if `constant`."""
    middle = x.mean(0) if constant else np.zeros(x.shape[1])
    rest = x[:, 1:] - middle[1:] if constant else x
    target = y - y.mean() if constant else y
    scale = np.abs(rest).max(0) if rest.shape[1] else np.zeros(0)
    if (scale == 0).any():
        return None
    slopes, _, rank, _ = np.linalg.lstsq(rest / scale, target, rcond=_TOLERANCE)
    if rank < rest.shape[1]:
        return None
    slopes = slopes / scale
    found: Float[np.ndarray, " k"] = slopes
    if constant:
        found = np.concatenate(([y.mean() - middle[1:] @ slopes], slopes))
    return found


class LatencyPredictor:
    """T(n, L) = a + b n + c L, in seconds, learned from the engine's own steps.

    Without coefficients it is *uncalibrated* until `min_samples` steps were recorded: planners then run everything and
    only observe. With coefficients it predicts from the start. Later it is refitted when a step is recorded and
    `refit_every_s` have gone by.

    Args:
        a, b, c: seconds, seconds a row, seconds a token of context; finite, >= 0; all or none.
        window: observations kept.
        refit_every_s: 0 refits at each step.
        min_samples: fewest observations for a fit.

    Raises:
        UsageError: a value outside its range, or only some coefficients.
    """

    def __init__(
        self,
        a: float | None = None,
        b: float | None = None,
        c: float | None = None,
        window: int = 200,
        refit_every_s: float = 600.0,
        min_samples: int = 32,
    ) -> None:
        given = [value for value in (a, b, c) if value is not None]
        if len(given) not in (0, 3) or not all(0 <= number(value) < math.inf for value in given):
            raise UsageError(
                f"LatencyPredictor: a={a}, b={b}, c={c} must be finite numbers >= 0, all or none of them; a negative "
                "one would make more rows cheaper, and the planner wrong."
            )
        if window < 1 or not 1 <= min_samples <= window:
            raise UsageError(
                f"LatencyPredictor: window={window} must be at least 1, and min_samples={min_samples} from 1 to it."
            )
        if not number(refit_every_s) >= 0:
            raise UsageError(f"LatencyPredictor: refit_every_s={refit_every_s} must be >= 0.")
        self.a, self.b, self.c = (float(v) for v in given) if given else (0.0, 0.0, 0.0)
        self.calibrated = bool(given)
        self.window, self.refit_every_s, self.min_samples = window, refit_every_s, min_samples
        self.refits = 0
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=window)
        self._fitted_at: float | None = None

    def __repr__(self) -> str:
        if not self.calibrated:
            return f"LatencyPredictor(uncalibrated, {len(self._seen)} of {self.min_samples} steps)"
        return f"LatencyPredictor(a={self.a:.4g}, b={self.b:.4g}, c={self.c:.4g})"

    @overload
    def predict(self, n: float, L: float) -> float: ...
    @overload
    def predict(
        self,
        n: Float[np.ndarray, " N"],
        L: Float[np.ndarray, " N"],
    ) -> Float[np.ndarray, " N"]: ...
    def predict(self, n: Any, L: Any) -> Any:
        """T of a step with n rows and L tokens of context, in seconds, >= 0."""
        return self.a + self.b * n + self.c * L

    def record(self, n: float, L: float, seconds: float, now: float | None = None) -> bool:
        """Note a step that was run, and refit when that is due.

        Steps of zero, negative or infinite length are ignored (a clock that jumped). Don't record steps that compile
        or warm up.

        Args:
            now: time on any steady clock; the monotonic one without it.

        Returns:
            whether coefficients were fitted anew.
        """
        if not 0 < number(seconds) < math.inf or not (number(n) >= 0 and number(L) >= 0):
            return False
        self._seen.append((float(n), float(L), float(seconds)))
        now = time.monotonic() if now is None else now
        if self._fitted_at is None and self.calibrated:
            self._fitted_at = now  # given coefficients count from the first step on
        due = self._fitted_at is None or now - self._fitted_at >= self.refit_every_s
        if not due or len(self._seen) < self.min_samples:
            return False
        self._fitted_at = now
        return self.refit()

    def refit(self) -> bool:
        """Fit all coefficients to the window now; False, and no change, with fewer than `min_samples` steps in it."""
        if len(self._seen) < self.min_samples:
            return False
        self.a, self.b, self.c = fit_latency(*np.array(self._seen).T)
        self.calibrated = True
        self.refits += 1
        return True

    def mape(self) -> float:
        """Mean absolute error in the window as a share of the measured time; NaN without observations."""
        if not self._seen:
            return math.nan
        n, total, seconds = np.array(self._seen).T
        return float(np.mean(np.abs(self.predict(n, total) - seconds) / seconds))

    def save(self, path: str | Path) -> None:
        """Write settings, coefficients and window as JSON."""
        data = {
            "coefficients": [self.a, self.b, self.c] if self.calibrated else None,
            "window": self.window,
            "refit_every_s": self.refit_every_s,
            "min_samples": self.min_samples,
            "seen": [list(one) for one in self._seen],
        }
        Path(path).write_text(json.dumps(data, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> LatencyPredictor:
        """Read what :meth:`save` wrote.

        Raises:
            GnomonError: no such file, or not what :meth:`save` writes.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            coefficients = data["coefficients"] or (None, None, None)
            a, b, c = coefficients
            found = cls(a, b, c, data["window"], data["refit_every_s"], data["min_samples"])
            for n, total, seconds in data["seen"]:
                found._seen.append((float(n), float(total), float(seconds)))
        except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
            raise GnomonError(
                f"{path} holds no latency predictor ({error}). Write one with .save()."
            ) from error
        return found
