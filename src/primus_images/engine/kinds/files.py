"""``files`` and ``image``: a layer from files of the project or plan, and one of another image."""

import os
from collections.abc import Iterator
from pathlib import Path

from primus_images.engine.workshop import Workshop
from primus_images.oci.layer import adopt_layer
from primus_images.oci.store import Layer
from primus_images.oci.tar import Entry
from primus_images.plan.action import Action
from primus_images.plan.skeleton import inline_entries


def make(action: Action, shop: Workshop, scratch: Path) -> Layer:
    """Write the files unchanged, with the modes that the plan specifies."""
    return shop.write(action, list(_entries(action)))


def adopt(action: Action, shop: Workshop, scratch: Path) -> Layer:
    """Verify the layer of a registry's image and add it to the store, with the same digest."""
    (file,) = action.files
    return adopt_layer(shop.workspace.store, shop.file(file), file.sha256)


def _entries(action: Action) -> Iterator[Entry]:
    to = str(action.spec.get("to", "")).strip("/")
    for name, kind, value in action.tree:
        path = f"{to}/{name}".lstrip("/")
        if kind == "link":
            yield Entry(path=path, kind="symlink", mode=0o777, link=value)
            continue
        source = Path(action.root) / name
        # A file that is gone has no size; the comparison of its hash reports it.
        size = os.lstat(source).st_size if os.path.lexists(source) else 0
        mode = 0o755 if kind == "exec" else 0o644
        yield Entry(path=path, mode=mode, size=size, source=source, sha256=value)
    inline = action.spec.get("inline")
    if isinstance(inline, dict):
        yield from inline_entries(inline)
