"""vLLM's queue of free blocks with a second queue for blocks that cannot hurt the tail.

Paper: Tail-Optimized LRU, Algorithm 1. An engine's LRU becomes T-LRU when TEL-safe blocks count as infinitely old.
Here:  `SafeFirst`, a mixin over vLLM's `FreeKVCacheBlockQueue`. One linked list in eviction order, in three stretches:

           free memory (no content)  |  safe, longest free first  |  the rest, longest free first

       The stretches are contiguous, so whoever walks the list from its head still walks it in eviction order, and the
       one length that vLLM reads counts them all.
Not here: who is safe (`cache`).
Differs from the paper: nothing known. From the pull request to vLLM: memory that holds nothing goes before safe blocks.
       Evicting content while memory is free would be an eager trim, another policy that loses hits for nothing.
Limits: a tag is judged when its block becomes free, by the threshold of that moment.

Without tags the order is vLLM's own, so LRU and T-LRU run through the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gnomon.methods.serve.tail_lru import PolicySettings

__all__ = ["SafeFirst", "adopt"]

OUT, EMPTY, SAFE, KEPT = range(4)
"""Where a block is: in use, or in one of the three stretches."""

if TYPE_CHECKING:

    class _Queue:
        fake_free_list_head: Any
        fake_free_list_tail: Any
        num_free_blocks: int

        def popleft(self) -> Any: ...
        def popleft_n(self, n: int) -> list[Any]: ...
        def remove(self, block: Any) -> None: ...
        def append_n(self, blocks: list[Any]) -> None: ...
        def prepend_n(self, blocks: list[Any]) -> None: ...
else:
    _Queue = object


class SafeFirst(_Queue):
    """Mixin: tags, the safe stretch, and counters. Attributes of blocks stay vLLM's; what is added lies here.

    Attributes:
        safe_evictions, kept_evictions: blocks with content that were given away, from each stretch.
        safe_hits, kept_hits: blocks that a request took back.
        safe_blocks: blocks in the safe stretch now.
    """

    def begin(self, blocks: int) -> None:
        """Take over a queue of a pool with so many blocks; what lies in it without content is free memory."""
        self.safe_evictions = self.kept_evictions = self.safe_hits = self.kept_hits = self.safe_blocks = 0
        self._where = bytearray(blocks)
        self._tagged = bytearray(blocks)
        self._history = [0] * blocks
        self._last: dict[int, Any] = {EMPTY: None, SAFE: None}
        block, empty = self.fake_free_list_head.next_free_block, True
        while block is not self.fake_free_list_tail:
            empty = empty and block.block_hash is None
            self._where[block.block_id] = EMPTY if empty else KEPT
            if empty:
                self._last[EMPTY] = block
            block = block.next_free_block

    # -- who is safe ----------------------------------------------------------------------------------

    def judge(self, blocks: Sequence[Any], history: int, settings: PolicySettings) -> None:
        """Tag the blocks of a turn that ended, before they are freed.

        A block that several conversations share belongs to several histories. The longest one seen since the block got
        its content counts, or the shared prefix would look safe because of the shortest.

        Args:
            blocks: in order of position, position 0 first.
            history: tokens of prompt and response; not what is cached, or a trimmed conversation would be trimmed
                again and again.
        """
        for position, block in enumerate(blocks):
            if block.is_null:
                continue
            longest = self._history[block.block_id] = max(self._history[block.block_id], history)
            self._tagged[block.block_id] = position >= settings.budget_blocks(longest)

    def protect(self, blocks: Iterable[Any]) -> None:
        """Clear tags: these blocks' request isn't over (it was preempted and will want them back)."""
        for block in blocks:
            self._tagged[block.block_id] = False

    def forget(self) -> None:
        """After a reset of the cache: nothing in the queue has content any more."""
        block = self.fake_free_list_head.next_free_block
        self._last = {EMPTY: None, SAFE: None}
        while block is not self.fake_free_list_tail:
            self._where[block.block_id] = EMPTY
            self._clear(block)
            self._last[EMPTY] = block
            block = block.next_free_block
        self.safe_blocks = 0

    # -- the queue ------------------------------------------------------------------------------------

    def popleft(self) -> Any:
        """The next victim."""
        block = super().popleft()
        self._given_away(block)
        return block

    def popleft_n(self, n: int) -> list[Any]:
        """The next n victims."""
        blocks = super().popleft_n(n)
        for block in blocks:
            self._given_away(block)
        return blocks

    def remove(self, block: Any) -> None:
        """Take a block out because a request has use for its content; it loses its tag."""
        before, where = block.prev_free_block, self._where[block.block_id]
        super().remove(block)
        if self._last.get(where) is block:
            inside = before is not self.fake_free_list_head and self._where[before.block_id] == where
            self._last[where] = before if inside else None
        if where == SAFE:
            self.safe_blocks -= 1
            self.safe_hits += 1
        elif block.block_hash is not None:
            self.kept_hits += 1
        self._where[block.block_id] = OUT
        self._tagged[block.block_id] = False

    def append(self, block: Any) -> None:
        """:meth:`append_n` of one block."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Free blocks, first to be evicted first: the tagged ones to the end of the safe stretch, the others behind."""
        safe = [block for block in blocks if self._tagged[block.block_id] and block.block_hash is not None]
        if not safe:
            kept = blocks
        else:
            kept = [block for block in blocks if not self._tagged[block.block_id] or block.block_hash is None]
            self._append_safe(safe)
        super().append_n(kept)
        for block in kept:
            self._where[block.block_id] = KEPT

    def prepend_n(self, blocks: list[Any]) -> None:
        """Free blocks without content: they are used first."""
        super().prepend_n(blocks)
        for block in blocks:
            self._where[block.block_id] = EMPTY
            self._clear(block)
        if blocks and self._last[EMPTY] is None:
            self._last[EMPTY] = blocks[-1]

    def _append_safe(self, blocks: list[Any]) -> None:
        before = self._last[SAFE] or self._last[EMPTY] or self.fake_free_list_head
        after = before.next_free_block
        for block in blocks:
            before.next_free_block, block.prev_free_block = block, before
            self._where[block.block_id] = SAFE
            before = block
        before.next_free_block, after.prev_free_block = after, before
        self._last[SAFE] = before
        self.safe_blocks += len(blocks)
        self.num_free_blocks += len(blocks)

    def _given_away(self, block: Any) -> None:
        where = self._where[block.block_id]
        if self._last.get(where) is block:
            self._last[where] = None  # victims come from the head, so this was the stretch's only block
        if where == SAFE:
            self.safe_blocks -= 1
        if block.block_hash is not None:
            if where == SAFE:
                self.safe_evictions += 1
            else:
                self.kept_evictions += 1
        self._where[block.block_id] = OUT
        self._clear(block)

    def _clear(self, block: Any) -> None:
        self._tagged[block.block_id] = False
        self._history[block.block_id] = 0


def adopt(queue: Any, blocks: int) -> Any:
    """Turn vLLM's queue object into a :class:`SafeFirst` one; who holds a reference to it keeps it.

    Args:
        blocks: blocks of the pool; their ids run from 0.
    """
    if not isinstance(queue, SafeFirst):
        kind = type(queue)
        queue.__class__ = type(f"SafeFirst{kind.__name__}", (SafeFirst, kind), {})
        queue.begin(blocks)
    return queue
