"""`primus diff`: what changed between two releases."""

import argparse
from dataclasses import asdict, replace

from primus_images.cli.host.releases import project_here
from primus_images.cli.verb import answer
from primus_images.release.diff import diff as compare, diff_page, notes
from primus_images.release.sides import files, side, target_of
from primus_images.system.issues import issues
from primus_images.terminal import Screen


def diff(args: argparse.Namespace) -> int:
    """Compare two releases: what is inside them, and how they train."""
    project = project_here(args)
    if project is not None:
        project.workspace.hold()
    target = target_of(args.old) or target_of(args.new)
    old = side(args.old, project, target)
    new = side(args.new, project, target)
    if project is not None and old.layers and new.layers:
        store = project.workspace.store
        old_files = files(old, new, store)
        new_files = files(new, old, store)
        old = replace(old, parts={**old.parts, "files": old_files})
        new = replace(new, parts={**new.parts, "files": new_files})
    packages = {**new.parts.get("packages", {}), **new.release.components}
    gpus = new.release.gpus or (target_of(args.new),)
    difference = compare(old, new, issues(packages, gpus))
    if args.markdown:
        text = notes(difference)
    else:
        text = diff_page(difference, Screen.of())
    return answer(args, asdict(difference), [text])
