"""Steps that several host verbs share."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from json import dumps
from pathlib import Path

from primus.cli.arguments import folder, path
from primus.errors import InputError
from primus.oci.contents import root_of_image
from primus.oci.store import Store
from primus.plan.action import ImagePlan
from primus.plan.explain import changes, images_of, outline, outline_text, sharing, sharing_text
from primus.plan.project import Project
from primus.plan.resolve import ResolvedTarget, resolve, resolve_all
from primus.plan.workspace import Workspace
from primus.release import golden
from primus.release.history import IMAGE, History, Release, load_history, pin_names, pins, select
from primus.sandbox.container import RootFs
from primus.terminal import Screen


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


def add_offline(parser: argparse.ArgumentParser) -> None:
    """Declare --offline."""
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


def image_root(args: argparse.Namespace) -> RootFs:
    """Return the root file system of the image of ``args.target``. The store must contain the image.

    With --store, no project is needed: the newest image of the target in that store is used.
    """
    if args.store and args.project is None and not Project.here():
        store = args.store.absolute()
        workspace = Workspace(Store(store), store.parent)
        if store.is_dir():
            workspace.hold()
        return root_of_image(workspace.store, workspace.unpacked, args.target)
    resolved, workspace = resolved_target(args)
    return root_of_image(workspace.store, workspace.unpacked, args.target, ref=resolved.ref)


def print_plans(plans: Sequence[ImagePlan], store: Store, *, as_json: bool, full: bool = False) -> None:
    """Print what building ``plans`` into ``store`` would do; a single plan is always shown in full."""
    images = images_of(store, plans) if len(plans) > 1 else {}
    lines = [(plan, outline(store, plan)) for plan in plans]
    if as_json:
        shares = {target: {"sharing": row} for target, row in sharing(images).items()}
        print(
            dumps(
                [
                    {"target": p.target, "ref": p.ref, "key": p.key, "layers": rows, **shares.get(p.target, {})}
                    for p, rows in lines
                ]
            )
        )
    else:
        screen = Screen.of()
        full = full or len(plans) == 1
        texts = []
        for plan, rows in lines:
            state = store.record("targets", plan.state)
            texts.append(outline_text(plan, rows, changes(state, plan) if state else None, screen, full=full))
        print(("\n\n" if full else "\n").join(texts))
        if images:
            print("\n" + sharing_text(images, screen))


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """Declare --project and --json."""
    add_project(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def complete_release(prefix: str, **_: object) -> list[str]:
    """Return the releases and tags that begin with ``prefix``, for tab completion."""
    return sorted({n for r in load_history().releases for n in (r.name, r.tag) if n.startswith(prefix)})


def open_pins(args: argparse.Namespace) -> Project | None:
    """Open the project of --project or of this folder; None if there is none. The history does not need one."""
    return Project.find(args.project) if args.project or Project.here() else None


def pinned(project: Project, name: str, history: History) -> Release:
    """Return the current pins as a release called ``name``."""
    targets = {target.name: target for target in resolve_all(project, project.target_names())}
    return pins(project.versions, targets, name, history.gpu_arch)


def choices(history: History, word: str, project: Project | None) -> Sequence[Release]:
    """Return the releases that ``word`` names in the history or, if there are none, in the current pins.

    Raises InputError if neither knows the name.
    """
    try:
        return select(history, word)
    except InputError:
        if project is None:
            raise
        names = pin_names(project.versions, project.target_names())
        bare = word.removeprefix(f"{IMAGE}:")
        if bare in names:
            return (pinned(project, bare, history),)
        if golden.load(project.root, Path(bare).name) is not None:
            # An earlier release of this repository. Its pins are in its own commit; later commits keep its curves.
            return (Release(image=IMAGE, tag=bare, components={}, notes=("Only its golden curves are known here.",)),)
        return select(history, word, also=names)
