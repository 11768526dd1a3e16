"""The process of one worker: it holds the host object and carries out verbs, one after the other, on its main thread.

Owns: the process group of torch.distributed, the host object, the heartbeat. Refuses to know: what the verbs do. Always holds:
the heartbeat goes on while a verb computes; the process group is set up here, before the host is made, whatever has been
imported; when the controller's connection ends, so does this process, whatever it is in.

From the controller: ``begin`` (host, settings; rank 0 opens the store), ``join`` (where the store is), ``call`` (a verb),
``note`` (something for the verb that runs), ``end``. To it: ``hello``, ``beat``, ``store`` (its place), ``ready``, ``event``
and ``result`` of a call, ``error``.
"""

import faulthandler
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from meshloom.config.environment import prepare_gloo
from meshloom.config.errors import UserError
from meshloom.fabric.channel import Channel, ChannelClosed, connect
from meshloom.fabric.faults import error_fields
from meshloom.fabric.processes import die_with_parent, interface_of, leave_termination_to_others
from meshloom.fabric.seats import Seat
from meshloom.fabric.stacks import answer_on_signal
from meshloom.fabric.verbs import takes_note, telling, verbs_of
from meshloom.fabric.wire import decode, encode

BEAT_S = 1.0
_TRACEBACK_CHARACTERS = 6000


def main() -> None:
    """Serve a controller by the ticket on standard input."""
    serve_by(json.load(sys.stdin))


def serve_by(ticket: dict[str, Any]) -> None:
    """Serve a controller, and end this process.

    Args:
        ticket: where the controller is, the run's secret, the seat, the parent, and the file for the stack.
    """
    die_with_parent(ticket["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_termination_to_others()
    faulthandler.enable()
    answer_on_signal(ticket["stack"])
    channel = connect(ticket["host"], ticket["port"], bytes.fromhex(ticket["secret"]))
    worker = _Worker(channel, Seat(**ticket["seat"]))
    worker.serve()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Threads of libraries and of user code must not keep a process that is done.
    os._exit(0)


@runtime_checkable
class Closing(Protocol):
    """A host that is told when the run ends in order."""

    def close(self) -> None:
        """Let go of what outlives a process."""


class _Worker:
    """A worker's end of the channel.

    Args:
        channel: to the controller.
        seat: of this worker.
    """

    def __init__(self, channel: Channel, seat: Seat) -> None:
        self._channel, self._seat = channel, seat
        self._inbox: queue.SimpleQueue[tuple[dict[str, Any], list[bytearray]]] = queue.SimpleQueue()
        self._places: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        """Where the store is: rank 0 may have opened it before this rank is told to begin."""
        self._host: Any = None

    def serve(self) -> None:
        """Carry out what the controller says until it says the end."""
        self._channel.send({"kind": "hello", "role": "worker", "rank": self._seat.rank, "pid": os.getpid()})
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        while True:
            message, blobs = self._inbox.get()
            if message["kind"] == "end":
                self._leave()
                return
            try:
                self._do(message, blobs)
            except Exception as error:  # whatever a verb raises is the controller's to tell
                self._tell_error(message, error)

    def _do(self, message: dict[str, Any], blobs: list[bytearray]) -> None:
        match message["kind"]:
            case "begin":
                self._begin(message, blobs)
            case "call":
                self._call(message, blobs)

    def _begin(self, message: dict[str, Any], blobs: list[bytearray]) -> None:
        settings = decode(message["settings"], blobs)
        if (deadline_s := message["collective_deadline_s"]) is not None:
            self._join(timedelta(seconds=deadline_s), message["address"])
        module, _, name = message["host"].partition(":")
        kind = getattr(importlib.import_module(module), name)
        self._host = kind(self._seat, **settings)
        self._channel.send({"kind": "ready", "call": message["call"]})

    def _join(self, deadline: timedelta, address: str) -> None:
        """Set up torch.distributed. Rank 0 holds the store, on a port that the system gives it.

        Args:
            deadline: of a collective operation.
            address: of the controller's machine, as others reach it; empty where there are no others.
        """
        import torch
        from torch.distributed import TCPStore, init_process_group

        seat, channel = self._seat, self._channel
        here = channel.own_host == channel.peer_host
        if interface := interface_of(address if here else channel.own_host):
            prepare_gloo(interface)
        if seat.rank == 0:
            store = TCPStore("127.0.0.1", 0, seat.world_size, is_master=True, timeout=deadline, wait_for_workers=False)
            # On the controller's machine it may be connected by the loopback, which other machines would take for their own.
            channel.send({"kind": "store", "host": "" if here else channel.own_host, "port": store.port})
        else:
            place = self._places.get()
            host, port = place["host"] or channel.peer_host, place["port"]
            store = TCPStore(host, port, seat.world_size, is_master=False, timeout=deadline, wait_for_workers=False)
        group: dict[str, Any] = {"store": store, "rank": seat.rank, "world_size": seat.world_size, "timeout": deadline}
        if seat.device.startswith("cuda"):
            device = torch.device(seat.device)
            torch.cuda.set_device(device)
            init_process_group("cpu:gloo,cuda:nccl", device_id=device, **group)
        else:
            init_process_group("gloo", **group)

    def _call(self, message: dict[str, Any], blobs: list[bytearray]) -> None:
        call, verb = message["call"], message["verb"]
        if verb not in verbs_of(type(self._host)):
            raise ValueError(f"{type(self._host).__name__} has no verb {verb!r}")
        arguments = decode(message["arguments"], blobs)

        def tell(value: Any) -> None:
            header, parts = encode(value)
            self._channel.send({"kind": "event", "call": call, "value": header}, parts)

        with telling(tell):
            result = getattr(self._host, verb)(**arguments)
        header, parts = encode(result)
        self._channel.send({"kind": "result", "call": call, "value": header}, parts)

    def _take_note(self, message: dict[str, Any], blobs: list[bytearray]) -> None:
        try:
            if not takes_note(type(self._host), message["note"]):
                raise ValueError(f"{type(self._host).__name__} takes no note {message['note']!r}")
            getattr(self._host, message["note"])(**decode(message["arguments"], blobs))
        except Exception as error:  # as what a verb raises
            self._tell_error({"call": None}, error)

    def _tell_error(self, message: dict[str, Any], error: Exception) -> None:
        text = _told(error)
        with suppress(OSError):  # the log's disk may be full: the controller is told all the same
            print(text, file=sys.stderr, flush=True)
        written = error_fields(error) if isinstance(error, UserError) else None
        self._channel.send(
            {
                "kind": "error",
                "call": message["call"],
                "text": "".join(traceback.format_exception_only(error)).strip()[-_TRACEBACK_CHARACTERS:],
                "traceback": text[-_TRACEBACK_CHARACTERS:],
                "collective": _is_collective(error),
                "user_error": written,
            }
        )

    def _leave(self) -> None:
        if isinstance(self._host, Closing):
            self._host.close()
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()

    def _receive(self) -> None:
        try:
            while True:
                message, blobs = self._channel.receive()
                if message["kind"] == "join":
                    self._places.put(message)
                elif message["kind"] == "note":
                    self._take_note(message, blobs)
                else:
                    self._inbox.put((message, blobs))
        except ChannelClosed:
            # Without a controller there is nobody to work for; a collective would keep the main thread from knowing.
            os.killpg(0, signal.SIGKILL)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            try:
                self._channel.send({"kind": "beat"})
            except ChannelClosed:
                os.killpg(0, signal.SIGKILL)


def _told(error: BaseException) -> str:
    """An error with its traceback, without the frames that brought it here or imported a module."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    last = "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_list(frames)) + last


def _is_collective(error: BaseException) -> bool:
    """Whether an error came out of a collective operation, and not out of this rank's own work."""
    frames = traceback.extract_tb(error.__traceback__)
    names = ("distributed_c10d.py", "_functional_collectives.py")
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return any(frame.filename.endswith(names) for frame in frames) or any(word in str(error) for word in words)
