"""Package URLs (https://github.com/package-url/purl-spec) of locked files."""

from __future__ import annotations

from urllib.parse import quote

from primus.versions.lock import LockedFile


def purl(file: LockedFile) -> str:
    """Return the package URL of a locked file. It names no host; the checksum identifies the bytes."""
    name, version = quote(file.name, safe=""), quote(file.version, safe="")
    if file.kind in ("wheel", "sdist"):
        return f"pkg:pypi/{name}@{version}?file_name={quote(file.file, safe='')}"
    if file.kind == "deb":
        own = file.file.rpartition("_")[2].removesuffix(".deb")
        return f"pkg:deb/debian/{name}@{version}?arch={'all' if own == 'all' else 'amd64'}"
    if file.kind == "layer":
        return f"pkg:oci/{name}@sha256%3A{file.sha256}"
    return f"pkg:generic/{name}@{version}?checksum=sha256%3A{file.sha256}"
