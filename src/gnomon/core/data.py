"""Texts to train and measure on: recipes without download, a hash of what they gave, splits that don't leak.

| recipe | what |
|---|---|
| `stdlib` | sources of the running Python's standard library, 3 MB |
| `topics` | `pydoc_data.topics`: prose about Python |
| `generated:<n>` | n documents by a grammar (`core.generated`) |
| `mixed` | 50 documents of each of the three, taking turns, at most 4,000 characters each: for measurements |
| a file | .txt, .md, .py (cut at blank lines when long), or .jsonl with a `text` field |
| a folder | every such file in it, one document each (.jsonl: one a line) |

The standard library differs between Python versions, so a record carries :attr:`Corpus.sha256`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from . import texts
from .errors import GnomonError, UsageError, unknown
from .refs import GENERATED, RECIPES, as_path


@dataclass(frozen=True)
class Document:
    """One unit of text; splits never cut it."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """SHA-256 of the text alone."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order."""

    name: str
    documents: tuple[Document, ...]
    sha256: str = field(init=False)
    """Of all names and texts, in order."""

    def __post_init__(self) -> None:
        if not any(document.text.strip() for document in self.documents):
            raise GnomonError(
                f"The text {self.name!r} is empty: {len(self.documents)} documents without a word."
            )
        rows = (f"{document.name}\0{document.digest}\n" for document in self.documents)
        object.__setattr__(self, "sha256", hashlib.sha256("".join(rows).encode()).hexdigest())


def corpus(recipe: str) -> Corpus:
    """The corpus of a recipe, file or folder.

    Raises:
        UsageError: unknown recipe, missing file, a number of documents out of range.
        GnomonError: a file that is not UTF-8, a .jsonl line without `text`, no text at all.
    """
    path, name = as_path(recipe), recipe
    if recipe in texts.BUILT_IN:
        found = texts.BUILT_IN[recipe]()
    elif recipe.startswith(GENERATED):
        found = texts.generated_documents(recipe.removeprefix(GENERATED))
    elif recipe and path.is_dir():  # Path("") would be the current folder
        found, name = texts.folder(path), path.resolve().name
    elif path.is_file():
        found, name = texts.file(path), path.name
    elif path.suffix in texts.SUFFIXES or "/" in recipe:
        raise UsageError(f"There is no file or folder {recipe}.")
    else:
        raise unknown("text recipe", recipe, (*RECIPES, f"{GENERATED}200", "a file", "a folder"))
    return Corpus(name, tuple(Document(name, text) for name, text in found))


@dataclass(frozen=True)
class Split:
    """Three corpora that share no document."""

    train: Corpus
    valid: Corpus
    test: Corpus

    def __post_init__(self) -> None:
        digests = [
            {document.digest for document in part.documents} for part in (self.train, self.valid, self.test)
        ]
        if shared := (digests[0] & digests[1]) | (digests[0] & digests[2]) | (digests[1] & digests[2]):
            raise GnomonError(
                f"Split of {self.train.name!r} leaks: {len(shared)} texts lie in two parts. Use split()."
            )


def split(whole: Corpus, *, valid: float = 0.1, test: float = 0.1, seed: int = 0) -> Split:
    """Train, valid and test parts by whole documents; those with identical text stay together.

    Args:
        valid, test: shares of the distinct documents, at least one each.
        seed: of the shuffle.

    Raises:
        UsageError: shares outside (0, 1) or too few distinct documents.
    """
    if not (valid > 0 and test > 0 and valid + test < 1):  # NaN is refused too
        raise UsageError(f"valid={valid} and test={test} must be positive with a sum below 1.")
    distinct = sorted({document.digest for document in whole.documents})
    order = np.random.default_rng(seed).permutation(len(distinct))
    n_test, n_valid = max(1, round(test * len(distinct))), max(1, round(valid * len(distinct)))
    if n_test + n_valid >= len(distinct):
        raise UsageError(
            f"{whole.name!r} has {len(distinct)} distinct documents: {n_valid} for valid and {n_test} for "
            "test leave none to train on. Give more documents or smaller shares."
        )
    part_of = {
        distinct[index]: "test" if rank < n_test else "valid" if rank < n_test + n_valid else "train"
        for rank, index in enumerate(order)
    }

    def part(name: str) -> Corpus:
        return Corpus(f"{whole.name}/{name}", tuple(d for d in whole.documents if part_of[d.digest] == name))

    return Split(part("train"), part("valid"), part("test"))


def token_stream(whole: Corpus, tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, " tokens"]:
    """All documents as one line of token ids, each followed by the tokenizer's EOS (else BOS) as separator.

    Raises:
        GnomonError: the tokenizer has neither.
    """
    separator = tokenizer.bos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if separator is None:
        raise GnomonError(
            "This tokenizer has neither EOS nor BOS to separate documents. Set tokenizer.eos_token."
        )
    ids: list[int] = []
    for document in whole.documents:
        ids += tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        ids.append(separator)
    return torch.tensor(ids)


class Batches:
    """Endless random windows of a stream: `next(batches)` is `[B, T]`, its starts drawn uniformly.

    The stream of batches depends on the generator alone, so `state_dict` is its state.
    """

    def __init__(
        self, stream: Int[Tensor, " tokens"], *, batch: int, length: int, generator: torch.Generator
    ) -> None:
        """
        Args:
            stream: token ids.
            batch: B, windows a batch.
            length: T, tokens a window.
            generator: on the CPU; the only source of chance.

        Raises:
            UsageError: a stream shorter than one window.
        """
        _require_window(stream, length)
        self.stream, self.batch, self.length, self.generator = stream, batch, length, generator
        self._offsets = torch.arange(length)

    def __iter__(self) -> Iterator[Int[Tensor, "B T"]]:
        return self

    def __next__(self) -> Int[Tensor, "B T"]:
        starts = torch.randint(len(self.stream) - self.length + 1, (self.batch, 1), generator=self.generator)
        return self.stream[starts + self._offsets]  # (B, 1) + (T,) -> (B, T)

    def state_dict(self) -> dict[str, Tensor]:
        """What :meth:`load_state_dict` needs to draw the same batches from here on."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])


def windows(stream: Int[Tensor, " tokens"], length: int) -> Int[Tensor, "N T"]:
    """Neighbouring windows without overlap, for evaluation; the rest at the end is left out.

    Raises:
        UsageError: a stream shorter than one window.
    """
    _require_window(stream, length)
    return stream[: len(stream) // length * length].view(-1, length)


def _require_window(stream: Tensor, length: int) -> None:
    if not 1 <= length <= len(stream):
        raise UsageError(
            f"A window of {length} tokens does not fit a stream of {len(stream)}. Use a longer text or "
            f"windows of at most {len(stream)}."
        )
