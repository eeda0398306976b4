"""Traces from files: WildChat and ShareGPT exports, Azure and Mooncake traces, and a plain form of our own.

==========  ======================================================================  ==============================
format      file                                                                    what a line gives
==========  ======================================================================  ==============================
turns       .jsonl or .csv: time (s), conversation, prompt_len, response_len        one turn
wildchat    .json or .jsonl: conversation_hash, timestamp, conversation [{role,     all turns of a conversation;
            content, timestamp}]                                                    tokens are counted in the text
sharegpt    .json or .jsonl: id, conversations [{from, value}]                      the same; times are drawn
azure       .csv: TIMESTAMP, ContextTokens, GeneratedTokens                         one request; no conversations
mooncake    .jsonl: timestamp (ms), input_length, output_length, hash_ids           one request with prefix blocks
==========  ======================================================================  ==============================

Each error names the line.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gnomon.core.errors import UsageError, nearest, number, unknown

from .prefix import PrefixTrace
from .trace import Trace, Turn

__all__ = ["FORMATS", "approximate_tokens", "detect_format", "read_trace"]

FORMATS = ("turns", "wildchat", "sharegpt", "azure", "mooncake")
_COLUMNS = {
    "turns": ("time", "conversation", "prompt_len", "response_len"),
    "wildchat": ("conversation_hash", "conversation"),
    "sharegpt": ("conversations",),
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "mooncake": ("timestamp", "input_length", "output_length", "hash_ids"),
}
Entry = tuple[int, dict[str, Any]]


def approximate_tokens(text: str) -> int:
    """Four bytes of UTF-8 a token, rounded up: a rule of thumb for English. Pass a tokenizer's count where you can."""
    return -(-len(text.encode()) // 4)


def read_trace(
    path: str | Path,
    format: str = "auto",
    *,
    count: Callable[[str], int] = approximate_tokens,
    generator: np.random.Generator | None = None,
    limit: int | None = None,
    ties: Literal["refuse", "keep"] | None = None,
    link: bool = False,
) -> Trace | PrefixTrace:
    """A trace from a file.

    Args:
        format: one of `FORMATS`, or `auto`: by the names of the first line's fields.
        count: tokens of a text, for `wildchat` and `sharegpt`.
        generator: draws ShareGPT's times: gaps of Exp(1) s between conversations, of Exp(3) between turns.
        limit: read at most so many lines (entries of a .json list).
        ties: what to do with equal arrival times of different conversations: refuse them, or keep the file's order.
            By default they are kept in `mooncake`, whose clock is coarse, and in `wildchat`, and refused elsewhere.
        link: of `azure`, whose requests name no conversation: take a request for the next turn of an open
            conversation whose history fits into its context. A guess, for want of better; without it nothing is reused.

    Raises:
        UsageError: no such file or format; a line that can't be read, with its number.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"There is no trace {str(file)!r}.")
    if limit is not None and limit < 1:
        raise UsageError(f"limit={limit} would read nothing; at least 1.")
    name = detect_format(file) if format == "auto" else format
    if name not in FORMATS:
        raise unknown("trace format", name, FORMATS)
    entries = _required(name, file, limit)
    keep = ties == "keep" or (ties is None and name in ("mooncake", "wildchat"))
    if name == "mooncake":
        return _mooncake(entries)
    if name == "turns":
        rows = list(_turns(entries))
    elif name == "azure":
        rows = list(_azure(entries))
        rows = _linked(rows) if link else rows
    elif name == "wildchat":
        rows = sorted(_wildchat(entries, count), key=lambda row: row[1].time)
    else:
        if generator is None:
            raise UsageError(
                "ShareGPT exports have no times: pass generator=np.random.default_rng(seed) to draw them."
            )
        rows = sorted(_sharegpt(entries, count, generator), key=lambda row: row[1].time)
    if not rows:
        raise UsageError(f"{file.name} holds no turn.")
    _check_order(rows, keep)
    return Trace.of(turn for _, turn in rows)


def detect_format(path: str | Path) -> str:
    """The format whose fields the first line has.

    Raises:
        UsageError: none fits.
    """
    _, first = next(_entries(Path(path)), (0, {}))
    fits = [name for name, columns in _COLUMNS.items() if all(column in first for column in columns)]
    if not fits:
        known = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in _COLUMNS.items())
        raise UsageError(
            f"{Path(path).name} is in no known format: its first line has {', '.join(map(str, first)) or 'nothing'}. "
            f"Known are {known}."
        )
    return fits[0]


def _entries(path: Path) -> Iterator[Entry]:
    """(line number, or number of the entry in a JSON list; its fields)."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            for row in rows:
                yield rows.line_num, dict(row)
        return
    if path.suffix == ".json":
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{path.name} is no JSON: {error}.") from None
        for at, entry in enumerate(content if isinstance(content, list) else [content], 1):
            yield at, _fields(entry, at)
        return
    if path.suffix != ".jsonl":
        raise UsageError(
            f"{path.name}: traces are .jsonl, .json or .csv files. Parquet: pandas.read_parquet(path).to_json(out, "
            "orient='records', lines=True)."
        )
    with path.open(encoding="utf-8") as file:
        for at, line in enumerate(file, 1):
            if line.strip():
                try:
                    entry = json.loads(line)
                except ValueError as error:
                    raise UsageError(f"{path.name}, line {at}: no JSON ({error}).") from None
                yield at, _fields(entry, at)


def _fields(entry: Any, at: int) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise UsageError(f"Line {at}: an object with named fields is needed, not {type(entry).__name__}.")
    return entry


def _required(name: str, path: Path, limit: int | None) -> Iterator[Entry]:
    """Entries with the format's fields."""
    for count, (at, entry) in enumerate(_entries(path)):
        if limit is not None and count >= limit:
            return
        for column in _COLUMNS[name]:
            if column not in entry:
                raise UsageError(
                    f"{path.name}, line {at}: the {name} format needs {column!r}.{nearest(column, map(str, entry))}"
                )
        yield at, entry


def _count(entry: dict[str, Any], column: str, at: int) -> int:
    value = number(float(entry[column]) if _is_number(entry[column]) else math.nan)
    if not value >= 0 or value != int(value):
        raise UsageError(
            f"Line {at}: {column}={entry[column]!r} must be a whole number of tokens ≥ 0 (no text, no kilotokens)."
        )
    return int(value)


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _seconds(value: Any, at: int, column: str) -> float:
    """A number of seconds, or a date."""
    if _is_number(value):
        return float(value)
    try:
        text = str(value).replace(" UTC", "+00:00")
        if "." in text:  # more than six digits of a second: Azure has seven
            whole, rest = text.split(".", 1)
            digits = len(rest) - len(rest.lstrip("0123456789"))
            text = f"{whole}.{rest[:digits][:6]}{rest[digits:]}"
        date = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"Line {at}: {column}={value!r} is neither a number of seconds nor a date (YYYY-MM-DD HH:MM:SS)."
        ) from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _check_order(rows: list[tuple[int, Turn]], keep: bool) -> None:
    for (above, first), (at, second) in itertools.pairwise(rows):
        if second.time < first.time:
            raise UsageError(
                f"Line {at} arrives at {second.time:g} s, before line {above} at {first.time:g} s. Sort the trace by "
                "arrival: a policy may not see the future."
            )
        if second.time == first.time and not keep:
            raise UsageError(
                f"Lines {above} and {at} arrive at the same time, {second.time:g} s. Give times of a finer unit, or "
                "ties='keep' to serve them in the order of the file."
            )


def _turns(entries: Iterator[Entry]) -> Iterator[tuple[int, Turn]]:
    for at, entry in entries:
        if unused := set(entry) - set(_COLUMNS["turns"]):
            name = min(map(str, unused))
            raise UsageError(f"Line {at}: unknown column {name!r}.{nearest(name, _COLUMNS['turns'])}")
        yield at, Turn(
            _seconds(entry["time"], at, "time"), str(entry["conversation"]),
            _count(entry, "prompt_len", at), _count(entry, "response_len", at),
        )  # fmt: skip


def _azure(entries: Iterator[Entry]) -> Iterator[tuple[int, Turn]]:
    for at, entry in entries:
        time = _seconds(entry["TIMESTAMP"], at, "TIMESTAMP")
        yield (
            at,
            Turn(
                time, f"line {at}", _count(entry, "ContextTokens", at), _count(entry, "GeneratedTokens", at)
            ),
        )


def _linked(rows: list[tuple[int, Turn]], open_for_s: float = 600.0) -> list[tuple[int, Turn]]:
    """Requests as turns: the longest open history that fits into a context and is at least half of it goes on."""
    open_ones: list[tuple[int, float, str]] = []  # (history, last time, name), shortest first
    linked: list[tuple[int, Turn]] = []
    for at, turn in rows:
        history, name = 0, str(turn.conversation)
        fits = bisect_left(open_ones, (turn.prompt_len,)) - 1
        while fits >= 0 and open_ones[fits][0] >= turn.prompt_len / 2:
            length, last, other = open_ones[fits]
            if turn.time - last > open_for_s:
                del open_ones[fits]
            elif last < turn.time:
                del open_ones[fits]
                history, name = length, other
                break
            fits -= 1
        linked.append((at, Turn(turn.time, name, turn.prompt_len - history, turn.response_len)))
        insort(open_ones, (turn.prompt_len + turn.response_len, turn.time, name))
    return linked


def _wildchat(entries: Iterator[Entry], count: Callable[[str], int]) -> Iterator[tuple[int, Turn]]:
    for at, entry in entries:
        known = entry.get("timestamp")
        exchanges = _exchanges(at, entry["conversation"], "role", "content", {"user"}, {"assistant"})
        for turn, (asked, answered) in enumerate(exchanges):
            found = asked.get("timestamp") or answered.get("timestamp") or (known if turn == 0 else None)
            if found is None:
                raise UsageError(
                    f"Line {at}: turn {turn + 1} of conversation {entry['conversation_hash']!r} has no timestamp."
                )
            when, name = _seconds(found, at, "timestamp"), str(entry["conversation_hash"])
            yield at, Turn(when, name, count(str(asked["content"])), count(str(answered.get("content", ""))))


def _sharegpt(
    entries: Iterator[Entry], count: Callable[[str], int], generator: np.random.Generator
) -> Iterator[tuple[int, Turn]]:
    start = 0.0
    for at, entry in entries:
        start += generator.exponential(1.0)
        time = start
        people, machines = {"human", "user"}, {"gpt", "chatgpt", "assistant", "bing", "bard"}
        for asked, answered in _exchanges(at, entry["conversations"], "from", "value", people, machines):
            name, answer = f"{entry.get('id', '')}@{at}", str(answered.get("value", ""))
            yield at, Turn(time, name, count(str(asked["value"])), count(answer))
            time += generator.exponential(1 / 3)


def _exchanges(
    at: int, messages: Any, who: str, text: str, people: set[str], machines: set[str]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(what was asked, what was answered or {}); a system message counts with the question after it."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and who in m and text in m for m in messages
    ):
        raise UsageError(f"Line {at}: its messages must be a list of objects with {who!r} and {text!r}.")
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    before = ""
    for message in messages:
        if message[who] in people:
            found.append(({**message, text: before + str(message[text])}, {}))
            before = ""
        elif message[who] in machines:
            if found and not found[-1][1]:
                found[-1] = (found[-1][0], message)
        elif message[who] == "system":
            before += str(message[text])
        else:
            raise UsageError(
                f"Line {at}: {who}={message[who]!r} is unknown.{nearest(message[who], people | machines)}"
            )
    return found


def _mooncake(entries: Iterator[Entry], block: int = 512) -> PrefixTrace:
    times: list[float] = []
    blocks: list[tuple[int, ...]] = []
    tokens: list[int] = []
    for at, entry in entries:
        length, ids = _count(entry, "input_length", at), entry["hash_ids"]
        if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
            raise UsageError(f"Line {at}: hash_ids must be a list of whole numbers ≥ 0.")
        if len(ids) != -(-length // block):
            raise UsageError(
                f"Line {at}: {len(ids)} hash_ids for {length} tokens, but blocks of {block} tokens make "
                f"{-(-length // block)}."
            )
        if not _is_number(entry["timestamp"]):
            raise UsageError(f"Line {at}: timestamp={entry['timestamp']!r} must be a number of milliseconds.")
        times.append(float(entry["timestamp"]) / 1e3)
        if len(times) > 1 and times[-1] < times[-2]:
            raise UsageError(
                f"Line {at} arrives at {times[-1]:g} s, before the line above it at {times[-2]:g} s. Sort the trace."
            )
        blocks.append(tuple(ids))
        tokens.append(length)
    if not blocks:
        raise UsageError("The trace holds no request.")
    return PrefixTrace(np.array(times), tuple(blocks), np.array(tokens, dtype=np.int64), block)
