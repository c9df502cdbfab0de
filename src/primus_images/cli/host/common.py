"""Steps that several host verbs share."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from primus_images import programs
from primus_images.cli.verb import Options
from primus_images.errors import InputError
from primus_images.plan.project import Project, Workspace
from primus_images.plan.resolve import ResolvedTarget, resolve
from primus_images.release.history import load_history, namesake
from primus_images.release.withdrawal import withdrawals
from primus_images.system.support import support_text
from primus_images.terminal import say


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """The options of the verbs that read a project: its folder, its store, and the channel."""

    project: Path | None
    store: Path | None
    channel: str | None


@dataclass(frozen=True, kw_only=True)
class TargetOptions(SourceOptions):
    """The options of a verb about one target."""

    target: str


@dataclass(frozen=True, kw_only=True)
class SingleOptions(TargetOptions, Options):
    """The same, where the answer may be one JSON document."""


@dataclass(frozen=True, kw_only=True)
class SeveralOptions(SourceOptions, Options):
    """The options of a verb about several targets."""

    target: Sequence[str]
    all: bool


@dataclass(frozen=True, kw_only=True)
class SignerOptions:
    """The options that say who signs."""

    key: str | None
    keyless: bool


@dataclass(frozen=True, kw_only=True)
class TrustedOptions:
    """The options that say whose signatures count."""

    key: str | None
    identity: str | None
    issuer: str | None


def target_names() -> Sequence[str]:
    """Return the targets of the project in this folder."""
    return Project.find(None).target_names()


def open_project(options: SourceOptions) -> Project:
    """Open the project that the options name, and hold its workspace while this command runs.

    Raises InputError if the workspace is part of the checkout.
    """
    store = options.store.absolute() if options.store else None
    project = Project.find(options.project, store=store, channel=options.channel)
    _refuse_committed(project.workspace.folder)
    with contextlib.suppress(OSError):
        project.workspace.folder.mkdir(exist_ok=True)
    project.workspace.hold()
    return project


def _refuse_committed(workspace: Path) -> None:
    """Raise InputError for a workspace that somebody committed.

    Its files count as made on this machine: records, findings of gates, unpacked layers.
    """
    git = programs.find("git")
    in_checkout = any((folder / ".git").exists() for folder in workspace.parents)
    if git is None or not in_checkout or not os.path.lexists(workspace):
        return
    # Another user's checkout is read, too, and no program runs that its configuration names.
    words = [str(git), "-C", str(workspace.parent), "-c", "safe.directory=*"]
    words += ["-c", "core.fsmonitor=false", "ls-files", "--", workspace.name]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    committed = programs.captured(words, "git", env=env).stdout.splitlines()
    if committed:
        raise InputError(
            "this file is committed, but what is in .primus counts as made on this machine",
            where=workspace.parent / committed[0],
            hint="git rm -r --cached .primus && rm -rf .primus",
        )


def state_of(resolved: ResolvedTarget) -> list[str]:
    """Return that AMD has a release of this name, that this one was withdrawn, and until when it is
    supported, as sentences.
    """
    sentences = []
    same = namesake(resolved.versions, load_history())
    if same:
        sentences.append(f"! {same}")
    withdrawal = withdrawals(resolved.root).get(resolved.ref)
    if withdrawal:
        sentences.append(f"! {resolved.ref} was {withdrawal.sentence}")
    support = support_text(resolved.versions.supported_until, datetime.now(tz=UTC).date())
    if support.startswith("support ended"):
        support = f"! {support}"
    if support:
        sentences.append(support)
    return sentences


def warn_of_state(resolved: ResolvedTarget) -> None:
    """Say on standard error which sentences about the release are warnings."""
    for sentence in state_of(resolved):
        if sentence.startswith("!"):
            say(sentence)


def sweep_containers(workspace: Workspace) -> None:
    """Remove containers that outlived their commands, as when a whole session was killed."""
    if any(workspace.unpacked.glob("*/containers/*")):
        # Seam "sandbox": a build with nothing to do needs no engine.
        from primus_images.sandbox.podman import sweep

        sweep(workspace.unpacked)


def targets_of(project: Project, options: SeveralOptions) -> Sequence[str]:
    """Return the requested targets without duplicates. Raises InputError if there is none."""
    if options.all:
        names = project.target_names()
    else:
        names = list(dict.fromkeys(options.target))
    if not names:
        raise InputError("name a target", hint="targets: " + ", ".join(project.target_names()))
    return names


def resolved_target(options: TargetOptions) -> tuple[ResolvedTarget, Workspace]:
    """Resolve the requested target. Returns it with the project's workspace."""
    project = open_project(options)
    return resolve(project, options.target), project.workspace


def resolved_targets(options: SeveralOptions) -> tuple[list[ResolvedTarget], Workspace]:
    """Like :func:`resolved_target`, for verbs that take several targets."""
    project = open_project(options)
    return [resolve(project, name) for name in targets_of(project, options)], project.workspace
