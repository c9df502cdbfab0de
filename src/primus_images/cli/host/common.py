"""Steps that several host verbs share."""

import argparse
import contextlib
from collections.abc import Sequence

from primus_images.errors import InputError
from primus_images.plan.project import Project, Workspace
from primus_images.plan.resolve import ResolvedTarget, resolve


def target_names() -> Sequence[str]:
    """Return the targets of the project in this folder."""
    return Project.find(None).target_names()


def open_project(args: argparse.Namespace) -> Project:
    """Open the project that the options name, and hold its workspace while this command runs."""
    store = args.store.absolute() if args.store else None
    project = Project.find(args.project, store=store, channel=args.channel)
    with contextlib.suppress(OSError):
        project.workspace.folder.mkdir(exist_ok=True)
    project.workspace.hold()
    return project


def targets_of(project: Project, args: argparse.Namespace) -> Sequence[str]:
    """Return the requested targets without duplicates. Raises InputError if there is none."""
    if args.all:
        names = project.target_names()
    else:
        names = list(dict.fromkeys(args.target))
    if not names:
        raise InputError("name a target", hint="targets: " + ", ".join(project.target_names()))
    return names


def resolved_target(args: argparse.Namespace) -> tuple[ResolvedTarget, Workspace]:
    """Resolve the requested target. Returns it with the project's workspace."""
    project = open_project(args)
    return resolve(project, args.target), project.workspace


def resolved_targets(args: argparse.Namespace) -> tuple[list[ResolvedTarget], Workspace]:
    """Like :func:`resolved_target`, for verbs that take several targets."""
    project = open_project(args)
    return [resolve(project, name) for name in targets_of(project, args)], project.workspace
