"""An append-only file of JSON lines that survives SIGKILL: what a stage resumes from.

At most SYNC_S seconds of appended rows can be lost with the machine, none with the process. A torn
last line, which a crash can leave, is cut off when the journal is opened again.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

SYNC_S = 2.0


class Journal:
    """`with Journal(path) as journal:` then journal.rows (all of them) and journal.append(row)."""

    def __init__(self, path: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        whole = 0
        if path.is_file():
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                self.rows.append(json.loads(line))
                whole += len(line)
        self._file = path.open("ab")
        self._file.truncate(whole)
        self._synced = time.monotonic()

    def append(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.rows.append(row)
        if time.monotonic() - self._synced > SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Waits until everything appended is on disk."""
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.sync()
        self._file.close()
