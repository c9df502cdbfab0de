"""`primus lock`: from pins to exact files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from primus_images.cli.host.common import (
    SeveralOptions,
    SourceOptions,
    open_project,
    targets_of,
)
from primus_images.cli.verb import answer, note
from primus_images.errors import InputError, nearest
from primus_images.plan.resolve import ResolvedTarget, lock_target, resolve, save_lock
from primus_images.progress import choose_progress
from primus_images.terminal import PLAIN, counted
from primus_images.versions.lock import Drift, Lock, LockedFile, Shared


@dataclass(frozen=True, kw_only=True)
class LockOptions(SeveralOptions):
    """The options of ``lock``."""

    check: bool
    dry_run: bool
    refresh: bool
    refresh_package: Sequence[str]


class Change(NamedTuple):
    """One file that was added to a lock, removed from it or changed.

    ``old`` or ``new`` is None where it is absent.
    """

    kind: str
    name: str
    old: str | None
    new: str | None


def lock(options: LockOptions) -> int:
    """Resolve versions.yaml to exact files: one lock per target and channel.

    Without TARGET, all targets are locked. Unchanged pins and their dependencies keep their locked
    versions. --check and --dry-run write nothing, and exit with code 1 if a lock is stale.
    """
    targets = [resolved for resolved in resolved_or_all(options) if resolved.request.asks]
    if options.check:
        if options.dry_run or options.refresh or options.refresh_package:
            raise InputError("--check contacts no source, so there is nothing to resolve")
        return _check(targets, options)
    return _lock(targets, options)


def resolved_or_all(options: SeveralOptions) -> list[ResolvedTarget]:
    """Resolve the requested targets; without any, all of them, or all of the requested channel."""
    if not options.target:
        return resolved_all(options)
    project = open_project(options)
    return [resolve(project, name) for name in targets_of(project, options)]


def resolved_all(options: SourceOptions) -> list[ResolvedTarget]:
    """Resolve all targets, or all of the requested channel."""
    project = open_project(options)
    names = project.target_names()
    if options.channel:
        names = [name for name in names if options.channel in project.target(name)[0].channels]
    return [resolve(project, name) for name in names]


def _check(targets: Sequence[ResolvedTarget], options: LockOptions) -> int:
    stale: list[dict[str, Any]] = []
    lines = []
    for resolved in targets:
        name = resolved.lock_name
        drifts = _drifts(resolved)
        if not drifts:
            lines.append(f"✓ {name} matches versions.yaml")
        for drift in drifts:
            component, where = resolved.drift_place(drift.pin)
            stale.append({"lock": name, **drift._asdict(), "component": component, "where": where})
            moved = f"{drift.locked or 'nothing'} → {drift.wanted or 'nothing'}"
            lines.append(f"{where}: {name} is stale: {component or drift.pin}: {moved}")
    if stale:
        note(options, *dict.fromkeys(f"  → {resolved.lock_command}" for resolved in targets))
    note(
        options,
        "not compared, because no source was asked: dependencies, and whether all files are "
        "still offered there",
    )
    return answer(options, {"fresh": not stale, "stale": stale}, lines, passed=not stale)


def _drifts(resolved: ResolvedTarget) -> Sequence[Drift]:
    """Return how the lock of a target differs from its pins. Every pin does if there is none."""
    if resolved.lock is not None:
        return resolved.stale
    pins = resolved.request.flat().items()
    return [Drift(pin=pin, locked=None, wanted=text) for pin, text in pins]


def _lock(targets: Sequence[ResolvedTarget], options: LockOptions) -> int:
    _require_packages(options.refresh_package, targets)
    rows: list[dict[str, Any]] = []
    shared: Shared = {}
    with choose_progress(options.json) as progress:
        for resolved in targets:
            gone = [file for file in _files(resolved) if file.name in options.refresh_package]
            new = lock_target(resolved, progress, shared, refresh=options.refresh, gone=gone)
            if not options.dry_run:
                save_lock(resolved, new)
            changes = compare(resolved.lock, new)
            row = {"lock": resolved.lock_name, "files": len(new.distinct)}
            rows.append(row | {"changes": [change._asdict() for change in changes]})
            if not options.json:
                progress.say(summary(resolved.lock_name, new, changes))
    changed = any(row["changes"] for row in rows)
    return answer(options, rows, (), passed=not (options.dry_run and changed))


def _files(resolved: ResolvedTarget) -> Sequence[LockedFile]:
    return resolved.lock.files if resolved.lock else ()


def _require_packages(names: Sequence[str], targets: Sequence[ResolvedTarget]) -> None:
    locked = {file.name for resolved in targets for file in _files(resolved)}
    for name in names:
        if name not in locked:
            raise InputError(
                f"--refresh-package {name!r}: the locks have no such package"
                f"{nearest(name, locked)}",
                hint="name it as the lock does",
            )


def compare(old: Lock | None, new: Lock) -> tuple[Change, ...]:
    """Return the files that differ between two locks, sorted by kind, base and name."""
    before = _versions(old) if old else {}
    after = _versions(new)
    changes = []
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            kind, _, name = key
            old_version, _ = before.get(key, (None, ""))
            new_version, _ = after.get(key, (None, ""))
            changes.append(Change(kind=kind, name=name, old=old_version, new=new_version))
    return tuple(changes)


def _versions(lock: Lock) -> dict[tuple[str, str, str], tuple[str, str]]:
    """Return kind, base and name of each file → version and hash."""
    return {
        (file.kind, file.base or "", file.name): (file.version, file.sha256) for file in lock.files
    }


def summary(name: str, lock: Lock, changes: Sequence[Change]) -> str:
    """Return what is said of a lock: its size, and its changes as a table."""
    size = sum(file.size for file in lock.distinct)
    head = f"{name}: {counted(len(lock.distinct), 'file')}, {size / 1e6:,.1f} MB"
    if not changes:
        return f"{head}; nothing changed"
    if all(change.old is None for change in changes) and len(changes) == len(lock.files):
        return f"{head}; new"
    rows = []
    for change in changes:
        remark = "(same version, different bytes)" if change.old == change.new else ""
        rows.append((change.kind, change.name, change.old or "—", f"→ {change.new or '—'}", remark))
    table = PLAIN.table(rows, right=(2,), indent="  ")
    return "\n".join([f"{head}; {len(changes)} changed", *table])
