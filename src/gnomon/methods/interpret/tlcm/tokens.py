"""Which tokens are corrected: activations by token type and by class of token."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxtyping import Int
from torch import Tensor

from gnomon.core.errors import UsageError

if TYPE_CHECKING:
    from pandas import DataFrame

CLASSES = ("newline", "punctuation", "digits", "word", "other")


def token_class(text: str) -> str:
    r"""The class of a decoded token; leading and trailing spaces don't matter.

    "newline" if it contains a line break (also "]\n"), "digits" for decimal digits alone, "punctuation" for
    punctuation marks and symbols alone, "word" for letters (inner apostrophes, hyphens and combining marks
    allowed), "other" for the rest: blanks, mixtures such as "3rd", special tokens such as "<|im_end|>".
    """
    if "\n" in text or "\r" in text:
        return "newline"
    body = text.strip()
    kinds = {unicodedata.category(character)[0] for character in body}
    if not body:
        return "other"
    if all(unicodedata.category(character) == "Nd" for character in body):
        return "digits"
    if kinds <= {"P", "S"}:
        return "punctuation"
    joined = {
        character for character in body if character.isalpha() or unicodedata.category(character)[0] == "M"
    }
    if set(body) - joined <= set("'’-") and body[0] in joined:
        return "word"
    return "other"


def token_table(
    input_ids: Int[Tensor, " tokens"],
    activations: Int[Tensor, ...],
    decode: Callable[[int], str],
    *,
    minimum: int = 20,
) -> DataFrame:
    """Activations per token type (step 2), the most corrected first.

    Args:
        input_ids: ids of the counted tokens, as ``trace.select(trace.input_ids)``; traces may be joined.
        activations: N_t of the same tokens, from :func:`counts`.
        decode: id to text, e.g. ``lambda i: tokenizer.decode([i])``.
        minimum: types seen less often are left out.

    Returns:
        Columns id, token, kind (see :func:`token_class`), count, mean, std (sample), stderr.
    """
    import pandas as pd

    if input_ids.shape != activations.shape:
        raise UsageError(
            f"{len(input_ids)} token ids but {len(activations)} activation counts; they must match."
        )
    if minimum < 2:
        raise UsageError(f"minimum={minimum}: a standard error needs at least 2 occurrences.")
    seen = pd.DataFrame({"id": input_ids.cpu().numpy(), "activations": activations.cpu().numpy()})
    table = seen.groupby("id")["activations"].agg(["count", "mean", "std"]).reset_index()
    table = table[table["count"] >= minimum]
    texts = [decode(int(identifier)) for identifier in table["id"]]
    table.insert(1, "token", texts)
    table.insert(2, "kind", [token_class(text) for text in texts])
    table["stderr"] = table["std"] / table["count"] ** 0.5
    return table.sort_values(["mean", "id"], ascending=[False, True], ignore_index=True)
