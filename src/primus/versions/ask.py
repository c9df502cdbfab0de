"""Ask several sources at once whether they answer, within a few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from primus.errors import HostError

# Of the 5 s that a refusal may take; on a busy machine starting Python takes a good part of the rest.
DEADLINE_S = 4.0
# A source that fails at once may be about to answer: a connection reset, a gateway that restarts.
RETRY_AFTER_S = 0.5
# For what pip and apt are configured to: as long as a slow mirror takes that works all the same.
HOST_DEADLINE_S = 8.0

# What asks a source, and raises HostError without an answer; and the package, image or repository that is pinned to the
# source, or nothing.
Probe = tuple[Callable[[], object], str]


def ask(
    probes: Mapping[str, Probe],
    channel: str | None = None,
    *,
    deadline: float | None = None,
    hint: str = "run it on a machine that reaches it, or take another channel (--channel)",
) -> None:
    """Ask every source at once, and once more what fails. Raises HostError, within ``deadline`` seconds (default:
    ``DEADLINE_S``), for the first that gives no answer.

    ``channel`` is the one that needs them, where it is known.
    """
    failed: dict[str, HostError] = {}

    def one(name: str, probe: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            try:
                probe()
            except HostError:
                # What took longer than that to fail has had its time.
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
