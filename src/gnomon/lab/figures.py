"""Drawing a study's figures once, for light and for dark pages.

A figure is drawn in the light theme; the dark one is the same SVG with the theme's colours exchanged, which
costs nothing and can't show other data.
"""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .records import Record, frame
from .stage import Done

if TYPE_CHECKING:
    from .engine import FigureFunction, Progress

INK, FAINT = "#1f2328", "#d7d9dc"
DARK = {INK: "#e6e6e3", FAINT: "#3c4046"}
# Okabe and Ito's colours, distinguishable with colour-vision deficiencies; black is left to the ink.
CYCLE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]


def style() -> dict[str, Any]:
    """Matplotlib settings: transparent ground, the page's ink, no frame on top and right."""
    from cycler import cycler

    return {
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": FAINT,
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
    import matplotlib.pyplot as plt

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    table, drawn = frame(records), []
    for figure in figures:
        name, open_before = figure.__name__, set(plt.get_fignums())  # a notebook may have its own
        try:
            with plt.rc_context(style()):
                figure(table, done, folder / f"{name}.svg")
            svg = (folder / f"{name}.svg").read_text("utf-8")
        except (Exception, SystemExit) as error:
            progress(f"figure {name} could not be drawn: {type(error).__name__}: {error}")
            continue
        finally:
            for number in set(plt.get_fignums()) - open_before:
                plt.close(number)
        for light, dark in DARK.items():
            svg = svg.replace(light, dark)
        (folder / f"{name}.dark.svg").write_text(svg, "utf-8")
        caption = " ".join((inspect.getdoc(figure) or "").split("\n\n")[0].split())
        drawn.append({"name": name, "caption": caption})
    return drawn
