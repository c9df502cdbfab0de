"""The verb that updates or checks the locks."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus import __version__
from primus.cli.host.common import SEVERAL, open_project, targets_of
from primus.cli.verb import flag, option, print_json, verb
from primus.errors import InputError, PrimusError
from primus.plan.resolve import ResolvedTarget, lock_target, resolve_all
from primus.progress import choose_progress
from primus.terminal import counted
from primus.versions.lock import Drift, Lock, Request, normalised
from primus.versions.traffic import LOG

if TYPE_CHECKING:
    from primus.versions.relock import Shared


def _changing(parser: argparse.ArgumentParser) -> None:
    changing = parser.add_mutually_exclusive_group()
    changing.add_argument("--check", action="store_true", help="compare with versions.yaml only; contact no source")
    changing.add_argument("--dry-run", action="store_true", help="resolve, show what would change, and write nothing")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One file that was added to a lock, removed from it or changed. ``old`` or ``new`` is None where it is absent."""

    kind: str
    name: str
    old: str | None
    new: str | None


@verb(
    *SEVERAL,
    _changing,
    flag("--refresh", "take the newest versions that match the pins"),
    option(
        "--refresh-package", metavar="NAME", action="append", default=[], help="take the newest version of this one"
    ),
    option("--report", type=Path, metavar="FILE", help="write every request to a source, and its answer, to FILE"),
    example="primus lock cpu --check",
)
def lock(args: argparse.Namespace) -> int:
    """Resolve versions.yaml to exact files (name, version, file name, size, sha256): one lock per target and channel.

    Without TARGET, all targets are locked. No other command writes a lock. Unchanged pins and their dependencies keep
    their locked versions. --refresh takes the newest versions that match. --check compares the locks with
    versions.yaml, and --dry-run resolves them and shows the files that would change. Both write nothing, and exit with
    code 1 if a lock is stale. --report FILE records every request and its answer, without logins, also when the lock
    fails.
    """
    project = open_project(args)
    names = targets_of(project, args) if args.target else project.target_names()
    if args.channel and not args.target:
        names = [name for name in names if args.channel in project.target(name).channels]
    targets = [resolved for resolved in resolve_all(project, names) if resolved.request.asks]
    if args.check:
        if args.report:
            raise InputError(
                "--check contacts no source, so there is nothing to report", hint="leave out --check or --report"
            )
        return _check(targets, args.json)
    with _reported(args.report):
        return _lock(targets, args)


def _check(targets: Sequence[ResolvedTarget], as_json: bool) -> int:
    stale: list[dict[str, Any]] = []
    for resolved in targets:
        name = resolved.lock_name
        drifts = _all_new(resolved.request) if resolved.lock is None else resolved.stale
        for drift in drifts:
            component, where = _where(resolved, drift.pin)
            stale.append({"lock": name, **asdict(drift), "component": component, "where": where})
            if not as_json:
                changed = f"{component or drift.pin}: {drift.locked or 'nothing'} → {drift.wanted or 'nothing'}"
                print(f"{where}: {name} is stale: {changed}")
        if not as_json and not drifts:
            print(f"✓ {name} matches versions.yaml")
    if as_json:
        print_json({"fresh": not stale, "stale": stale})
    elif stale:
        print("  → primus lock " + " ".join(sorted({resolved.name for resolved in targets})), file=sys.stderr)
    return 1 if stale else 0


def _lock(targets: Sequence[ResolvedTarget], args: argparse.Namespace) -> int:
    outcome: list[dict[str, Any]] = []
    shared: Shared = {}
    with choose_progress(args.json) as progress:
        for resolved in targets:
            name = resolved.lock_name
            files = resolved.lock.files if resolved.lock else ()
            new = lock_target(
                resolved,
                progress,
                refresh=args.refresh,
                gone=[file for file in files if file.name in args.refresh_package],
                shared=shared,
                write=not args.dry_run,
            ).lock
            assert new is not None
            changes = compare(resolved.lock, new)
            outcome.append({"lock": name, "files": len(new.distinct), "changes": [asdict(c) for c in changes]})
            if not args.json:
                progress.say(_table(name, new, changes))
    if args.json:
        print_json(outcome)
    return 1 if args.dry_run and any(row["changes"] for row in outcome) else 0


def compare(old: Lock | None, new: Lock) -> tuple[Change, ...]:
    """Return the files that differ between two locks, sorted by kind, base and name."""

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
    head = f"{name}: {counted(len(lock.distinct), 'file')}, {size / 1e6:,.1f} MB"
    if not changes:
        return f"{head}; nothing changed"
    if all(change.old is None for change in changes) and len(changes) == len(lock.files):
        return f"{head}; new"
    kinds = max(len(c.kind) for c in changes)
    names = max(len(c.name) for c in changes)
    olds = max(len(c.old or "—") for c in changes)
    same = "(same version, different bytes)"
    rows = [
        f"  {c.kind:<{kinds}}  {c.name:<{names}}  {c.old or '—':>{olds}} → {c.new or '—'}"
        + (f"  {same}" if c.old == c.new else "")
        for c in changes
    ]
    return "\n".join([f"{head}; {len(changes)} changed", *rows])


def _where(resolved: ResolvedTarget, pin: str) -> tuple[str, str]:
    """Return the component of a pin (empty for a base's) and its place, or only the file for a pin that was removed."""
    kind, _, rest = pin.partition(" ")
    name, _, key = rest.rpartition(" ")
    base, _, extra = name.partition(" ")
    if kind == "base" and base in resolved.versions.bases:
        return "", resolved.base_place(base, *(("extras", extra) if extra in resolved.extras else (key,)))
    for component, entry in resolved.pins.items():
        package = entry.named(kind)
        if package is not None and normalised(package) == rest.partition(" ")[0]:
            return component if kind != "build" else "", resolved.pin_place(component, entry)
    return "", "versions.yaml"


def _all_new(request: Request) -> tuple[Drift, ...]:
    return tuple(Drift(pin=pin, locked=None, wanted=text) for pin, text in request.flat().items())


@contextmanager
def _reported(path: Path | None) -> Iterator[None]:
    """Write every run of a tool and every request to ``path``, and how the command ended."""
    if path is None:
        yield
        return
    try:
        report = logging.FileHandler(path, mode="w", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"the report cannot be written to {path}: {error.strerror}", hint="name another file: --report FILE"
        ) from None
    report.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    handlers = [report, *([logging.lastResort] if logging.lastResort else [])]
    for handler in handlers:
        LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("pip", "uv", "requests", "urllib3"))
    LOG.info("primus %s, %s", __version__, ", ".join([platform.platform(), platform.python_version(), *versions]))
    try:
        yield
        LOG.info("locked")
    except PrimusError as error:
        LOG.info("failed: %s", error)
        raise
    finally:
        for handler in handlers:
            LOG.removeHandler(handler)
        LOG.setLevel(logging.NOTSET)
        report.close()
