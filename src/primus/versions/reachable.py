"""Checking within a few seconds, and at the same time for all sources, whether they answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from primus.errors import HostError

# Part of the 5 s within which an error must appear. On a busy machine, starting Python takes much of the rest.
DEADLINE_S = 4.0
# A source that fails at once may recover quickly, for example after a reset connection or a gateway's restart.
RETRY_AFTER_S = 0.5
# For sources of pip's and apt's configuration: however slow a mirror is, it works.
HOST_DEADLINE_S = 8.0

# A function that checks a source and raises HostError without an answer, and the package, image or repository that is
# pinned to the source, if any.
Probe = tuple[Callable[[], object], str]


def require_answers(
    probes: Mapping[str, Probe],
    channel: str | None = None,
    *,
    deadline: float | None = None,
    hint: str = "run it on a machine that can reach it, or use another channel (--channel)",
) -> None:
    """Check all sources at the same time, and those that fail once more.

    Raises HostError, within ``deadline`` seconds (default: ``DEADLINE_S``), for the first source without an answer.
    ``channel`` is the one that needs them, if known.
    """
    failed: dict[str, HostError] = {}

    def one(name: str, probe: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            try:
                probe()
            except HostError:
                # A failure after more than that had its time, and is not tried again.
                if time.monotonic() - began > RETRY_AFTER_S:
                    raise
                time.sleep(RETRY_AFTER_S)
                probe()
        except HostError as error:
            failed[name] = error

    threads = {
        name: threading.Thread(target=one, args=(name, probe), daemon=True) for name, (probe, _) in probes.items()
    }
    for thread in threads.values():
        thread.start()
    limit = DEADLINE_S if deadline is None else deadline
    _wait(threads.values(), limit)
    for name, thread in threads.items():
        if name in failed or thread.is_alive():
            about = probes[name][1] or None
            needs = f"; channel {channel} needs it{f' for {about}' if about else ''}" if channel else ""
            error = failed.get(name)
            cause = error.message.rpartition(": ")[2] if error else f"no answer in time ({limit:g} s)"
            raise HostError(f"{name} does not answer: {cause}{needs}", hint=hint, about=about)


def _wait(threads: Iterable[threading.Thread], seconds: float) -> None:
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
