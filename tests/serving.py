"""Doubles of an engine's blocks, free queue and requests, and a plain reference of T-LRU's eviction order."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any


@dataclass(eq=False)
class Block:
    """What the queue sees of a block."""

    block_id: int
    block_hash: str | None = None
    is_null: bool = False
    pool: Any = None
    prev_free_block: Any = None
    next_free_block: Any = None


class FreeQueue:
    """The interface of vLLM's free queue, written for clarity: the links are rebuilt from a list each time."""

    def __init__(self, blocks: list[Block]) -> None:
        self.fake_free_list_head, self.fake_free_list_tail = Block(-1), Block(-1)
        self._link(blocks)

    def _walk(self) -> list[Block]:
        found, block = [], self.fake_free_list_head.next_free_block
        while block is not self.fake_free_list_tail:
            found.append(block)
            block = block.next_free_block
        return found

    def _link(self, blocks: list[Block]) -> None:
        line = [self.fake_free_list_head, *blocks, self.fake_free_list_tail]
        for before, after in pairwise(line):
            before.next_free_block, after.prev_free_block = after, before
        self.num_free_blocks = len(blocks)

    def popleft(self) -> Block:
        return FreeQueue.popleft_n(self, 1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        line = self._walk()
        self._link(line[n:])
        for block in line[:n]:
            block.prev_free_block = block.next_free_block = None
        return line[:n]

    def remove(self, block: Block) -> None:
        self._link([b for b in self._walk() if b is not block])
        block.prev_free_block = block.next_free_block = None

    def append_n(self, blocks: list[Block]) -> None:
        self._link(self._walk() + blocks)

    def prepend_n(self, blocks: list[Block]) -> None:
        self._link(blocks + self._walk())


@dataclass
class Reference:
    """Eviction order as three lists of block ids, and T-LRU's judgement in tokens instead of blocks."""

    block_size: int
    xi: int
    qhat: int
    empty: list[int]
    safe: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    longest: dict[int, int] = field(default_factory=dict)

    def order(self) -> list[int]:
        return self.empty + self.safe + self.kept

    def evict(self) -> int:
        line = self.empty or self.safe or self.kept
        victim = line.pop(0)
        self.longest.pop(victim, None)
        return victim

    def use(self, block: int) -> None:
        for line in (self.empty, self.safe, self.kept):
            if block in line:
                line.remove(block)

    def end_of_turn(self, blocks: list[int], history: int, cached: int) -> None:
        """Blocks of a conversation by position; the first `cached` hold content. Tails go first."""
        self.empty[:0] = blocks[cached:][::-1]
        for block in blocks[cached:]:
            self.longest.pop(block, None)
        for position, block in reversed(list(enumerate(blocks[:cached]))):
            self.longest[block] = max(self.longest.get(block, 0), history)
            whole = -(-self.longest[block] // self.block_size) * self.block_size
            whole += -(-self.qhat // self.block_size) * self.block_size
            first_safe = max(0, whole - self.xi // self.block_size * self.block_size)  # in tokens
            (self.safe if position * self.block_size >= first_safe else self.kept).append(block)


def request(name: str = "a", *, prompt: int = 4, made: int = 1, limit: int = 100, **more: Any) -> Any:
    """A decoding request as the scheduler holds it before a step."""
    values = {
        "request_id": name,
        "num_prompt_tokens": prompt,
        "num_computed_tokens": prompt + made - 1,
        "num_tokens": prompt + made,
        "num_output_tokens": made,
        "num_output_placeholders": 0,
        "max_tokens": limit,
        "is_prefill_chunk": False,
        "next_decode_eligible_step": 0,
        "arrival_time": 0.0,
    }
    return SimpleNamespace(**(values | more))
