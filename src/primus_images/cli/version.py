"""What ``primus --version`` prints: which code this is, and of which release."""

import re
from pathlib import Path

from primus_images import __version__
from primus_images.files import json_if_readable, text_if_readable
from primus_images.system.host import CHECKOUT, IMAGE_FILE, commit_of


def version_text(checkout: Path = CHECKOUT, image_file: Path = IMAGE_FILE) -> str:
    """Return name and version, and what is known of release, image and commit, in one line."""
    parts = []
    image = json_if_readable(image_file)
    release = image.get("release") or release_of(checkout)
    if release:
        parts.append(f"release {release}")
    if image.get("target"):
        parts.append(f"image {image['target']}")
    if image.get("preview"):
        parts.append("preview")
    commit = commit_of(checkout)
    if commit:
        parts.append(f"commit {commit}")
    text = f"primus-images {__version__}"
    if parts:
        text += f" ({', '.join(parts)})"
    return text


def release_of(checkout: Path) -> str:
    """Return the release that ``versions.yaml`` of a checkout pins; empty if there is none."""
    pins = text_if_readable(checkout / "versions.yaml")
    pin = re.search(r"^release: *(\S+)", pins, re.MULTILINE)
    if pin is None:
        return ""
    return pin[1]
