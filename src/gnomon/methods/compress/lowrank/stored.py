"""A low-rank model on disk: `X.a` (m, k) and `X.b` (k, n) in place of `X.weight`, and the ranks in `config.json`.

Here:  the form as `core.forms` knows it, and what `quantization_config` says.
Not here: making such a folder (`apply`), loading it with Transformers (`gnomon.hf`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gnomon.core.checkpoints import CONFIG, Checkpoint
from gnomon.core.errors import GnomonError
from gnomon.core.forms import Form, Groups
from gnomon.core.safe_files import Entry

NAME, VERSION = "lowrank", 1
KEY = "quantization_config"
"""Where `config.json` holds the ranks: it is there that Transformers looks for how to prepare a model."""
A, B, BIAS = ".a", ".b", ".bias"


def stated(config: Mapping[str, Any]) -> dict[str, int]:
    """Stored name of each low-rank layer -> its rank, from a `config.json`.

    Raises:
        GnomonError: no such table, or one of another version than this Gnomon reads.
    """
    table = config.get(KEY)
    return ranks_of(table if isinstance(table, Mapping) else {})


def ranks_of(table: Mapping[str, Any]) -> dict[str, int]:
    """As :func:`stated`, of the table itself."""
    if table.get("quant_method") != NAME or table.get("version") != VERSION:
        raise GnomonError(
            f"{KEY} says quant_method={table.get('quant_method')!r} and version={table.get('version')!r}; this "
            f"Gnomon reads {NAME!r} and {VERSION}. Use the version of Gnomon that wrote it, or a newer one."
        )
    ranks = table.get("ranks")
    if not isinstance(ranks, dict) or not ranks:
        raise GnomonError(f"{KEY} has no table of ranks. The {CONFIG} is damaged.")
    for name, rank in ranks.items():
        if not isinstance(name, str) or type(rank) is not int or rank < 1:
            raise GnomonError(
                f"{KEY} says that {name!r} has rank {rank!r}, which is none. The {CONFIG} is damaged."
            )
    return dict(ranks)


def require_factors(ranks: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse stored factors that aren't there, don't have the ranks that are stated or are stated nowhere.

    Args:
        shapes: of the stored tensors, by name.

    Raises:
        GnomonError: names the layer.
    """
    for name, rank in ranks.items():
        a, b = shapes.get(name + A), shapes.get(name + B)
        if a is None or b is None:
            raise GnomonError(
                f"{name}{A if a is None else B} is missing from the files. Apply the method again."
            )
        if len(a) != 2 or len(b) != 2 or a[1] != rank or b[0] != rank or rank > min(a[0], b[1]):
            raise GnomonError(
                f"{name} has factors {list(a)} and {list(b)}, which are no matrix of rank {rank}. The folder is "
                "damaged; apply the method again."
            )
    for stored, a in shapes.items():
        name = stored.removesuffix(A)
        b = shapes.get(name + B, ())
        if name != stored and name not in ranks and len(a) == len(b) == 2 and a[1] == b[0]:
            raise GnomonError(
                f"{name} has factors {list(a)} and {list(b)} in the files, but no rank in {CONFIG}. The folder is "
                "damaged; apply the method again."
            )


def group(checkpoint: Checkpoint) -> Groups:
    """Every tensor by itself.

    Raises:
        GnomonError: ranks and factors that don't fit together.
    """
    entries: dict[str, Entry] = checkpoint.entries
    require_factors(stated(checkpoint.config), {name: entry.shape for name, entry in entries.items()})
    return {name: (name,) for name in entries}


def describe(name: str, stored: Mapping[str, Tensor]) -> Mapping[str, float]:
    """Rank of a factor."""
    if stored[name].ndim != 2 or not name.endswith((A, B)):
        return {}
    return {"rank": float(stored[name].shape[name.endswith(A)])}


FORM = Form(
    name=NAME,
    group=group,
    decode=lambda name, stored: stored[name],
    describe=describe,
    parts=2,
    config={KEY: {"quant_method": NAME, "version": VERSION}},
    instead=(
        "For an ordinary checkpoint of its low-rank weights: import gnomon.hf; "
        "gnomon.methods.compress.lowrank.to_dense(AutoModelForCausalLM.from_pretrained(D)).save_pretrained(E)"
    ),
)


def form_with(ranks: Mapping[str, int]) -> Form:
    """The form of one model, whose configuration holds its ranks."""
    table = {"quant_method": NAME, "version": VERSION, "ranks": dict(sorted(ranks.items()))}
    return dataclasses.replace(FORM, config={KEY: table})
