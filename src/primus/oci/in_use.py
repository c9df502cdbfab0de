"""The lock that keeps ``primus clean`` from removing what another command uses."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from primus.errors import HostError


class InUse:
    """The lock file ``path`` of the folder ``where``, which messages call ``what``."""

    def __init__(self, path: Path, what: str, where: Path) -> None:
        self._path, self._what, self._where = path, what, where
        self._held: int | None = None

    def hold(self) -> None:
        """Prevent :meth:`alone` from starting until this process ends. Does nothing if the folder does not exist."""
        if self._held is None:
            # Readers of another user's folder hold the lock, too. A folder without this file was never cleaned or
            # built in.
            with contextlib.suppress(OSError):
                self._held = os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
                fcntl.flock(self._held, fcntl.LOCK_SH)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other commands from using the folder. Raises HostError if one is using it."""
        if self._held is not None:
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise HostError(
                    f"another command uses {self._what}",
                    where=str(self._where),
                    hint="run this again when it has ended",
                ) from None
        try:
            yield
        finally:
            if self._held is not None:
                fcntl.flock(self._held, fcntl.LOCK_SH)
