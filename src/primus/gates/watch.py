"""A layer's entries on their way from the builder that writes them to the gates, which look at them in a thread aside.

So nobody reads and unpacks again what was just compressed. The builder waits once the gates are some megabytes behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import Queue
from typing import TYPE_CHECKING

from primus.gates.facts import Examiner, LayerFacts

if TYPE_CHECKING:
    from concurrent.futures import Future

    from primus.oci.tar import Entry

_BATCH = 1 << 20
_BATCHES = 4


class Watch:
    """What the builder writes goes in; :meth:`observe`, in another thread, says what was seen once it is all.
    ``facts`` is what that thread will say, if one was started.
    """

    facts: Future[LayerFacts] | None = None

    def __init__(self) -> None:
        self._queue: Queue[list[Entry | bytes] | None] = Queue(_BATCHES)
        self._batch: list[Entry | bytes] = []
        self._size = 0

    def begin(self, entry: Entry) -> None:
        """The next entry."""
        self._add(entry, 512)

    def feed(self, chunk: bytes) -> None:
        """Its next bytes."""
        self._add(chunk, len(chunk))

    def close(self) -> None:
        """Nothing follows."""
        self._pass_on()
        self._queue.put(None)

    def _add(self, item: Entry | bytes, size: int) -> None:
        # Many files are smaller than waking another thread is worth.
        self._batch.append(item)
        self._size += size
        if self._size >= _BATCH:
            self._pass_on()

    def _pass_on(self) -> None:
        self._queue.put(self._batch)
        self._batch, self._size = [], 0

    def observe(self, needles: Sequence[bytes]) -> LayerFacts:
        """Look at everything until the builder closes; see :class:`Examiner`."""
        examiner = Examiner(needles)
        try:
            for item in iter(self._queue.get, None):
                for part in item:
                    if isinstance(part, bytes):
                        examiner.feed(part)
                    else:
                        examiner.begin(part.path, part.kind, part.size)
            return examiner.facts()
        except BaseException:
            # The builder must not wait for a reader that is gone.
            while self._queue.get() is not None:
                pass
            raise
        finally:
            examiner.close()
