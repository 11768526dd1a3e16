"""Replies of a judge that are kept on disk, by what was asked.

Owns: the file. Refuses to know: services. Always holds: what is read was once written whole for the same question; several
processes may use one file at once; neither questions nor keys of services are in it.
"""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from meshloom.config.errors import RunFault

_BUSY_S = 60.0
_TABLE = """
CREATE TABLE IF NOT EXISTS replies (
    question TEXT PRIMARY KEY, text TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL
)
"""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a judge wrote.

    Args:
        text: of it.
        prompt_tokens: that the service counted as read; 0 where it counts none.
        completion_tokens: as written.
    """

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class KeptReplies:
    """Replies in an SQLite file, which is made when it is first used; for one thread.

    Args:
        path: the file; its folder must be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def get(self, question: str) -> Reply | None:
        """The reply to a question, by its digest; none if there is none yet.

        Raises:
            RunFault: if the file cannot be read.
        """
        try:
            with closing(
                self._open().execute(
                    "SELECT text, prompt_tokens, completion_tokens FROM replies WHERE question = ?", (question,)
                )
            ) as found:
                row = found.fetchone()
        except sqlite3.Error as error:
            raise self._fault(error) from error
        return None if row is None else Reply(text=row[0], prompt_tokens=row[1], completion_tokens=row[2])

    def put(self, question: str, reply: Reply) -> None:
        """Keep a reply; the first one to a question stays.

        Raises:
            RunFault: if the file cannot be written.
        """
        row = (question, reply.text, reply.prompt_tokens, reply.completion_tokens)
        try:
            connection = self._open()
            with connection:
                connection.execute("INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            # Writers wait for each other by the file's lock, which a file shared over a network has too.
            connection = sqlite3.connect(self._path, timeout=_BUSY_S)
            connection.execute("PRAGMA synchronous = NORMAL")
            with connection:
                connection.execute(_TABLE)
            self._connection = connection
        return self._connection

    def _fault(self, error: sqlite3.Error) -> RunFault:
        return RunFault(
            "the judge's replies cannot be kept",
            where=f"reward.components.NAME.judge.cache: {self._path}",
            why=str(error),
            fix="a file in a folder that can be written to, or judge.use_cache=false",
        )
