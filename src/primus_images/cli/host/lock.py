"""Verbs about pins: lock them, list those that have newer versions, and move them."""

import argparse
import calendar
import difflib
import importlib.metadata
import logging
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from primus_images import __version__
from primus_images.cli.host.common import open_project, targets_of
from primus_images.cli.verb import answer, note
from primus_images.errors import HostError, InputError, PrimusError, nearest
from primus_images.files import reason_of, write_file
from primus_images.plan.resolve import ResolvedTarget, lock_target, resolve, save_lock
from primus_images.progress import choose_progress
from primus_images.release.bump import Outlooks, Place, edit, trial
from primus_images.release.documents import checkout
from primus_images.schema import notes_of
from primus_images.terminal import PLAIN, Screen, counted
from primus_images.versions.components import Component, Versions
from primus_images.versions.lock import Drift, Lock, Shared, dumps
from primus_images.versions.traffic import LOG
from primus_images.waits import answer_of


class Change(NamedTuple):
    """One file that was added to a lock, removed from it or changed. ``old`` or ``new`` is None
    where it is absent.
    """

    kind: str
    name: str
    old: str | None
    new: str | None


def lock(args: argparse.Namespace) -> int:
    """Resolve versions.yaml to exact files (name, version, file name, size, sha256): one lock per
    target and channel.

    Without TARGET, all targets are locked. Unchanged pins and their dependencies keep their locked
    versions. --check and --dry-run write nothing, and exit with code 1 if a lock is stale.
    """
    targets = [resolved for resolved in _resolved(args) if resolved.request.asks]
    if args.check:
        if args.report or args.dry_run or args.refresh or args.refresh_package:
            raise InputError("--check contacts no source, so there is nothing to report or resolve")
        return _check(targets, args)
    with _reported(args.report) if args.report else nullcontext():
        return _lock(targets, args)


def outdated(args: argparse.Namespace) -> int:
    """List the pins that have newer versions: the newest that fits all other pins, and the newest
    of the index.
    """
    outlooks = Outlooks(_resolved(args))
    with answer_of("the Python indexes"), ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(outlooks.of, outlooks.uses))
    table = []
    behind = dict[str, None]()
    for row in (row for row in rows if row.newest or row.error):
        others = ", ".join(name for name in _named(row.moves) if name != row.component)
        best = row.error or (row.compatible or "–") + (f" (with {others})" if others else "")
        table.append(
            (
                row.component,
                row.channel,
                ", ".join(row.targets),
                row.pinned,
                best,
                row.newest or "–",
            )
        )
        behind |= {f"{row.component}: {row.behind}": None} if row.behind else {}
    lines = Screen.of().table(
        table, head=("component", "channel", "targets", "pinned", "compatible", "newest")
    )
    lines.append(f"{counted(len(rows) - len(table), 'pin')} of {len(rows)} at the newest version")
    lines += [line for why in behind for line in Screen.of().wrap(why, hanging="  ")]
    answer(args, [{**row._asdict(), "moves": _named(row.moves)} for row in rows], lines)
    if any(row.error for row in rows):
        return HostError.exit_code
    return 0


def bump(args: argparse.Namespace) -> int:
    """Move pins to the newest version that fits the other pins, or to VERSION, and lock. Held
    trains move together.
    """
    args.target = []
    project = open_project(args)
    name = args.release
    rule = notes_of(Versions)["release"]["pattern"]
    if name and not (
        re.fullmatch(rule, name) and Version(name) > Version(project.versions.release)
    ):
        raise InputError(
            f"--release {name!r} is not the name of a release after the current one, "
            f"{project.versions.release}",
            hint=f"its form is vYY.N, like {project.versions.release}, and it must be later; to "
            "go back to an earlier one, edit `release` in versions.yaml",
        )
    with answer_of("the Python indexes"):
        moves = _moves(args)
    path = project.root / "versions.yaml"
    old = path.read_text(encoding="utf-8")
    new = edit(old, project.versions_document, project.versions.components, moves)
    if args.release:
        today = datetime.now(tz=UTC).date()
        if project.versions.supported_until is None:
            new = re.sub(r"(?m)^(created:.*)$", r"\1\nsupported_until:", new, count=1)
        for key, entry in (
            ("release", name),
            ("created", today),
            ("supported_until", _six_months_after(today)),
        ):
            new = re.sub(rf"(?m)^{key}:[^#\n]*?( +#.*)?$", rf"{key}: {entry}\1", new, count=1)
    locks: list[tuple[str, Lock, Lock]] = []
    shared: Shared = {}
    with trial(project.root, new) as tried, choose_progress(args.json) as progress:
        for resolved in (resolve(tried, name) for name in tried.target_names()):
            if resolved.lock and resolved.stale:
                lock = lock_target(resolved, progress, shared)
                locks.append((resolved.lock_name, resolved.lock, lock))
    message = _message(project.versions.components, moves, args.release)
    changes = [
        {"lock": name, "changes": [c._asdict() for c in compare(*pair)]} for name, *pair in locks
    ]
    lines = list(
        difflib.unified_diff(
            old.split("\n"), new.split("\n"), "old", "versions.yaml", n=0, lineterm=""
        )
    )
    lines += [
        *(_table(name, after, compare(before, after)) for name, before, after in locks),
        "",
        message,
    ]
    document = {"moves": _named(moves), "locks": changes, "message": message if new != old else ""}
    answer(
        args,
        document,
        lines if new != old else ["nothing moves: pins are as named, or the newest that fit"],
    )
    if new != old and (args.write or args.commit):
        texts = {"versions.yaml": new, **{name: dumps(lock) for name, _, lock in locks}}
        _save(project.root, texts, args.commit and message)
    return 0


def _six_months_after(day: date) -> date:
    year = day.year + (day.month > 6)
    month = (day.month + 5) % 12 + 1
    return day.replace(
        year=year, month=month, day=min(day.day, calendar.monthrange(year, month)[1])
    )


def _moves(args: argparse.Namespace) -> Mapping[Place, str]:
    outlooks = Outlooks(_resolved(args))
    names = list(dict.fromkeys(name for name, _ in outlooks.uses))
    moves: Mapping[Place, str] = {}
    words = [
        word.replace("==", "=").partition("=")
        for word in args.component or ([] if args.release else names)
    ]
    for name, equals, version in words:
        if (equals and not version) or [other for other, *_ in words].count(name) > 1:
            if version or not equals:
                raise InputError(f"{name} is named twice", hint="name one version of it")
            raise InputError(
                f"{name}= names no version",
                hint=f"{name} takes the newest that fits, {name}=VERSION a certain one",
            )
        places = [
            place for place in outlooks.uses if place[0] == name and (version or place not in moves)
        ]
        if name not in names:
            raise InputError(
                f"no pin of a Python index is called {name!r}{nearest(name, names)}",
                hint="primus outdated --json lists those that can be moved",
            )
        # After those that moved already, so that all of them fit each other.
        rows = []
        for place in places:
            rows.append(row := outlooks.of(place, version or None, moves))
            if row.error:
                raise HostError(
                    f"{name}: {row.error}", hint="name the components that can be moved"
                )
            moves = row.moves or moves
        if version and not any(row.compatible for row in rows):
            targets = ", ".join(target for row in rows for target in row.targets)
            raise InputError(
                f"no index offers {name} {version} for {targets}",
                hint="primus outdated shows what fits; a pin keeps its local build (+cpu), and "
                "fits what it `follows`",
            )
    return moves


def _resolved(args: argparse.Namespace) -> Sequence[ResolvedTarget]:
    # Without names, all targets; with --channel alone, all of that channel.
    project = open_project(args)
    if args.target:
        names = targets_of(project, args)
    else:
        names = project.target_names()
    if args.channel and not args.target:
        names = [name for name in names if args.channel in project.target(name)[0].channels]
    return [resolve(project, name) for name in names]


def _named(moves: Mapping[Place, str]) -> dict[str, str]:
    return {name: version for (name, _), version in moves.items()}


def _message(
    components: Mapping[str, Component], moves: Mapping[Place, str], release: str | None
) -> str:
    pins = {(name, i): pin for name, item in components.items() for i, pin in enumerate(item.pins)}
    lines = [f"{name} {pins[name, i].version} → {version}" for (name, i), version in moves.items()]
    if release:
        title = f"Begin {release}"
    elif len(lines) == 1:
        title = f"Bump {lines[0]}"
    else:
        title = f"Bump {len(lines)} pins"
    return "\n".join([title, *(["", *lines] if lines and title != f"Bump {lines[0]}" else [])])


def _save(root: Path, texts: Mapping[str, str], message: str) -> None:
    if message and (edited := set(texts) & set(checkout(root)[1])):
        files = ", ".join(sorted(edited))
        raise InputError(
            f"{files} was changed and not committed", hint="commit it first, or --write"
        )
    for name, text in texts.items():
        write_file(root / name, text)
    if message:
        command = ["git", "-C", str(root), "commit", "-qm", message, "--", *texts]
        done = subprocess.run(command, capture_output=True, errors="replace", check=False)
        if done.returncode:
            raise HostError(
                f"git does not commit: {done.stderr.strip()}",
                hint="the files are written; commit them",
            )


def _check(targets: Sequence[ResolvedTarget], args: argparse.Namespace) -> int:
    stale: list[dict[str, Any]] = []
    lines = []
    for resolved in targets:
        name = resolved.lock_name
        new = tuple(
            Drift(pin=pin, locked=None, wanted=text)
            for pin, text in resolved.request.flat().items()
        )
        if resolved.lock is None:
            drifts = new
        else:
            drifts = resolved.stale
        for drift in drifts:
            component, where = resolved.drift_place(drift.pin)
            stale.append({"lock": name, **drift._asdict(), "component": component, "where": where})
            old = drift.locked or "nothing"
            changed = f"{component or drift.pin}: {old} → {drift.wanted or 'nothing'}"
            lines.append(f"{where}: {name} is stale: {changed}")
        lines += [] if drifts else [f"✓ {name} matches versions.yaml"]
    if stale:
        note(args, *dict.fromkeys(f"  → {resolved.lock_command}" for resolved in targets))
    note(
        args,
        "not compared, because no source was asked: dependencies, and whether all files are still "
        "offered there",
    )
    return answer(args, {"fresh": not stale, "stale": stale}, lines, passed=not stale)


def _lock(targets: Sequence[ResolvedTarget], args: argparse.Namespace) -> int:
    outcome: list[dict[str, Any]] = []
    shared: Shared = {}
    there = {file.name for resolved in targets if resolved.lock for file in resolved.lock.files}
    absent = next((name for name in args.refresh_package if name not in there), "")
    if absent:
        raise InputError(
            f"--refresh-package {absent!r}: the locks have no such package{nearest(absent, there)}",
            hint="name it as the lock does",
        )
    with choose_progress(args.json) as progress:
        for resolved in targets:
            name = resolved.lock_name
            files = ()
            if resolved.lock:
                files = resolved.lock.files
            gone = [file for file in files if file.name in args.refresh_package]
            new = lock_target(resolved, progress, shared, refresh=args.refresh, gone=gone)
            if not args.dry_run:
                save_lock(resolved, new)
            changes = compare(resolved.lock, new)
            outcome.append(
                {
                    "lock": name,
                    "files": len(new.distinct),
                    "changes": [c._asdict() for c in changes],
                }
            )
            if not args.json:
                progress.say(_table(name, new, changes))
    return answer(
        args, outcome, (), passed=not (args.dry_run and any(row["changes"] for row in outcome))
    )


def compare(old: Lock | None, new: Lock) -> tuple[Change, ...]:
    """Return the files that differ between two locks, sorted by kind, base and name."""
    before, after = (
        {(f.kind, f.base or "", f.name): (f.version, f.sha256) for f in lock.files} if lock else {}
        for lock in (old, new)
    )
    absent = (None, "")
    return tuple(
        Change(
            kind=key[0], name=key[2], old=before.get(key, absent)[0], new=after.get(key, absent)[0]
        )
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    )


def _table(name: str, lock: Lock, changes: Sequence[Change]) -> str:
    megabytes = sum(file.size for file in lock.distinct) / 1e6
    head = f"{name}: {counted(len(lock.distinct), 'file')}, {megabytes:,.1f} MB"
    if not changes:
        return f"{head}; nothing changed"
    if all(change.old is None for change in changes) and len(changes) == len(lock.files):
        return f"{head}; new"
    rows = [
        (
            c.kind,
            c.name,
            c.old or "—",
            f"→ {c.new or '—'}",
            "(same version, different bytes)" if c.old == c.new else "",
        )
        for c in changes
    ]
    return "\n".join(
        [f"{head}; {len(changes)} changed", *PLAIN.table(rows, right=(2,), indent="  ")]
    )


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        report = logging.FileHandler(path, mode="w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"the report cannot be written to {path}: {reason_of(error)}") from None
    report.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    LOG.addHandler(report)
    LOG.setLevel(logging.INFO)
    versions = (
        f"{name} {importlib.metadata.version(name)}"
        for name in ("pip", "uv", "requests", "urllib3")
    )
    LOG.info(
        "primus %s, %s",
        __version__,
        ", ".join([platform.platform(), platform.python_version(), *versions]),
    )
    try:
        yield
        LOG.info("locked")
    except PrimusError as error:
        LOG.info("failed: %s", error)
        raise
    finally:
        LOG.removeHandler(report)
        LOG.setLevel(logging.NOTSET)
        report.close()
