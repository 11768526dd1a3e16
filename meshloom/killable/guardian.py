"""The process that outlives the controller, if only to kill what it left behind.

Owns: a list of processes and their marks, told over a pipe (``+ pid mark``, ``- pid``, ``end``). Always holds: when the
pipe closes or the parent changes, every listed process is killed with its children, and this one ends.
"""

import os
import select

from meshloom.killable.process import kill_tree

_LOOK_S = 0.5
"""How often it looks for its parent: a child that the controller forked can keep the pipe open after its death."""


def guard(descriptor: int) -> None:
    """Follow the list until the controller is gone; then kill."""
    parent = os.getppid()
    marks: dict[int, str] = {}
    text = ""
    while os.getppid() == parent:
        if not select.select([descriptor], [], [], _LOOK_S)[0]:
            continue
        chunk = os.read(descriptor, 2**16).decode()
        if not chunk:
            break
        *lines, text = (text + chunk).split("\n")
        if "end" in lines:
            break
        for line in lines:
            sign, pid, *rest = line.split()
            if sign == "+":
                marks[int(pid)] = rest[0]
            else:
                marks.pop(int(pid), None)
    for worker, mark in marks.items():
        kill_tree(worker, mark)
