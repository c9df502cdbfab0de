"""Resolved targets → plans based on up-to-date locks. A stale lock is resolved again, with a message."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from primus.errors import InputError, PrimusError
from primus.files import write_file
from primus.plan.action import ImagePlan
from primus.plan.layers import plan_image
from primus.plan.resolve import ResolvedTarget
from primus.plan.workspace import StatIndex
from primus.progress import choose_progress
from primus.versions.lock import LockedFile, dumps

if TYPE_CHECKING:
    from primus.progress import Progress
    from primus.versions.relock import Shared


def lock_target(
    resolved: ResolvedTarget,
    progress: Progress,
    *,
    refresh: bool = False,
    gone: Sequence[LockedFile] = (),
    shared: Shared | None = None,
) -> ResolvedTarget:
    """Resolve the target's request to exact files and write its lock; see :func:`primus.versions.relock.resolve`.

    An error about a package, an image or a repository gets the line of its pin.
    """
    # Seam "sources": pip's and apt's code and requests, 150 ms that a plan with an up-to-date lock does not need.
    from primus.programs import with_packages
    from primus.versions import relock

    previous, request = resolved.lock, resolved.request
    call = partial(
        relock.resolve, request, previous=previous, refresh=refresh, gone=gone, shared=shared, progress=progress
    )
    try:
        lock = with_packages(call, say=progress.say)
    except PrimusError as error:
        if error.where is None and error.about:
            error.where = resolved.pin_of(error.about)[1] or None
        raise
    if lock != previous:
        write_file(resolved.lock_path, dumps(lock))
    return replace(resolved, lock=lock)


def plan_images(
    targets: Sequence[ResolvedTarget],
    stats: StatIndex,
    *,
    locked: bool = False,
    offline: bool = False,
    quiet: bool = False,
) -> list[ImagePlan]:
    """Return the plans of the targets.

    A stale or missing lock is created again, with a message, unless ``locked`` (CI, releases) or ``offline``
    forbids it.
    """
    return [plan_image(_with_lock(target, locked, offline, quiet), stats) for target in targets]


def _with_lock(resolved: ResolvedTarget, locked: bool, offline: bool, quiet: bool) -> ResolvedTarget:
    stale = resolved.stale
    if not resolved.request.asks:
        return replace(resolved, lock=None)
    if resolved.lock is not None and not stale:
        return resolved
    what = "; ".join(map(str, stale[:5])) + (f"; and {len(stale) - 5} more" if len(stale) > 5 else "")
    name = resolved.name
    sentence = f"the lock of {name} is stale: {what}" if resolved.lock else f"{name} has no lock yet"
    if locked or offline:
        raise InputError(sentence, where=_place(resolved), hint=f"{resolved.lock_command}, and commit the result")
    print(f"! {sentence}; {'locking it again' if resolved.lock else 'creating one'}", file=sys.stderr)
    with choose_progress(quiet) as progress:
        return lock_target(resolved, progress)


def _place(resolved: ResolvedTarget) -> str | None:
    """Return the line of versions.yaml of the first changed pin that still exists."""
    for item in resolved.stale:
        kind, _, rest = item.pin.partition(" ")
        if kind == "base" and rest.split(" ")[0] in resolved.versions.bases:
            return resolved.base_place(rest.split(" ")[0])
        for component, entry in resolved.versions.components.items():
            for pin in entry.pins:
                if pin.named(kind) == rest and pin.version == (item.wanted or "").partition(" ")[0]:
                    return resolved.pin_place(component, pin)
    return None
