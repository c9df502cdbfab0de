"""Options and steps that several host verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from primus.cli.arguments import folder, path
from primus.errors import InputError

if TYPE_CHECKING:
    from primus.images.project import Project
    from primus.sandbox.model import RootFs

__all__ = [
    "add_build_options",
    "add_planning_options",
    "add_project_options",
    "add_target",
    "add_targets",
    "image_root",
    "open_project",
    "targets_of",
]


def add_project_options(parser: argparse.ArgumentParser, *, json: bool = True) -> None:
    """--project, --store and, unless the verb's output is another program's, --json."""
    parser.add_argument(
        "--project",
        type=path("--project"),
        metavar="DIR",
        help="folder with versions.yaml (default: this folder or a parent)",
    )
    parser.add_argument("--store", type=folder("--store"), metavar="DIR", help="image store (default: .primus/store)")
    parser.add_argument(
        "--channel", choices=("amd", "debian", "pypi"), help="channel to build from (default: the best one with a lock)"
    )
    if json:
        parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def add_target(parser: argparse.ArgumentParser) -> None:
    """TARGET with completion from images/*.yaml."""
    action = parser.add_argument("target", metavar="TARGET", help="name of the image, for example cpu")
    action.completer = complete_target  # type: ignore[attr-defined]


def add_targets(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """TARGET... with completion from images/*.yaml, and --all."""
    action = parser.add_argument(
        "target",
        nargs="*",
        metavar="TARGET",
        help="names of images, for example cpu" + ("" if required else " (default: all)"),
    )
    action.completer = complete_target  # type: ignore[attr-defined]
    parser.add_argument("--all", action="store_true", help="all targets in images/")


def add_planning_options(parser: argparse.ArgumentParser) -> None:
    """Targets, places, and what planning may do: the options of every verb that plans."""
    add_targets(parser)
    add_project_options(parser)
    add_build_options(parser)


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """--locked and --offline."""
    parser.add_argument("--locked", action="store_true", help="fail if the lock does not match versions.yaml")
    parser.add_argument("--offline", action="store_true", help="use only downloaded files; contact no source")


def complete_target(prefix: str, **_: object) -> list[str]:
    """Names for tab completion."""
    from primus.images.project import Project

    return [name for name in Project.find().target_names() if name.startswith(prefix)]


def open_project(args: argparse.Namespace) -> Project:
    """The project that the options name."""
    from primus.images.project import Project

    store = args.store.absolute() if args.store else None
    return Project.find(args.project, store=store, channel=args.channel)


def targets_of(project: Project, args: argparse.Namespace) -> Sequence[str]:
    """The targets asked for, each once."""
    names = project.target_names() if args.all else list(dict.fromkeys(args.target))
    if not names:
        raise InputError("name a target", hint="targets: " + ", ".join(project.target_names()))
    return names


def image_root(args: argparse.Namespace) -> RootFs:
    """The image of ``args.target`` as a sandbox takes it; it must be in the store.

    With --store alone no project is needed: the store's newest image of the target is meant.
    """
    from primus.images.project import Project
    from primus.images.roots import root_of_image
    from primus.images.store import Store

    if args.store and args.project is None and not Project.here():
        store = args.store.absolute()
        return root_of_image(Store(store), store.parent / "unpacked", args.target)
    project = open_project(args)
    project.target(args.target)
    return root_of_image(project.store, project.work / "unpacked", args.target, ref=project.ref(args.target))
