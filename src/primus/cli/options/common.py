"""Options that several host verbs share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from primus.cli.arguments import folder, path

if TYPE_CHECKING:
    from primus.plan.project import Project


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
        "--engine", choices=("auto", "embedded", "docker"), default="auto", help="sandbox engine (default: auto)"
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
    return [name for name in _project().target_names() if name.startswith(prefix)]


def complete_recipe(prefix: str, **_: object) -> list[str]:
    """Return the recipes that begin with ``prefix``, for tab completion."""
    return sorted(path.stem for path in (_project().root / "recipes").glob("*.yaml") if path.stem.startswith(prefix))


def complete_image(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the images of the store that begin with ``prefix``, for tab completion."""
    store = _project(parsed_args.project, parsed_args.store).workspace.store
    return [name for name in store.images() if name.startswith(prefix)]


def _project(start: Path | None = None, store: Path | None = None) -> Project:
    # Seam "completion": `--help` does not need it.
    from primus.plan.project import Project

    return Project.find(start, store=store)
