"""What report and board share: templates, the security policy of a page, numbers in print, small plots.

Every page is one file that works from `file://`: style and script are inlined and allowed by their SHA-256,
images are `data:` addresses, everything else is forbidden by the policy. Text reaches a page only through
autoescaping.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

__all__ = [
    "GRADES",
    "VERDICTS",
    "Plot",
    "interval_text",
    "json_block",
    "number",
    "plot",
    "render",
    "shared_span",
]

VERDICTS = {
    "holds": "the evidence lies wholly on the claimed side",
    "fails": "the evidence lies wholly on the other side",
    "undecided": "the evidence does not settle it at this scale",
}
GRADES = {
    "X": "exact or numeric check",
    "R": "real pretrained model, engine, data or timing",
    "T": "model trained inside the study; speaks for that size only",
    "S": "simulator with parameters we chose; no support for a statement about LLMs",
}
SYMBOLS = {"holds": "✓", "fails": "✕", "undecided": "?"}


def _asset(name: str) -> str:
    return files("gnomon.lab").joinpath("templates", name).read_text("utf-8")


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def number(value: float | int | None, decimals: int | None = None) -> str:
    """A number for readers: true minus sign, thin grouping, about four significant digits."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if not math.isfinite(value):
        return str(value)
    if decimals is not None:
        text = f"{value:,.{decimals}f}"
    elif isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        text = f"{int(value):,}"
    elif 1e-3 <= abs(value) < 1e6:
        text = f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = f"{value:.3g}"
    if float(text.replace(",", "")) == 0:
        text = text.lstrip("-")
    return text.replace("-", "−").replace(",", "\u202f")


def decimals_for(low: float | None, high: float | None) -> int | None:
    """Decimals that an interval deserves: one significant digit of its half width, two from 1 to 5.

    None when there is no width to go by, or when it is so small that plain decimals would be unreadable.
    """
    if low is None or high is None or not 0 < high - low < math.inf:
        return None
    half = (high - low) / 2
    exponent = math.floor(math.log10(half))
    digits = -exponent + (half / 10**exponent < 6)
    return max(digits, 0) if digits <= 6 else None


def interval_text(low: float | None, high: float | None) -> str:
    """An interval in words that survive a minus sign: `−0.21 to −0.18`; a missing end is open."""
    if low is None or high is None:
        return "–" if low is high else f"up to {number(high)}" if low is None else f"{number(low)} or more"
    decimals = decimals_for(low, high)
    return f"{number(low, decimals)} to {number(high, decimals)}"


def duration(seconds: float | None) -> str:
    """Seconds as `41 s`, `5 min 02 s` or `1 h 31 min`; a dash for a stage that did not finish."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def compact(value: Any) -> str:
    """A setting on one line: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def json_block(value: Any) -> Markup:
    """JSON for a `<script type="application/json">` element: no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


@dataclass(frozen=True)
class Plot:
    """Positions, in pixels of a strip `width` wide, of an estimate, its interval and a reference line."""

    width: float
    centre: float
    low: float | None
    """None when there is no interval; the edge of the strip when the interval is open on this side."""
    high: float | None
    ends: tuple[float, ...]
    """Where the interval has ends."""
    reference: float | None
    reference_text: str
    label: str


def shared_span(values: list[float | None]) -> tuple[float, float]:
    """The range that shows all `values` with some air on both sides."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return (0.0, 1.0)
    low, high = min(known), max(known)
    air = (high - low) * 0.1 or abs(high) * 0.1 or 1.0
    return (low - air, high + air)


def plot(
    estimate: float | None,
    low: float | None,
    high: float | None,
    *,
    reference: float | None = None,
    span: tuple[float, float] | None = None,
    width: float = 240.0,
) -> Plot | None:
    """Lay out one estimate with its interval.

    Args:
        estimate, low, high: the number and its interval, either may be missing.
        reference: value of the vertical line (a claim's bound, or zero).
        span: range of the axis; by default all of the above with some air.
        width: pixels.

    Returns:
        None when there is nothing to draw.
    """
    if estimate is None and (low is None or high is None):
        return None
    interval = low is not None or high is not None
    left, right = span if span is not None else shared_span([estimate, low, high, reference])
    middle = estimate if estimate is not None else ((low or 0.0) + (high or 0.0)) / 2

    def at(value: float) -> float:
        share = (value - left) / (right - left)
        return round(6 + (width - 12) * min(max(share, 0.0), 1.0), 2)

    told = f", 95 % interval {interval_text(low, high)}" if interval else ""
    against = f", held against {number(reference)}" if reference is not None else ""
    shown = number(middle, decimals_for(low, high))
    return Plot(
        width=width,
        centre=at(middle),
        low=at(left if low is None else low) if interval else None,
        high=at(right if high is None else high) if interval else None,
        ends=tuple(at(end) for end in (low, high) if end is not None),
        reference=None if reference is None else at(reference),
        reference_text=number(reference),
        label=f"Estimate {shown}{told}{against}",
    )


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gnomon.lab", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = _asset("style.css"), _asset("page.js")
    environment.globals |= {
        "style": Markup(style),
        "script": Markup(script),
        "policy": (
            f"default-src 'none'; img-src data:; style-src {_csp_hash(style)}; "
            f"script-src {_csp_hash(script)}; base-uri 'none'; form-action 'none'"
        ),
        "grades": GRADES,
        "verdicts": VERDICTS,
        "symbols": SYMBOLS,
    }
    environment.filters |= {
        "number": number,
        "duration": duration,
        "compact": compact,
        "json_block": json_block,
        "decimals_for": decimals_for,
    }
    return environment


def render(template: str, **context: Any) -> str:
    """A whole page from `templates/<template>`."""
    return _environment().get_template(template).render(**context)
