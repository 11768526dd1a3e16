"""What travels between processes, and who is heard."""

import socket
import threading
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from meshloom.config.settings import Fabric, OptimizerSettings
from meshloom.fabric.channel import Channel, ChannelClosed, connect, listen, new_secret
from meshloom.fabric.dispatch import GroupLayout, by_part, from_all, from_first, from_replicas, replicate, split
from meshloom.fabric.faults import Cause, Evidence, first_cause
from meshloom.fabric.seats import Seat, seats_of
from meshloom.fabric.wire import decode, encode, register
from meshloom.samples.ragged import Samples


@register
@dataclass(frozen=True)
class Known:
    """A record that both ends have registered."""

    name: str
    items: tuple[int, ...]


@dataclass(frozen=True)
class Stranger:
    """A record that nobody has registered."""

    name: str


class Colour(Enum):
    """An enum that nobody has registered."""

    RED = 1


def back(value: Any) -> Any:
    """What arrives, after a real journey over a socket."""
    header, blobs = encode(value)
    with pair() as (one, other):
        sender = threading.Thread(target=one.send, args=({"value": header}, blobs))
        sender.start()
        message, data = other.receive()
        sender.join()
    return decode(message["value"], data)


class pair:  # noqa: N801
    """Two ends of a proved connection."""

    def __enter__(self) -> tuple[Channel, Channel]:
        secret = new_secret()
        with listen("127.0.0.1") as server:
            made: list[Channel] = []
            port = server.getsockname()[1]
            caller = threading.Thread(target=lambda: made.append(connect("127.0.0.1", port, secret)))
            caller.start()
            called = Channel(server.accept()[0], secret, calls=False)
            caller.join()
        self.ends = called, made[0]
        return self.ends

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.close()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, 1.5, -(2**80), "héllo\ud800"],
        float("inf"),
        {"a": {"b": [1, (2, {"c": None})]}, "$": 1},
        {1: "one", ("a", 2): [3]},
        {1, 2, 3},
        frozenset({"x"}),
        b"\x00\xff" * 10,
        range(3, 10, 2),
        Path("/a/b"),
        torch.bfloat16,
        torch.device("cuda:1"),
        torch.Size([2, 3]),
        Seat(1, 2, "node1", 0, 1, "cpu"),
        Fabric.SLURM,
        Known("k", (1, 2)),
        OptimizerSettings(lr=0.5),
        OrderedDict(b=1, a=2),
    ],
)
def test_plain_values_and_records_arrive_as_they_were(value: Any) -> None:
    found = back(value)
    assert found == value and type(found) is (dict if isinstance(value, OrderedDict) else type(value))


def test_not_a_number_arrives() -> None:
    assert back(float("nan")) != back(float("nan"))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4), (0, 5)])
def test_tensors_arrive_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    found = back(tensor)
    assert found.dtype is dtype and found.shape == tensor.shape
    assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_views_arrive_whole_and_gradients_stay_behind() -> None:
    table = torch.arange(12.0, requires_grad=True).reshape(3, 4)
    found = back({"column": table[:, 1], "turned": table.t()})
    assert found["column"].tolist() == [1.0, 5.0, 9.0] and not found["column"].requires_grad
    assert torch.equal(found["turned"], table.detach().t())
    found["column"][0] = 7  # what has arrived can be written to


def test_settings_keep_their_origins() -> None:
    settings = OptimizerSettings(lr=0.5)
    settings._provenance = type(settings.provenance)({"lr": "run.yaml:3"})
    assert back(settings).provenance.of("lr") == "run.yaml:3"


def test_many_tensors_and_empty_ones_arrive_in_order() -> None:
    tensors = [torch.full((number % 3,), number) for number in range(2000)]
    found = back(tensors)
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (Stranger("x"), "value is a .*Stranger.*register"),
        ({"a": [1, Colour.RED]}, r"value\['a'\]\[1\] is a .*Colour.*register"),
        (lambda: 1, "function"),
        (object(), "object"),
        (torch.zeros(2, 2).to_sparse(), "only plain tensors"),
        (RuntimeError("x"), "RuntimeError"),
    ],
)
def test_what_may_not_travel_is_named_with_its_place(value: Any, where: str) -> None:
    with pytest.raises(TypeError, match=where):
        encode(value)


@pytest.mark.parametrize(
    "header",
    [
        {"$": "record", "type": "os:system", "fields": {}},
        {"$": "record", "type": "subprocess:Popen", "fields": {"args": ["true"]}},
        {"$": "record", "type": "meshloom.cli:main", "fields": {}},
        {"$": "record", "type": "meshloom.fabric.local:subprocess.Popen", "fields": {"args": ["true"]}},
        {"$": "enum", "type": "meshloom.fabric.wire:Path", "name": "x"},
        {"$": "dtype", "name": "load"},
        {"$": "unheard of"},
    ],
)
def test_what_arrives_names_records_only(header: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        decode(header, [])


def test_who_does_not_know_the_secret_is_not_heard() -> None:
    with listen("127.0.0.1") as server:
        port = server.getsockname()[1]
        told: list[str] = []

        def call() -> None:
            try:
                connect("127.0.0.1", port, new_secret())
            except ChannelClosed as error:
                told.append(str(error))

        caller = threading.Thread(target=call)
        caller.start()
        with pytest.raises(ChannelClosed, match="does not know the secret"):
            Channel(server.accept()[0], new_secret(), calls=False)
        caller.join()
    assert len(told) == 1


def test_who_sends_nonsense_is_not_heard() -> None:
    with listen("127.0.0.1") as server, socket.create_connection(server.getsockname()) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        with pytest.raises(ChannelClosed):
            Channel(server.accept()[0], new_secret(), calls=False)


def test_an_end_that_goes_wakes_the_other() -> None:
    with pair() as (one, other):
        other.close()
        with pytest.raises(ChannelClosed):
            one.receive()


def test_messages_of_several_threads_do_not_mix() -> None:
    with pair() as (one, other):
        texts = ["x" * 200_000, "y" * 300_000, "z" * 100]
        senders = [
            threading.Thread(target=lambda text=text: [one.send({"text": text}, [text.encode()]) for _ in range(5)])
            for text in texts
        ]
        for sender in senders:
            sender.start()
        found = [other.receive() for _ in range(15)]
        for sender in senders:
            sender.join()
    assert all(message["text"].encode() == bytes(blob) for message, (blob,) in found)
    assert sorted(message["text"] for message, _ in found) == sorted(texts * 5)


def test_seats_follow_the_nodes() -> None:
    seats = seats_of([("a", ("cuda:0", "cuda:1")), ("b", ("cuda:0",))])
    assert [
        (seat.rank, seat.world_size, seat.node, seat.node_index, seat.local_rank, seat.device) for seat in seats
    ] == [
        (0, 3, "a", 0, 0, "cuda:0"),
        (1, 3, "a", 0, 1, "cuda:1"),
        (2, 3, "b", 1, 0, "cuda:0"),
    ]


def test_data_are_split_over_data_axes_alone() -> None:
    mesh = [("pp", 2), ("replicate", 2), ("fsdp", 2), ("tp", 2)]
    layout = GroupLayout.of_mesh(range(16), mesh, ["replicate", "fsdp"])
    assert layout.data_index == (0, 0, 1, 1, 2, 2, 3, 3) * 2
    assert layout.num_parts == 4 and layout.leaders == (0, 2, 4, 6)
    assert GroupLayout.of_mesh([4, 7], [("fsdp", 2)], ["fsdp"]) == GroupLayout((4, 7), (0, 1))
    assert GroupLayout.of_mesh([5], [], ["fsdp"]) == GroupLayout((5,), (0,))
    with pytest.raises(ValueError, match="do not count"):
        GroupLayout((0, 1), (0, 2))


def test_dispatch_and_collect() -> None:
    layout = GroupLayout((3, 5, 7, 9), (0, 0, 1, 1))
    assert replicate({"a": 1}, layout) == [{"a": 1}] * 4
    assert by_part("a")({"a": ["x", "y"], "b": 1}, layout) == [{"a": "x", "b": 1}] * 2 + [{"a": "y", "b": 1}] * 2
    with pytest.raises(ValueError, match="3 parts for 2 replicas"):
        by_part("a")({"a": [1, 2, 3]}, layout)
    assert [it["a"] for it in split("a")({"a": [1, 2, 3]}, layout)] == [[1, 2], [1, 2], [3], [3]]
    assert [it["a"].tolist() for it in split("a")({"a": torch.arange(1)}, layout)] == [[0], [0], [], []]
    samples = Samples(torch.tensor([1, 2, 0]), {"ids": torch.arange(3)})
    parts = [it["a"] for it in split("a")({"a": samples}, layout)]
    assert [part.lengths.tolist() for part in parts] == [[1, 2], [1, 2], [0], [0]]
    assert from_all("abcd", layout) == list("abcd") and from_replicas("abcd", layout) == ["a", "c"]
    assert from_first("abcd", layout) == "a"


def test_the_first_of_what_tells_most_is_the_cause() -> None:
    late = Evidence(Cause.LATE, 0, "", at=1.0)
    collective = Evidence(Cause.COLLECTIVE, 1, "", at=2.0)
    died, raised = Evidence(Cause.DIED, 2, "", at=3.0), Evidence(Cause.RAISED, 3, "", at=4.0)
    assert first_cause([late, collective, raised, died]) is died
    assert first_cause([late, collective]) is collective
    assert first_cause([late]) is late
