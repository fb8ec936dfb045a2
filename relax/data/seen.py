"""Which rows came before: exact, and on disk, so that memory does not grow with the data.

SQLite keeps a private temporary database: in memory while it is small, in a file that vanishes with it once it is not.
"""

import sqlite3
from collections.abc import Sequence


class SeenRows:
    """Maps keys to the row that had one first."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE seen (key BLOB PRIMARY KEY, row INTEGER) WITHOUT ROWID")

    def first(self, keys: Sequence[bytes], row: int) -> int | None:
        """The first row that had one of `keys`; None where there is none, and `row` is then remembered for them all."""
        for key in keys:
            if found := self._database.execute("SELECT row FROM seen WHERE key = ?", (key,)).fetchone():
                return int(found[0])
        self._database.executemany("INSERT INTO seen VALUES (?, ?)", [(key, row) for key in keys])
        return None
