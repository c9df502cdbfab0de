"""`primus bump`: pins moved to newer versions, and their locks, as one commit."""

import calendar
import difflib
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from primus_images.cli.host.common import SourceOptions, open_project
from primus_images.cli.host.lock import compare, resolved_all, summary
from primus_images.cli.verb import Options, answer
from primus_images.errors import HostError, InputError, nearest
from primus_images.files import write_file
from primus_images.plan.project import Project
from primus_images.plan.resolve import lock_target, resolve
from primus_images.progress import choose_progress
from primus_images.release.bump import Moves, Outlook, Outlooks, edit, named, trial
from primus_images.release.git import checkout
from primus_images.schema import notes_of
from primus_images.versions.components import Component, Versions
from primus_images.versions.lock import Lock, Shared, dumps
from primus_images.waits import answer_of


@dataclass(frozen=True, kw_only=True)
class BumpOptions(SourceOptions, Options):
    """The options of ``bump``."""

    component: Sequence[str]
    release: str | None
    write: bool
    commit: bool


class _Relocked(NamedTuple):
    name: str
    old: Lock
    new: Lock


def bump(options: BumpOptions) -> int:
    """Move pins to the newest version that fits the other pins, or to VERSION, and lock.

    Packages that must be of one version, such as those of one ROCm, move together.
    """
    project = open_project(options)
    if options.release:
        _require_later(options.release, project.versions.release)
    with answer_of("the Python indexes"):
        moves, remarks = _moves(options)
    remarks += _behind(project.versions.components, moves)
    old = (project.root / "versions.yaml").read_text(encoding="utf-8")
    new = edit(old, project.versions_document, project.versions.components, moves)
    if options.release:
        new = _begin(new, options.release, datetime.now(tz=UTC).date(), project.versions)
    locks = _relock(project, new, quiet=options.json)
    message = ""
    lines = ["nothing moves: pins are as named, or the newest that fit"]
    if new != old:
        message = _message(project.versions.components, moves, options.release)
        lines = [*_difference(old, new), *map(_summary, locks), "", message]
    lines += [f"! {remark}" for remark in remarks]
    changes = []
    for relocked in locks:
        rows = [change._asdict() for change in compare(relocked.old, relocked.new)]
        changes.append({"lock": relocked.name, "changes": rows})
    document = {
        "moves": named(moves),
        "locks": changes,
        "message": message,
        "remarks": remarks,
    }
    answer(options, document, lines)
    if new != old and (options.write or options.commit):
        texts = {"versions.yaml": new}
        for relocked in locks:
            texts[relocked.name] = dumps(relocked.new)
        if options.commit:
            _require_committed(project.root, texts)
        for name, text in texts.items():
            write_file(project.root / name, text)
        if options.commit:
            _commit(project.root, list(texts), message)
    return 0


def _require_later(name: str, current: str) -> None:
    pattern = notes_of(Versions)["release"]["pattern"]
    if not re.fullmatch(pattern, name) or Version(name) <= Version(current):
        raise InputError(
            f"--release {name!r} is not the name of a release after the current one, {current}",
            hint=f"its form is vYY.N, like {current}, or vYY.N.P for a patch, and it must be "
            "later; a patch of an earlier release begins on a branch of that release",
        )
    if is_patch(name) and _patched(name) != _patched(current):
        raise InputError(
            f"--release {name} is a patch of {_patched(name)}, and versions.yaml is of {current}",
            hint=f"begin it on a branch of that release: git switch -c NAME {_patched(name)}",
        )


def is_patch(release: str) -> bool:
    """Whether a release mends another one, as v26.11.1 does."""
    return release.count(".") > 1


def _patched(release: str) -> str:
    """Return the release that a patch mends, or the release itself."""
    return ".".join(release.split(".")[:2])


def _behind(components: Mapping[str, Component], moves: Moves) -> list[str]:
    """Return the reasons in versions.yaml for an older version of what moves."""
    remarks = []
    for name, version in named(moves).items():
        reason = components[name].behind
        if reason:
            remarks.append(
                f"{name} moves to {version}; `behind` in versions.yaml says: {reason}. Check that, "
                "and remove the reason if it is over"
            )
    return remarks


def _moves(options: BumpOptions) -> tuple[Moves, list[str]]:
    """Return the moves that are asked for, and what is to be said of them."""
    targets = resolved_all(options)
    outlooks = Outlooks(targets)
    components = targets[0].versions.components
    names = list(dict.fromkeys(name for name, _ in outlooks.uses))
    moves: Moves = {}
    remarks: list[str] = []
    for name, version in list(_requested(options, names, components)):
        # After those that moved already, so that all of them fit each other.
        moves = _moved(outlooks, name, version, moves, remarks)
    return moves, remarks


def _channels_of(name: str, components: Mapping[str, Component]) -> list[str]:
    """Return the channels for which a component has a wheel or an sdist of an index."""
    if name not in components:
        return []
    pins = [pin for pin in components[name].pins if pin.wheel or pin.source]
    return list(dict.fromkeys(pin.channel for pin in pins))


def _requested(
    options: BumpOptions, names: Sequence[str], components: Mapping[str, Component]
) -> Iterator[tuple[str, str | None]]:
    """Yield the components to move, each with the version that is asked for, if any."""
    if not options.component:
        if not options.release:
            yield from ((name, None) for name in names)
        return
    words = [word.replace("==", "=").partition("=") for word in options.component]
    counts = Counter(name for name, _, _ in words)
    for name, equals, version in words:
        if equals and not _is_version(version):
            raise InputError(
                f"{name}={version} names no version",
                hint=f"{name} takes the newest that fits, {name}=VERSION a certain one",
            )
        if counts[name] > 1:
            raise InputError(f"{name} is named twice", hint="name one version of it")
        if name not in names:
            channels = _channels_of(name, components)
            if channels:
                raise InputError(
                    f"{name} is pinned for channel {' and '.join(channels)}, which builds none of "
                    "these targets now",
                    hint=f"--channel {channels[0]}",
                )
            raise InputError(
                f"no pin of a Python index is called {name!r}{nearest(name, names)}",
                hint="primus outdated --json lists those that can be moved",
            )
        yield name, version or None


def _is_version(word: str) -> bool:
    try:
        Version(word)
    except InvalidVersion:
        return False
    return True


@dataclass(kw_only=True)
class _Targets:
    """The targets for which a component moves, those for which it stays, and why it stays."""

    moving: list[str] = field(default_factory=list)
    staying: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def _moved(
    outlooks: Outlooks, name: str, version: str | None, moves: Moves, remarks: list[str]
) -> Moves:
    """Return ``moves`` with those of one component.

    ``remarks`` get the targets that stay while others move.
    """
    places = [place for place in outlooks.uses if place[0] == name]
    if version is None:
        places = [place for place in places if place not in moves]
    targets = _Targets()
    for place in places:
        if version:
            version = outlooks.as_offered(place, version)
        outlook = outlooks.of(place, version, moves)
        if outlook.error:
            raise HostError(
                f"{name}: {outlook.error}", hint="name the components that can be moved"
            )
        if outlook.compatible is not None:
            targets.moving += outlook.targets
        elif _should_move(outlook, version):
            reason = "no newer version fits"
            if version:
                reason = outlooks.refusal(place, version)
            targets.staying += outlook.targets
            targets.reasons.append(f"{reason} (pinned: {outlook.pinned})")
        moves = outlook.moves or moves
    if targets.staying:
        _say_what_stays(name, version, targets, remarks)
    return moves


def _should_move(outlook: Outlook, version: str | None) -> bool:
    """Whether a pin is at another version than the one asked for, or than the newest one."""
    if version:
        return version != outlook.pinned
    return bool(outlook.newest)


def _say_what_stays(name: str, version: str | None, targets: _Targets, remarks: list[str]) -> None:
    """Remark that some targets stay. Raises InputError if all stay, against the user's wish."""
    staying = ", ".join(targets.staying)
    if targets.moving:
        moving = ", ".join(targets.moving)
        reasons = "; ".join(dict.fromkeys(targets.reasons))
        remarks.append(f"{name} moves for {moving} only; for {staying}, {reasons}")
    elif version:
        raise InputError(
            f"{targets.reasons[0]}, for {staying}",
            hint="primus outdated shows what fits; a pin keeps its local build (+cpu), and "
            "fits what it `follows`",
        )


def _begin(text: str, name: str, today: date, versions: Versions) -> str:
    """Return the text of versions.yaml with a new release, which begins today.

    A patch keeps the day until which the release is supported. Raises InputError if that is over.
    """
    until = versions.supported_until
    if is_patch(name) and until and date.fromisoformat(until) < today:
        raise InputError(
            f"--release {name}: the support of {_patched(name)} ended on {until}, and a patch does "
            "not prolong it",
            hint="use a later release, or first set a later `supported_until` in versions.yaml",
        )
    entries: dict[str, object] = {"release": name, "created": today}
    if not is_patch(name):
        if until is None:
            text = re.sub(r"(?m)^(created:.*)$", r"\1\nsupported_until:", text, count=1)
        entries["supported_until"] = _six_months_after(today)
    for key, value in entries.items():
        text = re.sub(rf"(?m)^{key}:[^#\n]*?( +#.*)?$", rf"{key}: {value}\1", text, count=1)
    return text


def _six_months_after(day: date) -> date:
    year = day.year + (day.month > 6)
    month = (day.month + 5) % 12 + 1
    _, last = calendar.monthrange(year, month)
    return day.replace(year=year, month=month, day=min(day.day, last))


def _relock(project: Project, text: str, *, quiet: bool) -> list[_Relocked]:
    """Resolve the locks that are stale with ``text`` as versions.yaml, and write none."""
    locks = []
    shared: Shared = {}
    with trial(project.root, text) as tried, choose_progress(quiet) as progress:
        for name in tried.target_names():
            resolved = resolve(tried, name)
            if resolved.lock and resolved.stale:
                new = lock_target(resolved, progress, shared)
                locks.append(_Relocked(resolved.lock_name, resolved.lock, new))
    return locks


def _difference(old: str, new: str) -> Iterator[str]:
    lines = (old.split("\n"), new.split("\n"))
    return difflib.unified_diff(*lines, "old", "versions.yaml", n=0, lineterm="")


def _summary(relocked: _Relocked) -> str:
    return summary(relocked.name, relocked.new, compare(relocked.old, relocked.new))


def _message(components: Mapping[str, Component], moves: Moves, release: str | None) -> str:
    lines = []
    for (name, number), version in moves.items():
        lines.append(f"{name} {components[name].pins[number].version} → {version}")
    if not release and len(lines) == 1:
        return f"Bump {lines[0]}"
    title = f"Begin {release}" if release else f"Bump {len(lines)} pins"
    if not lines:
        return title
    return "\n".join([title, "", *lines])


def _require_committed(root: Path, texts: Mapping[str, str]) -> None:
    edited = sorted(set(texts) & set(checkout(root).edited))
    if edited:
        raise InputError(
            f"{', '.join(edited)} was changed and not committed",
            hint="commit it first, or --write",
        )


def _commit(root: Path, names: Sequence[str], message: str) -> None:
    command = ["git", "-C", str(root), "commit", "-qm", message, "--", *names]
    done = subprocess.run(command, capture_output=True, errors="replace", check=False)
    if done.returncode:
        raise HostError(
            f"git does not commit: {done.stderr.strip()}",
            hint="the files are written; commit them",
        )
