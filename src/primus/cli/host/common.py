"""Steps that several host verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from primus.errors import InputError
from primus.plan.project import Project
from primus.plan.resolve import ResolvedTarget, resolve, resolve_all
from primus.plan.workspace import Workspace

__all__ = ["open_project", "resolved_target", "resolved_targets", "targets_of"]


def open_project(args: argparse.Namespace) -> Project:
    """The project that the options name."""
    store = args.store.absolute() if args.store else None
    return Project.find(args.project, store=store, channel=args.channel)


def targets_of(project: Project, args: argparse.Namespace) -> Sequence[str]:
    """The targets asked for, each once."""
    names = project.target_names() if args.all else list(dict.fromkeys(args.target))
    if not names:
        raise InputError("name a target", hint="targets: " + ", ".join(project.target_names()))
    return names


def resolved_target(args: argparse.Namespace) -> tuple[ResolvedTarget, Workspace]:
    """The target that the options name, and where its builds keep what they make."""
    project = open_project(args)
    return resolve(project, args.target), project.workspace


def resolved_targets(args: argparse.Namespace) -> tuple[list[ResolvedTarget], Workspace]:
    """As :func:`resolved_target`, for verbs that take several."""
    project = open_project(args)
    return resolve_all(project, targets_of(project, args)), project.workspace
