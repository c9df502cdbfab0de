"""From a target's name on the command line to the image in the store. No verb: the verbs share it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from primus.errors import InputError
from primus.images.layout import OciImage, find_image
from primus.sandbox.model import LayerRef, RootFs

__all__ = ["add_store_argument", "image_of", "root_of"]

_RELEASE = re.compile(r"^release\s*:\s*['\"]?([^'\"\s#]+)", re.MULTILINE)


def add_store_argument(parser: argparse.ArgumentParser) -> None:
    """The option ``--store``."""
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="image store (default: .primus/store beside the nearest versions.yaml)",
    )


def _project() -> Path | None:
    here = Path.cwd()
    return next((place for place in (here, *here.parents) if (place / "versions.yaml").is_file()), None)


def image_of(target: str, store: Path | None) -> OciImage:
    """The image of ``target``; InputError when there is no store or no such image."""
    project = _project()
    if store is None:
        if project is None:
            raise InputError(
                "no versions.yaml here or above, so there is no store to look in",
                hint="go to the project's directory, or name the store with --store",
            )
        store = project / ".primus" / "store"
    release = None
    if project is not None:
        # One line is wanted; reading all of versions.yaml with its checks is the versions room's business.
        found = _RELEASE.search((project / "versions.yaml").read_text(errors="replace"))
        release = found[1] if found else None
    return find_image(store, target, release)


def root_of(image: OciImage) -> RootFs:
    """The image as the sandbox takes it; unpacked layers are kept beside the store."""
    return RootFs(
        layers=tuple(
            LayerRef(digest=layer.digest, diff_id=layer.diff_id, size=layer.size, media_type=layer.media_type)
            for layer in image.layers
        ),
        config=image.config,
        config_bytes=image.config_bytes,
        manifest=image.manifest_bytes,
        blob=image.blob,
        cache=image.store.parent / "unpacked",
        name=image.ref,
    )
