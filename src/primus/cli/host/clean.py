"""Free disk space: remove what no image, lock or last build needs.

Images keep their layers and names. A removed file is made or downloaded again when something needs it.
"""

from __future__ import annotations

import argparse
import json

from primus.cli.host.common import add_project_options, complete_image, open_project
from primus.engine.upkeep import find_waste, remove
from primus.errors import InputError, did_you_mean
from primus.terminal import Screen, bytes_text

EXAMPLE = "primus clean --dry-run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus clean``."""
    image = parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="NAME",
        help="also remove this image, for example v26.10-cpu; can be given several times",
    )
    image.completer = complete_image  # type: ignore[attr-defined]
    parser.add_argument(
        "--caches", action="store_true", help="also remove all downloaded files, unpacked layers and caches"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be removed")
    add_project_options(parser)


def run(args: argparse.Namespace) -> int:
    """Remove what nothing needs, and print what was removed. Raises HostError while the store is in use."""
    project = open_project(args)
    store = project.workspace.store
    with project.workspace.alone():
        names = store.images()
        for name in args.image:
            if name not in names:
                hint = did_you_mean(name, names) or "images: " + (", ".join(sorted(names)) or "none")
                raise InputError(f"the store has no image called {name!r}", hint=hint)
        waste = find_waste(project.workspace, project.locked_files(), without=args.image, caches=args.caches)
        if not args.dry_run:
            for name in set(args.image):
                store.untag(name)
            remove(waste)
    size = sum(item.size for item in waste)
    if args.json:
        rows = [{"kind": item.kind, "number": len(item.paths), "bytes": item.size} for item in waste]
        print(
            json.dumps({"removed": not args.dry_run, "images": sorted(set(args.image)), "waste": rows, "bytes": size})
        )
        return 0
    table = [(item.kind, f"{len(item.paths):,}", bytes_text(item.size)) for item in waste]
    for line in Screen.of().table(table, head=("what", "number", "size"), right=(1, 2)) if table else ():
        print(line)
    print(f"{'would free' if args.dry_run else 'freed'} {bytes_text(size)}" if waste else "nothing to remove")
    return 0
