"""The gates of a build decide which images get their name.

Worker threads examine the layers: new layers while they are written, cached layers while the build runs. A release that
fails a gate gets no name. A preview gets its name, and the build reports the failed gates.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING

from primus.engine.pipeline import Gates
from primus.errors import CheckFailed
from primus.gates.check import judge, outcome_text
from primus.gates.examined import Examined, look_into
from primus.gates.facts import keep
from primus.gates.needles import needles_of
from primus.gates.rules.coherence import check_pins
from primus.gates.watch import Watch

if TYPE_CHECKING:
    from primus.engine.image import Composed
    from primus.gates.examiner import LayerFacts
    from primus.gates.finding import GateReport
    from primus.oci.store import Layer
    from primus.oci.tar import Watch as Watching
    from primus.plan.action import ImagePlan
    from primus.plan.workspace import Workspace
    from primus.progress import Progress

# One for each builder thread (see run_actions), which waits for the thread that examines its layer.
_READERS = max(2, os.cpu_count() or 2)


class Gatekeeper(Gates):
    """Judges the images of one build."""

    def __init__(self, workspace: Workspace, progress: Progress) -> None:
        self._workspace = workspace
        # The pool starts no thread before the first submission.
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="gates")
        self._facts: dict[str, Future[LayerFacts]] = {}
        self._stop = Event()

    def admit(self, plans: Sequence[ImagePlan]) -> None:
        """Raise CheckFailed for a release whose pins contradict each other."""
        for plan in plans:
            if not plan.resolved.choice.preview:
                check_pins(plan.resolved)

    def watch(self) -> Watching:
        """Return an observer, with which a worker thread examines a layer while it is written."""
        watch = Watch()
        watch.facts = self._pool.submit(watch.observe, needles_of(self._workspace))
        return watch

    def look(self, layer: Layer, watch: Watching | None = None) -> None:
        """Use what ``watch`` found in the layer, or else examine the layer in a worker thread. Errors are
        raised when an image with the layer is judged.
        """
        if layer.blob.digest in self._facts:
            return
        if isinstance(watch, Watch) and watch.facts is not None:
            watch.facts.add_done_callback(lambda done: self._keep(layer, done))
            self._facts[layer.blob.digest] = watch.facts
        else:
            self._facts[layer.blob.digest] = self._pool.submit(look_into, self._workspace, layer, self._stop)

    def _keep(self, layer: Layer, seen: Future[LayerFacts]) -> None:
        if not seen.cancelled() and seen.exception() is None:
            keep(seen.result(), layer.blob.digest, self._workspace.facts, needles_of(self._workspace))

    def judge(self, image: Composed) -> tuple[str, ...]:
        """Judge an image by the facts about its layers.

        Raises CheckFailed with all findings if a release fails a gate, HostError if a layer is damaged.
        """
        for layer in image.layers:
            self.look(layer)
        facts = {
            action.name: self._facts[layer.blob.digest].result()
            for action, layer in zip(image.plan.layers, image.layers, strict=True)
        }
        outcome = judge(Examined(image=image, facts=facts, workspace=self._workspace))
        if not outcome.passed and not image.plan.resolved.choice.preview:
            raise CheckFailed(
                f"{image.plan.ref} fails a gate, so there is no such image:\n{outcome_text(outcome)}",
                hint="only an image of a preview channel may fail one",
            )
        return tuple(_sentence(report) for report in outcome.reports if not report.passed)

    def close(self) -> None:
        """Stop all examinations. Called when the build ends or is interrupted."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)


def _sentence(report: GateReport) -> str:
    first, *others = (f for f in report.findings if f.severity == "error")
    more = f" (and {len(others)} more)" if others else ""
    return f"{report.gate}: {report.summary}; {first.path + ': ' if first.path else ''}{first.message}{more}"
