"""What an engine decodes: stages of branches, by length or by a known text, and the tags they are written in.

A branch is its header (forced tokens that open it, such as a tag; they are prefilled) and what is decoded after it:
`length` tokens of the model's own, or the tokens of `script` one a step, whatever the model would say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gnomon.core.errors import UsageError

__all__ = ["BranchSpec", "Stages", "checked_stages", "stages_from_tags"]


@dataclass(frozen=True, slots=True)
class BranchSpec:
    """One branch of a stage.

    Attributes:
        header: forced tokens that open it.
        length: tokens to decode, >= 1.
        script: if given, these tokens are fed instead of the model's own; as many as `length`.
    """

    header: tuple[int, ...]
    length: int
    script: tuple[int, ...] | None = None

    @classmethod
    def of_text(cls, tokens: Sequence[int]) -> BranchSpec:
        """A known text: its first token opens the branch, the others are fed one a step.

        Raises:
            UsageError: fewer than two tokens.
        """
        if len(tokens) < 2:
            raise UsageError(f"A scripted branch needs at least two tokens, got {list(tokens)}.")
        return cls(tuple(tokens[:1]), len(tokens) - 1, tuple(tokens[1:]))


Stages = tuple[tuple[BranchSpec, ...], ...]


def checked_stages(prompt: Sequence[int], stages: Sequence[Sequence[BranchSpec]]) -> Stages:
    """Stages as tuples.

    Raises:
        UsageError: an empty prompt or stage, a length below 1, a script of another length, a branch without a header
            where it needs one: in a parallel stage, where all branches would be equal, and after one.
    """
    if not len(prompt) or not stages or not all(stages):
        raise UsageError("A request needs a prompt and stages of at least one branch each.")
    for number, stage in enumerate(stages):
        for branch in stage:
            if branch.length < 1 or (branch.script is not None and len(branch.script) != branch.length):
                raise UsageError(
                    f"Stage {number}: a branch of length {branch.length} with a script of "
                    f"{'no' if branch.script is None else len(branch.script)} tokens. Lengths are 1 or more, and "
                    "that of the script if there is one."
                )
            if not branch.header and (len(stage) > 1 or number > 0):
                raise UsageError(
                    f"Stage {number}: a branch without a header has no token of its own to begin with. Give each at "
                    "least one, such as its tag."
                )
    return tuple(tuple(stage) for stage in stages)


_PARALLEL = re.compile(r"<Parallel>(.*?)</Parallel>", re.DOTALL)
_PATH = re.compile(r"<Path>.*?</Path>", re.DOTALL)


def stages_from_tags(text: str, encode: Callable[[str], Sequence[int]]) -> Stages:
    """Scripted stages of an answer in Multiverse's tags.

    Every `<Parallel>` block becomes a serial stage up to its first `<Path>` (goal and outlines), a parallel stage of
    its paths, and the text after the last `</Path>` (conclusion and what follows it) begins the next serial stage.

    Args:
        encode: text to tokens, without special tokens.

    Raises:
        UsageError: a block without a path, tags that don't match, or a piece of fewer than two tokens.
    """
    pieces: list[list[str]] = []
    serial, at = "", 0
    for block in _PARALLEL.finditer(text):
        paths = list(_PATH.finditer(block.group(1)))
        if not paths:
            raise UsageError(f"A <Parallel> block has no <Path>: {block.group(0)[:60]!r}")
        inside = block.start(1)
        serial += text[at : inside + paths[0].start()]
        pieces += [[serial], [path.group(0) for path in paths]]
        at, serial = inside + paths[-1].end(), ""
    serial += text[at:]
    for part in [*(piece for stage in pieces if len(stage) == 1 for piece in stage), serial]:
        if "<Path>" in part or "</Path>" in part:
            raise UsageError("A <Path> stands outside <Parallel>, or one of its tags is missing.")
    if serial:
        pieces.append([serial])
    return tuple(tuple(BranchSpec.of_text(encode(piece)) for piece in stage) for stage in pieces)
