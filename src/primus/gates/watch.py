"""Pass a layer's entries from the builder that writes them to the gates, which examine them in another thread.

Data that was just compressed is therefore not read and decompressed again. The builder waits if the gates are some
megabytes behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import Queue
from typing import TYPE_CHECKING

from primus.gates.examiner import Examiner, LayerFacts

if TYPE_CHECKING:
    from concurrent.futures import Future

    from primus.oci.tar import Entry

_BATCH = 1 << 20
_BATCHES = 4


class Watch:
    """Takes what the builder writes. :meth:`observe`, in another thread, returns the facts at the end. ``facts`` is
    the future of that thread, if one was started.
    """

    facts: Future[LayerFacts] | None = None

    def __init__(self) -> None:
        self._queue: Queue[list[Entry | bytes] | None] = Queue(_BATCHES)
        self._batch: list[Entry | bytes] = []
        self._size = 0

    def begin(self, entry: Entry) -> None:
        """Begin the next entry."""
        self._add(entry, 512)

    def feed(self, chunk: bytes) -> None:
        """Take the entry's next bytes."""
        self._add(chunk, len(chunk))

    def close(self) -> None:
        """Mark the end of the layer."""
        self._pass_on()
        self._queue.put(None)

    def _add(self, item: Entry | bytes, size: int) -> None:
        # Many files are too small to justify waking another thread.
        self._batch.append(item)
        self._size += size
        if self._size >= _BATCH:
            self._pass_on()

    def _pass_on(self) -> None:
        self._queue.put(self._batch)
        self._batch, self._size = [], 0

    def observe(self, needles: Sequence[bytes]) -> LayerFacts:
        """Examine everything until the builder closes the layer; see :class:`Examiner`."""
        examiner, ended = Examiner(needles), False
        try:
            for item in iter(self._queue.get, None):
                for part in item:
                    if isinstance(part, bytes):
                        examiner.feed(part)
                    else:
                        examiner.begin(part.path, part.kind, part.size)
            ended = True
            return examiner.facts()
        except BaseException:
            # The builder must not wait for a reader that has ended.
            while not ended and self._queue.get() is not None:
                pass
            raise
        finally:
            examiner.close()
