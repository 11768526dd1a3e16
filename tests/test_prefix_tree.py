"""Beginnings that are kept, against a list of everything that was ever inserted and not let go."""

from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.rollout.prefix_tree import PrefixTree

SIZE = 3
TOKENS = st.lists(st.integers(0, 1), max_size=9)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["insert", "find", "hold", "free", "evict", "clear"]), TOKENS), max_size=30))
def test_the_longest_beginning_that_is_kept_is_found(steps):
    """A block is what it was made for: the tokens up to its end. What is in use is not let go to make room."""
    kept: dict[int, list[int]] = {}
    tree: PrefixTree[int] = PrefixTree(SIZE, lambda block: kept.pop(block))
    made, held = 0, []
    for kind, ids in steps:
        if kind == "insert":

            def make(start: int, stop: int, ids: list[int] = ids) -> int:
                nonlocal made
                made += 1
                kept[made] = ids[:stop]
                return made

            tree.unpin(tree.insert(ids, make))
        elif kind in ("find", "hold"):
            found = tree.find(ids)
            longest = max((common(whole, ids) for whole in kept.values()), default=0)
            assert found.num_tokens == longest
            assert [kept[node.block] for node in found.nodes] == [
                ids[: SIZE * (i + 1)] for i in range(len(found.nodes))
            ]
            assert found.part is None or common(kept[found.part.block], ids) == longest
            if kind == "hold":
                held.append(found)
            else:
                tree.unpin(found.pinned)
        elif kind == "free" and held:
            tree.unpin(held.pop().pinned)
        elif kind == "evict":
            in_use = {node.block for found in held for node in found.pinned if node.is_kept}
            is_any_idle = len(kept) > len(in_use)
            assert tree.evict() is is_any_idle and in_use <= kept.keys()
        elif kind == "clear":
            tree.clear()
            assert not kept
        assert tree.num_tokens == sum((len(whole) - 1) % SIZE + 1 for whole in kept.values())
    for found in held:
        tree.unpin(found.pinned)
    assert (tree.num_idle, tree.num_idle_tokens) == (len(kept), tree.num_tokens)
    while tree.evict():
        pass
    assert not kept


def test_what_was_used_longest_ago_goes_first():
    """The end of a sequence before its beginning, and a beginning that was found again after both of another."""
    gone: list[str] = []
    tree: PrefixTree[str] = PrefixTree(2, gone.append)
    for ids in ([1, 2, 3, 4], [5, 6, 7, 8]):
        tree.unpin(tree.insert(ids, lambda start, stop, ids=ids: f"{ids[start:stop]}"))
    tree.unpin(tree.find([1, 2, 9]).pinned)
    while tree.evict():
        pass
    assert gone == ["[3, 4]", "[7, 8]", "[5, 6]", "[1, 2]"]
