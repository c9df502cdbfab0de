"""Verbs about releases: published ones, what changed between them, and which change made one bad."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from primus_images.cli.host.common import open_project
from primus_images.cli.verb import answer
from primus_images.errors import CheckFailed, HostError, InputError
from primus_images.files import write_file
from primus_images.gates.rules.coherence import rocm_version
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.refusals import refusal
from primus_images.release.bump import trial
from primus_images.release.diff import diff as compare, diff_page, notes, release_list, release_page
from primus_images.release.documents import git
from primus_images.release.history import (
    IMAGE,
    PINS,
    Release,
    load_history,
    pin_names,
    pins,
    select,
)
from primus_images.release.mad import mad_files
from primus_images.release.registry import require_repository
from primus_images.release.sides import commit_of, extract, files, past_releases, side, target_of
from primus_images.release.triage import Hypothesis, Point, Search, bound
from primus_images.system.issues import issues
from primus_images.terminal import Screen, counted
from primus_images.versions.components import Pin, Versions
from primus_images.versions.lock import Lock, dumps, loads, normalised

# A name that no release has: images of points must not replace those of releases in the store.
_RELEASE = "v00.0"
# As `git bisect run`: 125 cannot be judged, and more than 127 ends the search.
_SKIP = 125
_MOST = 127
# Fewer answers that fit the verdict by chance say that no hypothesis explains them.
_UNLIKELY = 0.001


def names() -> list[str]:
    """Return the names and tags of the published releases."""
    return sorted(
        {name for release in load_history().releases for name in (release.name, release.tag)}
    )


def releases(args: argparse.Namespace) -> int:
    """List the releases of this project and the published images, or show one: versions, sizes,
    digests, notes.
    """
    history = load_history()
    project = _project(args)
    if args.name is not None:
        shown = _choices(args.name, project)
        text = "\n\n".join(release_page(release, Screen.of()) for release in shown)
    else:
        ours = ()
        if project:
            ours = (_pinned(project, project.versions.release), *past_releases(project))
        shown = (*ours, *history.releases)
        text = release_list(shown, Screen.of())
    return answer(args, {"releases": [asdict(release) for release in shown]}, [text])


def diff(args: argparse.Namespace) -> int:
    """Compare two releases: components, packages, sizes, files, environment, gates, recipes and
    golden curves.
    """
    project = _project(args)
    if project is not None:
        project.workspace.hold()
    target = target_of(args.old) or target_of(args.new)
    old, new = (side(word, project, target) for word in (args.old, args.new))
    if old.layers and new.layers and project is not None:
        pairs = ((old, new), (new, old))
        old, new = (
            replace(
                side, parts={**side.parts, "files": files(side, other, project.workspace.store)}
            )
            for side, other in pairs
        )
    gpus = new.release.gpus or (target_of(args.new),)
    difference = compare(
        old, new, issues({**new.parts.get("packages", {}), **new.release.components}, gpus)
    )
    if args.markdown:
        text = notes(difference)
    else:
        text = diff_page(difference, Screen.of())
    return answer(args, asdict(difference), [text])


def release(args: argparse.Namespace) -> int:
    """Write what madengine needs to train the recipes of an image: models.json, a Dockerfile, and a
    script.
    """
    project = open_project(args)
    if args.target:
        names = [args.target]
    else:
        names = project.target_names()
    images = project.workspace.store.images()
    built = [target for name in names if (target := resolve(project, name)).ref in images]
    if len(built) != 1:
        words = {
            "several": ", ".join(target.name for target in built),
            "target": args.target or "TARGET",
        }
        if built:
            raise refusal("several_built", release=project.versions.release, **words)
        raise refusal("none_built", release=project.versions.release, **words)
    if args.folder.exists() and any(args.folder.iterdir()):
        raise InputError(f"{args.folder} is not empty", hint="name a new folder")
    require_repository(args.repository or f"docker.io/{IMAGE}", "--from")
    # podman reads no name with both a tag and a digest.
    reference = f"{args.repository or IMAGE}@{images[built[0].ref]['digest']}"
    files = mad_files(built[0], reference)
    for name, text in files.items():
        (args.folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(args.folder / name, text)
    paths = [str(args.folder / name) for name in files]
    return answer(
        args, {"image": reference, "files": paths}, [reference, *(f"  → {path}" for path in paths)]
    )


def _project(args: argparse.Namespace) -> Project | None:
    # The history does not need one.
    if args.project or Project.here():
        return Project.find(args.project, store=getattr(args, "store", None))
    return None


def _pinned(project: Project, name: str) -> Release:
    release = project.versions.release
    if name == PINS:
        tag = release
    else:
        tag = name
    if tag != release:
        targets = [tag.removeprefix(f"{release}-")]
    else:
        targets = project.target_names()
    return pins(project.versions, [resolve(project, target) for target in targets], tag)


def _choices(word: str, project: Project | None) -> tuple[Release, ...]:
    try:
        return select(load_history(), word)
    except InputError:
        if project is None:
            raise
    bare = word.removeprefix(f"{IMAGE}:")
    pinned = bare in pin_names(project.versions, project.target_names())
    return (_pinned(project, bare) if pinned else side(word, project).release,)


@dataclass(frozen=True)
class _Trial:
    """A checkout of the bad release in ``folder``, in which ``changes`` (names that move together)
    can be undone.
    """

    folder: Path
    changes: tuple[tuple[str, ...], ...]
    good: Mapping[str, Any]
    bad: Mapping[str, Any]
    locks: Mapping[str, tuple[Lock, Lock]]
    targets: tuple[str, ...]

    def write(self, point: Point) -> None:
        """Write versions.yaml and the locks of a point."""
        moved = {name for change in point for name in self.changes[change]}
        undone = {name for names in self.changes for name in names} - moved
        good = self.good["components"]
        bad = self.bad["components"]
        components = {name: (good if name in undone else bad).get(name) for name in {**good, **bad}}
        data = {
            **self.bad,
            "release": _RELEASE,
            "components": {n: c for n, c in components.items() if c is not None},
        }
        write_file(self.folder / "versions.yaml", json.dumps(data, indent=1))
        for name, (good, bad) in self.locks.items():
            files = [f for f in bad.files if f.name not in undone] + [
                f for f in good.files if f.name in undone
            ]
            write_file(self.folder / name, dumps(replace(bad, files=tuple(files))))

    def run(self, name: str) -> int:
        """Run a verb for the targets, by the code of the checkout if it has its own. Returns the
        exit code.
        """
        words = [sys.executable, "-m", "primus_images.cli.main", name, *self.targets]
        env = {
            **os.environ,
            "PYTHONPATH": f"{self.folder / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        return subprocess.run(
            words, cwd=self.folder, env=env, stdout=sys.stderr, check=False
        ).returncode

    def judge(self, point: Point, oracle: Sequence[str]) -> bool | None:
        """Resolve and build a point, and ask the oracle whether it is bad. None: it cannot be
        judged.
        """
        self.write(point)
        for name in ("build",) if self.locks else ("lock", "build"):
            code = self.run(name)
            if code in (1, InputError.exit_code):
                return None
            if code:
                raise HostError(
                    f"`primus {name}` ended with {code}",
                    hint="repair it, and run triage again to go on",
                )
        try:
            code = subprocess.run(
                oracle, cwd=self.folder, stdout=sys.stderr, check=False
            ).returncode
        except OSError as error:
            raise InputError(f"the oracle {oracle[0]} cannot be run: {error.strerror}") from None
        if code < 0 or code > _MOST:
            raise HostError(f"the oracle ended with {code}", hint="run triage again to go on")
        if code == _SKIP:
            return None
        return code != 0


def triage(args: argparse.Namespace) -> int:
    """Find which moved pins make BAD worse than GOOD: one, or two that suffice alone or act
    together.
    """
    if not args.oracle and not args.dry_run:
        raise InputError("the oracle is missing", hint="primus triage GOOD BAD -- COMMAND ...")
    project = Project.find(args.project)
    good, bad = (_commit(project.root, word) for word in (args.good, args.bad))
    targets = args.target or list(filter(None, [target_of(args.good) or target_of(args.bad)]))
    question = [good, bad, targets, args.locks, args.wrong, args.oracle]
    folder = (
        project.workspace.folder / "triage" / sha256(json.dumps(question).encode()).hexdigest()[:12]
    )
    shutil.rmtree(folder / "tree", ignore_errors=True)
    (folder / "tree").mkdir(parents=True)
    extract(project.root, bad, folder / "tree")
    (folder / "tree/.primus").symlink_to(project.workspace.folder.absolute())
    world = _trial(project.root, folder / "tree", good, tuple(targets), locks=args.locks)
    names = [" + ".join(names) for names in world.changes]
    if not names:
        if args.locks:
            raise InputError(f"{args.good} and {args.bad} do not differ in a package of the locks")
        raise InputError(
            f"{args.good} and {args.bad} do not differ in a pin; --locks compares the "
            "packages of the locks"
        )
    search = Search(len(names), wrong=args.wrong)
    state = folder / "answers.json"
    answers: list[dict[str, Any]] = (
        json.loads(state.read_text(encoding="utf-8")) if state.exists() else []
    )
    for row in answers:
        search.tell(frozenset(map(names.index, row["changes"])), row["bad"])
    least = bound(len(names), args.wrong)
    if args.dry_run:
        lines = [
            *(f"  {name}" for name in names),
            f"{counted(len(names), 'change')}; at least {least:.0f} answers",
        ]
        return answer(args, {"changes": names, "bound": least, "answers": answers}, lines)
    if args.locks and world.run("plan"):
        raise CheckFailed(f"{args.bad} itself cannot be planned", hint="the reason is above")
    while (point := search.next()) is not None:
        verdict = world.judge(point, args.oracle)
        search.tell(point, verdict)
        answers.append({"changes": [names[change] for change in sorted(point)], "bad": verdict})
        write_file(state, json.dumps(answers, indent=1))
        word = {None: "cannot be judged", True: "bad", False: "good"}[verdict]
        print(
            f"answer {len(answers)} (bound {least:.0f}): {len(point)} of {len(names)} moved: "
            f"{word}",
            file=sys.stderr,
        )
    if all(row["bad"] is None for row in answers):
        raise CheckFailed(
            "no point can be judged: none can be locked and built, or ORACLE judges none",
            hint="the reasons are above",
        )
    return _report(args, search, names, answers, least)


def _report(
    args: argparse.Namespace, search: Search, names: list[str], answers: list[Any], least: float
) -> int:
    verdict = search.verdict()

    def spelt(hypothesis: Hypothesis) -> str:
        if not hypothesis.changes:
            judged = "even with all changes it is good"
            if hypothesis.together:
                judged = "also without all changes it is bad"
            return f"no pin: {judged}"
        return (" together with " if hypothesis.together else " or ").join(
            names[c] for c in hypothesis.changes
        )

    sure = verdict.probability >= 1 - search.doubt and verdict.fit >= _UNLIKELY
    lines = [
        f"{spelt(verdict.hypothesis)} ({verdict.probability:.1%} after "
        f"{counted(len(answers), 'answer')})"
    ]
    lines += [f"  or: {spelt(rival)}" for rival in verdict.rivals[:9]]
    if verdict.fit < _UNLIKELY:
        lines.append(refusal("contradicted").message)
    document = {
        "culprits": [names[change] for change in verdict.hypothesis.changes],
        "together": verdict.hypothesis.together,
        "probability": verdict.probability,
        "sure": sure,
        "rivals": [spelt(rival) for rival in verdict.rivals],
        "changes": names,
        "bound": least,
        "answers": answers,
    }
    return answer(args, document, lines, passed=sure and bool(verdict.hypothesis.changes))


def _commit(root: Path, word: str) -> str:
    commit = commit_of(root, word)
    if not commit:
        raise InputError(
            f"no git revision or release is called {word!r}", hint="git log lists the revisions"
        )
    return commit


def _trial(root: Path, tree: Path, commit: str, targets: tuple[str, ...], *, locks: bool) -> _Trial:
    bad = Project(tree)
    targets = targets or tuple(bad.target_names())
    before = git(root, "show", f"{commit}:./versions.yaml").decode()
    with trial(tree, before) as old:
        good = old.versions_document.data
        changes = _trains(old.versions, bad.versions, targets)
    pairs: dict[str, tuple[Lock, Lock]] = {}
    if locks:
        for path in sorted((tree / "images/locks").glob("*/*.json")):
            name = path.relative_to(tree).as_posix()
            if path.stem in targets and (text := git(root, "show", f"{commit}:./{name}")):
                pairs[name] = (loads(text, name), loads(path.read_bytes(), name))
        moved = {
            file.name
            for before, after in pairs.values()
            for file in {*before.files} ^ {*after.files}
        }
        if changes:
            raise InputError("--locks needs the same pins on both sides", hint="leave it out")
        changes = tuple((name,) for name in sorted(moved))
    return _Trial(tree, changes, good, bad.versions_document.data, pairs, targets)


def _trains(old: Versions, new: Versions, targets: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the components that differ for one of the targets. Those that move together are one
    change.
    """
    trains: dict[object, list[str]] = {}
    for name in {**old.components, **new.components}:
        sides = [_pins(name, versions, targets) for versions in (old, new)]
        if sides[0] != sides[1]:
            container = next(
                (pin.inside for side in sides for pin in side if pin.inside in new.components), None
            )
            if container:
                sides = [_pins(container, versions, targets) for versions in (old, new)]
            held = any(
                versions.components[name].held
                for versions in (old, new)
                if name in versions.components
            )
            trains.setdefault(_train(sides, held=held) or container or name, []).append(name)
    return tuple(tuple(names) for names in trains.values())


def _pins(name: str, versions: Versions, targets: Sequence[str]) -> list[Pin]:
    pins = ()
    if name in versions.components:
        pins = versions.components[name].pins
    return [pin for pin in pins if not pin.targets or {*pin.targets} & {*targets}]


def _train(sides: Sequence[Sequence[Pin]], *, held: bool) -> object:
    """Return what is equal for pins that move together: their ROCm on both sides, or the version if
    they are held.
    """
    files = [
        [(normalised(pin.wheel or pin.sdist or ""), pin.version or "") for pin in pins]
        for pins in sides
    ]
    rocms = [{str(rocm_version(*file)) for file in pins} - {"None"} for pins in files]
    numbers = [{str(pin.version) for pin in pins} - {"None"} for pins in sides]
    moved = next(
        (
            pair
            for pair, counts in ((rocms, True), (numbers, held))
            if counts and pair[0] != pair[1]
        ),
        None,
    )
    if moved:
        return tuple(map(tuple, map(sorted, moved)))
    return None
