"""Steps that several host verbs share."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence

from primus.errors import InputError
from primus.plan.project import Project
from primus.plan.resolve import ResolvedTarget, resolve, resolve_all
from primus.plan.workspace import Workspace


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
    names = project.target_names() if args.all else list(dict.fromkeys(args.target))
    if not names:
        raise InputError("name a target", hint="targets: " + ", ".join(project.target_names()))
    return names


def resolved_target(args: argparse.Namespace) -> tuple[ResolvedTarget, Workspace]:
    """Resolve the requested target. Returns it with the workspace (store and caches) of the project."""
    project = open_project(args)
    return resolve(project, args.target), project.workspace


def resolved_targets(args: argparse.Namespace) -> tuple[list[ResolvedTarget], Workspace]:
    """Like :func:`resolved_target`, for verbs that take several targets."""
    project = open_project(args)
    return resolve_all(project, targets_of(project, args)), project.workspace
