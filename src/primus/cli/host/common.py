"""Options and steps that several host verbs share."""

import argparse
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from primus.cli.verb import JSON, flag, folder, group, matching, option, path
from primus.errors import InputError
from primus.plan.project import Project, Workspace
from primus.plan.resolve import ResolvedTarget, resolve

if TYPE_CHECKING:
    from primus.release.cache import Cache


def _target_names() -> Sequence[str]:
    return Project.find(None).target_names()


TARGET = option("target", metavar="TARGET", help="name of the image, for example cpu", complete=matching(_target_names))
TARGETS = (
    option("target", nargs="*", metavar="TARGET", help="names of images", complete=matching(_target_names)),
    flag("--all", "all targets in images/"),
)
PROJECT = option("--project", type=path, metavar="DIR", help="folder of versions.yaml (default: this one or a parent)")
STORE = option("--store", type=folder, metavar="DIR", help="image store (default: .primus/store)")
SOURCE = (
    PROJECT,
    STORE,
    option("--channel", choices=("amd", "debian", "pypi"), help="source of files (default: the best one with a lock)"),
)
OFFLINE = flag("--offline", "use only downloaded files; contact no source")
ENGINE = option("--engine", choices=("auto", "podman", "docker"), default="auto", help="container engine")
CACHE = group(
    "a registry as cache; needs cosign",
    option("--cache", metavar="REPOSITORY", help="use results of other builds, also with --offline"),
    option("--cache-key", metavar="KEY", help="public key of those whose results count: file or key service"),
    option("--cache-sign", metavar="KEY", help="sign and send the results that it lacks; password in COSIGN_PASSWORD"),
)
SEVERAL = (*TARGETS, *SOURCE, JSON)
SINGLE = (TARGET, *SOURCE, JSON)


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
    return [resolve(project, name) for name in targets_of(project, args)], project.workspace


def cache_of(args: argparse.Namespace) -> "Cache | None":
    """Return the cache that the options :data:`CACHE` name, if any. Raises InputError, and HostError without cosign."""
    if not (args.cache or args.cache_key or args.cache_sign):
        return None
    # Seam "registry": most builds use no cache, and need none of the network libraries.
    from primus.release.cache import Cache

    return Cache.of_options(args)
