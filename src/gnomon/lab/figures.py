"""Drawing a study's figures, each once for light and once for dark pages."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .records import Record, frame
from .stage import Done

if TYPE_CHECKING:
    from .engine import FigureFunction, Progress

INK = {"light": "#1f2328", "dark": "#e6e6e3"}
FAINT = {"light": "#d7d9dc", "dark": "#3c4046"}
# Okabe and Ito's colours, distinguishable with colour-vision deficiencies; black is left to the ink.
CYCLE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]


def style(theme: str) -> dict[str, Any]:
    """Matplotlib settings of a theme: transparent ground, page's ink, no frame on top and right."""
    from cycler import cycler

    ink, faint = INK[theme], FAINT[theme]
    return {
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "savefig.bbox": "tight",
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": faint,
        "axes.grid": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=CYCLE),
        "legend.frameon": False,
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "svg.fonttype": "path",
        "svg.hashsalt": "gnomon",
        "figure.constrained_layout.use": True,
    }


def draw(
    figures: list[FigureFunction],
    records: list[Record],
    done: dict[str, list[Done]],
    folder: Path,
    progress: Progress,
) -> list[dict[str, str]]:
    """Draw every figure as `<name>.svg` and `<name>.dark.svg`.

    A figure that raises is left out and said so: it must not cost the run, and `gnomon report` draws it again
    once its code is mended.

    Returns:
        Name and caption (the docstring's first paragraph) of each figure drawn.
    """
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    table, drawn = frame(records), []
    for figure in figures:
        name = figure.__name__
        try:
            for theme, suffix in (("light", ".svg"), ("dark", ".dark.svg")):
                with plt.rc_context(style(theme)):
                    figure(table, done, folder / f"{name}{suffix}")
        except Exception as error:
            progress(f"figure {name} could not be drawn: {type(error).__name__}: {error}")
            continue
        finally:
            plt.close("all")
        caption = " ".join((inspect.getdoc(figure) or "").split("\n\n")[0].split())
        drawn.append({"name": name, "caption": caption})
    return drawn
