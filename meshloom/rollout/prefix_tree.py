"""Beginnings of sequences whose keys and values are kept, as a tree of blocks of tokens.

Owns: which tokens a block holds, what begins with what, and which block was used longest ago. Refuses to know: where a block
is, who computes it. Always holds: a block that is in use (pinned) has all blocks before it in use, so the one that was used
longest ago has nothing behind it; a block is let go once, and is not found after that.

A block holds so many tokens, except the last one of a sequence, which may hold fewer. A sequence finds all whole blocks that it
begins with, and the part of one more that it has in common with it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

BlockT = TypeVar("BlockT")


@dataclass(eq=False, slots=True)
class Node(Generic[BlockT]):
    """A block behind others.

    Args:
        before: the block before it; none at the root, and once it was let go.
        tokens: that it holds.
        block: where they are; none at the root.
        is_ready: whether it is computed; one that will be in the coming pass can only be shared whole.
        pins: how many use it.
    """

    before: "Node[BlockT] | None"
    tokens: tuple[int, ...]
    block: BlockT
    is_ready: bool = True
    pins: int = 0
    whole: "dict[tuple[int, ...], Node[BlockT]]" = field(default_factory=dict)
    tails: "list[Node[BlockT]]" = field(default_factory=list)

    @property
    def behind(self) -> "Iterator[Node[BlockT]]":
        return chain(self.whole.values(), self.tails)

    @property
    def is_kept(self) -> bool:
        return self.before is not None


@dataclass
class Found(Generic[BlockT]):
    """What is kept of a sequence's beginning.

    Args:
        nodes: whole blocks.
        part: one more, of which only the first tokens are the sequence's.
        num_tokens: of all of them.
    """

    nodes: list[Node[BlockT]]
    part: Node[BlockT] | None
    num_tokens: int

    @property
    def pinned(self) -> list[Node[BlockT]]:
        """All of them, in their order."""
        return self.nodes if self.part is None else [*self.nodes, self.part]


class PrefixTree(Generic[BlockT]):
    """The tree.

    Args:
        size: tokens of a whole block.
        let_go: called with each block that is not kept any more.
    """

    def __init__(self, size: int, let_go: Callable[[BlockT], object] = lambda block: None) -> None:
        self.size, self.num_tokens = size, 0
        self._let_go = let_go
        self._root: Node[BlockT] = Node(None, (), None)  # type: ignore[arg-type]
        self._idle: OrderedDict[Node[BlockT], None] = OrderedDict()
        self._fresh: list[Node[BlockT]] = []
        self._idle_tokens = 0

    @property
    def num_idle(self) -> int:
        """Blocks that nobody uses: so many can be let go."""
        return len(self._idle)

    @property
    def num_idle_tokens(self) -> int:
        """Tokens of these."""
        return self._idle_tokens

    def find(self, ids: Sequence[int]) -> Found[BlockT]:
        """What is kept of the beginning of ``ids``, pinned: the caller unpins it."""
        node, nodes, at = self._root, [], 0
        while at < len(ids) and (then := node.whole.get(tuple(ids[at : at + self.size]))) is not None:
            nodes.append(then)
            node, at = then, at + self.size
        part, common = _most_alike(node, tuple(ids[at : at + self.size]))
        found = Found(nodes, part, at + common)
        self.pin(found.pinned)
        return found

    def insert(
        self, ids: Sequence[int], make: Callable[[int, int], BlockT | None], *, is_ready: bool = True
    ) -> list[Node[BlockT]]:
        """Keep a sequence.

        Args:
            ids: its tokens.
            make: makes the block of tokens ``start`` to ``stop`` − 1, asked for those that are not kept yet, in their order;
                none ends the sequence there.
            is_ready: whether they are computed; else they are before the next ``settle``.

        Returns:
            All its whole blocks, pinned: the caller unpins them.
        """
        node, nodes = self._root, []
        for start in range(0, len(ids), self.size):
            tokens = tuple(ids[start : start + self.size])
            if (then := node.whole.get(tokens)) is None:
                if len(tokens) < self.size and any(each.tokens[: len(tokens)] == tokens for each in node.behind):
                    break
                block = make(start, start + len(tokens))
                if block is None:
                    break
                then = self._add(node, tokens, block, is_ready)
            if len(tokens) == self.size:
                self.pin([then])
                nodes.append(then)
            node = then
        return nodes

    def pin(self, nodes: Sequence[Node[BlockT]]) -> None:
        """One more uses blocks."""
        for node in nodes:
            if not node.pins:
                self._set_idle(node, False)
            node.pins += 1

    def unpin(self, nodes: Sequence[Node[BlockT]]) -> None:
        """One less uses blocks, given in their order in the sequence."""
        for node in reversed(nodes):
            node.pins -= 1
            if not node.pins and node.is_kept:
                self._set_idle(node, True)

    def without_part(self, found: Found[BlockT]) -> Found[BlockT]:
        """The whole blocks alone; the other is unpinned."""
        if found.part is not None:
            self.unpin([found.part])
        return Found(found.nodes, None, len(found.nodes) * self.size)

    def settle(self) -> None:
        """What was inserted before it was computed is computed now."""
        for node in self._fresh:
            node.is_ready = True
        self._fresh.clear()

    def evict(self) -> bool:
        """Let go of the block that was used longest ago; false if all are in use."""
        if not self._idle:
            return False
        self._remove(next(iter(self._idle)))
        return True

    def clear(self) -> None:
        """Keep nothing, neither what is in use."""
        for node in list(self._root.behind):
            self._remove(node)
        self._fresh.clear()

    def _add(self, node: Node[BlockT], tokens: tuple[int, ...], block: BlockT, is_ready: bool) -> Node[BlockT]:
        """A new block behind one; it takes the place of shorter ones with the same tokens that nobody uses."""
        for tail in [tail for tail in node.tails if not tail.pins and tokens[: len(tail.tokens)] == tail.tokens]:
            self._remove(tail)
        new = Node(node, tokens, block, is_ready)
        if not is_ready:
            self._fresh.append(new)
        if len(tokens) == self.size:
            node.whole[tokens] = new
        else:
            node.tails.append(new)
        self.num_tokens += len(tokens)
        self._set_idle(new, True)
        return new

    def _set_idle(self, node: Node[BlockT], idle: bool) -> None:
        """Put a block behind the others that nobody uses, or take it out."""
        if idle:
            self._idle[node] = None
            self._idle_tokens += len(node.tokens)
        elif node in self._idle:
            del self._idle[node]
            self._idle_tokens -= len(node.tokens)

    def _remove(self, node: Node[BlockT]) -> None:
        """Let go of a block and of all behind it."""
        assert node.before is not None
        if len(node.tokens) == self.size:
            del node.before.whole[node.tokens]
        else:
            node.before.tails.remove(node)
        gone = [node]
        while gone:
            one = gone.pop()
            gone.extend(one.behind)
            self._set_idle(one, False)
            one.before = None
            self.num_tokens -= len(one.tokens)
            self._let_go(one.block)


def _most_alike(node: Node[BlockT], tokens: tuple[int, ...]) -> tuple[Node[BlockT] | None, int]:
    """The block behind a node that has most of its first tokens in common with others, and how many."""
    best, common = None, 0
    for each in node.behind:
        # The comparison of a slice leaves out most of them at once.
        if each.is_ready and common < len(tokens) and each.tokens[: common + 1] == tokens[: common + 1]:
            if len(each.tokens) <= common:
                continue
            best, common = each, _num_common(each.tokens, tokens)
    return best, common


def _num_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Tokens at the beginning that two have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
