"""What a decode step knows of each running sequence: one column of integers and one of numbers, on the device.

Owns: the names of the fields. Always holds: host and device have the same layout, so a copy of the whole is the only
message between them.
"""

from enum import IntEnum


class Field(IntEnum):
    """Rows of the integer state, int64 [fields, slots]."""

    TOKEN = 0
    """The newest token, which the next step computes."""
    LENGTH = 1
    """Tokens before it in the cache: its position."""
    COUNT = 2
    """Tokens generated so far."""
    LIMIT = 3
    """Tokens after which the sample ends."""
    FINISH = 4
    """A ``Finish``."""
    ROW = 5
    """Row of the output buffers."""
    KEY = 6
    """Key of the sample's random numbers."""
    RULE = 7
    """Row of the table of stop tokens."""
    TOP_K = 8


class Number(IntEnum):
    """Rows of the real state, float32 [fields, slots]."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2


class Finish(IntEnum):
    """Why a slot does nothing."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    EMPTY = 3
