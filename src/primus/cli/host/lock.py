"""Resolve versions.yaml to exact files (name, version, file name, size, sha256): one lock per target and channel.

Unchanged pins and their dependencies keep their locked versions. --refresh takes the newest versions that match.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from primus.cli.host.common import add_project_options, add_targets, open_project, targets_of
from primus.versions.lock import Drift, Lock, Request, drift

if TYPE_CHECKING:
    from primus.images.project import Project

__all__ = ["EXAMPLE", "Change", "add_arguments", "compare", "run"]

EXAMPLE = "primus lock cpu --check"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One file of a lock that came, went or took another version; None means absent."""

    kind: str
    name: str
    old: str | None
    new: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_targets(parser, required=False)
    add_project_options(parser)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a lock is stale")
    parser.add_argument("--refresh", action="store_true", help="take the newest versions that match the pins")


def run(args: argparse.Namespace) -> int:
    """Lock or check; 0 done or fresh, 1 stale under --check."""
    project = open_project(args)
    names = targets_of(project, args) if args.target else project.target_names()
    if args.channel and not args.target:
        names = [name for name in names if args.channel in project.target(name).channels]
    requests = [request for name in names if _asks(request := project.request(name))]
    return _check(project, requests, args.json) if args.check else _lock(project, requests, args)


def _asks(request: Request) -> bool:
    # A target of local folders alone has nothing to lock.
    return bool(request.bases or request.wheels or request.sdists or request.gits)


def _check(project: Project, requests: Sequence[Request], as_json: bool) -> int:
    stale: list[dict[str, Any]] = []
    for request in requests:
        name, lock = _name(project, request), project.lock(request.target)
        found = _all_new(request) if lock is None else drift(lock, request)
        rows = [{"lock": name, **asdict(one), "where": _where(project, request, one.pin)} for one in found]
        stale += rows
        if not as_json:
            for one, row in zip(found, rows, strict=True):
                print(f"{row['where']}: {name} is stale: {one}")
            if not found:
                print(f"✓ {name} answers versions.yaml")
    if as_json:
        print(json.dumps({"fresh": not stale, "stale": stale}, ensure_ascii=False, indent=2))
    elif stale:
        print("  → primus lock " + " ".join(sorted({request.target for request in requests})), file=sys.stderr)
    return 1 if stale else 0


def _lock(project: Project, requests: Sequence[Request], args: argparse.Namespace) -> int:
    from functools import partial

    from primus.images.display import choose_progress
    from primus.sandbox.tools import with_packages
    from primus.versions.relock import Known, resolve

    outcome: list[dict[str, Any]] = []
    known: Known = {}
    with choose_progress(args.json) as progress:
        for request in requests:
            name, previous = _name(project, request), project.lock(request.target)
            call = partial(resolve, request, previous=previous, refresh=args.refresh, known=known, progress=progress)
            lock = with_packages(call, say=progress.say)
            changes = compare(previous, lock)
            if previous != lock:
                project.write_lock(request.target, lock)
            outcome.append({"lock": name, "files": len(lock.distinct), "changes": [asdict(c) for c in changes]})
            if not args.json:
                progress.say(_table(name, lock, changes))
    if args.json:
        print(json.dumps(outcome, ensure_ascii=False, indent=2))
    return 0


def compare(old: Lock | None, new: Lock) -> tuple[Change, ...]:
    """The files on which two locks differ, by name."""

    def named(lock: Lock | None) -> Mapping[tuple[str, str, str], tuple[str, str]]:
        files = lock.files if lock else ()
        return {(f.kind, f.base or "", f.name): (f.version, f.sha256) for f in files}

    before, after = named(old), named(new)
    return tuple(
        Change(
            kind=key[0],
            name=key[2],
            old=before[key][0] if key in before else None,
            new=after[key][0] if key in after else None,
        )
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    )


def _table(name: str, lock: Lock, changes: Sequence[Change]) -> str:
    size = sum(f.size for f in lock.distinct)
    head = f"{name}: {len(lock.distinct)} files, {size / 1e6:,.1f} MB"
    if not changes:
        return f"{head}; nothing changed"
    if all(change.old is None for change in changes) and len(changes) == len(lock.files):
        return f"{head}; new"
    kinds = max(len(c.kind) for c in changes)
    names = max(len(c.name) for c in changes)
    olds = max(len(c.old or "—") for c in changes)
    same = "(same version, other bytes)"
    rows = [
        f"  {c.kind:<{kinds}}  {c.name:<{names}}  {c.old or '—':>{olds}} → {c.new or '—'}"
        + (f"  {same}" if c.old == c.new else "")
        for c in changes
    ]
    return "\n".join([f"{head}; {len(changes)} changed", *rows])


def _where(project: Project, request: Request, pin: str) -> str:
    """``versions.yaml:line:col`` of the pin (the file alone for a pin that is gone)."""
    from primus.versions.wheels import normalise

    kind, _, rest = pin.partition(" ")
    name, _, field = rest.rpartition(" ")
    if kind == "base" and name in project.versions.bases:
        return project.place("bases", name, field)
    for component, entry in project.pins(request.target).items():
        package = entry.named(kind)
        if package is not None and normalise(package) == rest.partition(" ")[0]:
            return project.pin_place(component, entry)
    return "versions.yaml"


def _name(project: Project, request: Request) -> str:
    return project.lock_path(request.target).relative_to(project.root).as_posix()


def _all_new(request: Request) -> tuple[Drift, ...]:
    return tuple(Drift(pin=pin, locked=None, wanted=text) for pin, text in request.flat().items())
