"""Resolve versions.yaml into exact files: name, version, file name, size, sha256; one lock per target and channel.

Pins that did not change keep the versions locked before, dependencies included; --refresh takes the newest that fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from primus.errors import InputError
from primus.versions.lock import BaseRequest, Drift, Lock, Request, drift, dumps, load

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
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="targets to lock; all when left out")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a lock is stale")
    parser.add_argument("--refresh", action="store_true", help="keep no earlier version: newest that fit the pins")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def run(args: argparse.Namespace) -> int:
    """Lock or check; 0 done or fresh, 1 stale under --check."""
    folder = _root(Path.cwd())
    requests = [(request, _lock_path(folder, request)) for request in _requests(folder, args.targets)]
    return _check(folder, requests, args.json) if args.check else _lock(folder, requests, args)


def _check(folder: Path, requests: Sequence[tuple[Request, Path]], as_json: bool) -> int:
    stale: list[dict[str, Any]] = []
    for request, path in requests:
        name = path.relative_to(folder).as_posix()
        lock = load(path, name)
        found = _all_new(request) if lock is None else drift(lock, request)
        stale += [{"lock": name, **asdict(one), "where": _where(folder, one.pin)} for one in found]
        if not as_json:
            for one in found:
                print(f"{_where(folder, one.pin)}: {name} is stale: {one}")
            if not found:
                print(f"✓ {name} answers versions.yaml")
    if as_json:
        print(json.dumps({"fresh": not stale, "stale": stale}, ensure_ascii=False, indent=2))
    elif stale:
        print("  → primus lock " + " ".join(sorted({request.target for request, _ in requests})), file=sys.stderr)
    return 1 if stale else 0


def _lock(folder: Path, requests: Sequence[tuple[Request, Path]], args: argparse.Namespace) -> int:
    from primus.images.display import choose_progress
    from primus.versions.relock import resolve

    outcome: list[dict[str, Any]] = []
    with choose_progress(args.json) as progress:
        for request, path in requests:
            name = path.relative_to(folder).as_posix()
            previous = load(path, name)
            lock = resolve(request, previous=previous, refresh=args.refresh, progress=progress)
            changes = compare(previous, lock)
            if previous != lock:
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, dumps(lock))
            outcome.append({"lock": name, "files": len(lock.files), "changes": [asdict(c) for c in changes]})
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
    size = sum(f.size for f in lock.files)
    head = f"{name}: {len(lock.files)} files, {size / 1e6:,.1f} MB"
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


def _where(folder: Path, pin: str) -> str:
    """``versions.yaml:line:col`` of the pin (the file alone for a pin that is gone)."""
    from primus import yamlfile
    from primus.versions.wheels import normalise

    document = yamlfile.read(folder / "versions.yaml", "versions.yaml")
    kind, _, rest = pin.partition(" ")
    if kind == "base":
        name, _, field = rest.rpartition(" ")
        return document.where(("bases", name, field))
    data: Any = document.data if kind in ("wheel", "sdist") else {}
    for component, body in data.get("components", {}).items():
        for index, entry in enumerate(body.get("pins", ())):
            if normalise(entry.get(kind) or "") == rest:
                return document.where(("components", component, "pins", index, "version"))
    return "versions.yaml"


def _all_new(request: Request) -> tuple[Drift, ...]:
    return tuple(Drift(pin=pin, locked=None, wanted=text) for pin, text in request.flat().items())


def _root(start: Path) -> Path:
    for folder in (start, *start.parents):
        if (folder / "versions.yaml").is_file():
            return folder
    raise InputError("no versions.yaml here or above", hint="run it inside the repository")


def _lock_path(folder: Path, request: Request) -> Path:
    return folder / "images" / "locks" / request.channel / f"{request.target}.json"


def _requests(folder: Path, targets: Sequence[str]) -> list[Request]:
    from primus import schema, yamlfile
    from primus.versions.model import Versions
    from primus.versions.wheels import normalise

    versions = schema.build(Versions, yamlfile.read(folder / "versions.yaml", "versions.yaml"))
    for target in targets:
        if target != "cpu":
            raise InputError(f"no target {target!r}", hint="known: cpu")
    wheels = {
        normalise(pin.wheel): pin.version
        for component in versions.components.values()
        for pin in component.pins
        if pin.wheel and pin.version and pin.channel == "pypi" and "cpu" in (pin.targets or ("cpu",))
    }
    base = versions.bases["bookworm"]
    asked = BaseRequest(suite=base.suite, python=base.python, packages=base.packages)
    python = ".".join(base.python.split(".")[:2])
    return [Request(target="cpu", channel="pypi", python=python, bases={"bookworm": asked}, wheels=wheels)]


def _write(path: Path, text: str) -> None:
    # A lock half-written by an interrupted run must never be read as a lock.
    part = path.with_suffix(".json.new")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
