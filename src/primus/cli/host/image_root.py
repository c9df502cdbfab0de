"""Finding the image in the store that a verb works on."""

from __future__ import annotations

import argparse

from primus.cli.host.common import resolved_target
from primus.oci.roots import root_of_image
from primus.oci.store import Store
from primus.plan.project import Project
from primus.plan.workspace import Workspace
from primus.sandbox.container import RootFs


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
