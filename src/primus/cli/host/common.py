"""Steps that several host verbs share."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence

from primus.cli.arguments import folder, path
from primus.errors import InputError
from primus.plan.project import Project
from primus.plan.resolve import ResolvedTarget, resolve, resolve_all
from primus.plan.workspace import Workspace


def add_project(parser: argparse.ArgumentParser) -> None:
    """Declare --project."""
    parser.add_argument(
        "--project",
        type=path("--project"),
        metavar="DIR",
        help="folder with versions.yaml (default: this folder or a parent)",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Declare --engine."""
    parser.add_argument(
        "--engine", choices=("auto", "podman", "docker"), default="auto", help="container engine (default: auto)"
    )


def add_project_options(parser: argparse.ArgumentParser, *, json: bool = True) -> None:
    """Declare --project, --store, --channel and --json. ``json=False`` is for verbs that print a command's output."""
    add_project(parser)
    parser.add_argument("--store", type=folder("--store"), metavar="DIR", help="image store (default: .primus/store)")
    parser.add_argument(
        "--channel", choices=("amd", "debian", "pypi"), help="channel to build from (default: the best one with a lock)"
    )
    if json:
        parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def add_target(parser: argparse.ArgumentParser) -> None:
    """Declare TARGET, with completion from images/*.yaml."""
    action = parser.add_argument("target", metavar="TARGET", help="name of the image, for example cpu")
    action.completer = complete_target  # type: ignore[attr-defined]


def add_targets(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Declare TARGET..., with completion from images/*.yaml, and --all."""
    action = parser.add_argument(
        "target",
        nargs="*",
        metavar="TARGET",
        help="names of images, for example cpu" + ("" if required else " (default: all)"),
    )
    action.completer = complete_target  # type: ignore[attr-defined]
    parser.add_argument("--all", action="store_true", help="all targets in images/")


def add_planning_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of every verb that plans: targets, project and store, --locked and --offline."""
    add_targets(parser)
    add_project_options(parser)
    add_build_options(parser)


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """Declare --locked and --offline."""
    parser.add_argument("--locked", action="store_true", help="fail if the lock does not match versions.yaml")
    parser.add_argument("--offline", action="store_true", help="use only downloaded files; contact no source")


def complete_target(prefix: str, **_: object) -> list[str]:
    """Return the targets that begin with ``prefix``, for tab completion."""
    return [name for name in Project.find(None).target_names() if name.startswith(prefix)]


def complete_recipe(prefix: str, **_: object) -> list[str]:
    """Return the recipes that begin with ``prefix``, for tab completion."""
    return sorted(
        path.stem for path in (Project.find(None).root / "recipes").glob("*.yaml") if path.stem.startswith(prefix)
    )


def complete_image(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the images of the store that begin with ``prefix``, for tab completion."""
    store = Project.find(parsed_args.project, store=parsed_args.store).workspace.store
    return [name for name in store.images() if name.startswith(prefix)]


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
