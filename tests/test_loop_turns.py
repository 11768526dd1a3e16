"""Turns of a replica: who may use it, in which order."""

import threading

import pytest

from meshloom.loop.turns import Turns


def test_turns_are_taken_in_order_and_weights_go_first() -> None:
    turns, order = Turns(), []
    held, queued = threading.Event(), [threading.Event() for _ in range(3)]

    def take(name: str, first: bool, ready: threading.Event) -> None:
        ready.set()
        with turns.turn(first=first):
            order.append(name)

    threads = []
    with turns.turn():
        for number, (name, first) in enumerate((("one", False), ("two", False), ("weights", True))):
            thread = threading.Thread(target=take, args=(name, first, queued[number]))
            thread.start()
            queued[number].wait(10)
            while turns.waiting <= number:
                held.wait(0.001)
            threads.append(thread)
        assert order == []
    for thread in threads:
        thread.join(10)
    assert order == ["weights", "one", "two"]


def test_a_turn_that_raises_is_given_back() -> None:
    turns = Turns()
    with pytest.raises(RuntimeError), turns.turn():
        raise RuntimeError
    with turns.turn():
        assert turns.waiting == 0
