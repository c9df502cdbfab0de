"""Names of images, repositories and tags in a registry.

https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md#pulling-manifests
"""

import re

from primus_images.errors import InputError

_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_REFERENCE = re.compile(
    r"(?P<name>[^@]+?)(?::(?P<tag>[^:/@]*))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_NAME = re.compile(
    rf"(?:localhost|[A-Za-z0-9.-]+\.[A-Za-z0-9-]+|[A-Za-z0-9.-]+(?=:))(?::[0-9]+)?(?:/{_PART})+"
)


def require_repository(name: str, option: str) -> None:
    """Raise InputError if the value of an option does not name a repository."""
    host, _, _ = name.partition("/")
    port = host.partition(":")[2] or "443"
    if not _NAME.fullmatch(name) or len(name) > 255 or not 0 < int(port) < 65536:
        raise InputError(
            f"{option} {name!r} is not a repository of a registry",
            hint="HOST[:PORT]/PATH, e.g. docker.io/rocm/primus, of at most 255 characters, PORT "
            "at most 65535; by the OCI distribution specification, each part of PATH is "
            "lower-case letters and digits, with '.', '_', '__' or hyphens between them",
        )


def require_tag(tag: str, option: str) -> None:
    """Raise InputError if the value of an option cannot be a tag."""
    if not _TAG.fullmatch(tag):
        raise InputError(
            f"{option} {tag!r} cannot be a tag of a registry",
            hint="by the OCI distribution specification, a tag is at most 128 letters, digits, "
            "'_', '.' and '-', and begins with none of the last two",
        )


def reference(text: str, option: str) -> tuple[str, str, str]:
    """Return repository, tag and digest of the image that the value of an option names.

    One of tag and digest may be empty. Raises InputError for what cannot be an image's name.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None or not (match["tag"] or match["digest"]):
        raise InputError(
            f"{option} {text!r} names no image",
            hint="HOST[:PORT]/PATH:TAG or HOST[:PORT]/PATH@sha256:…",
        )
    require_repository(match["name"], option)
    if match["tag"]:
        require_tag(match["tag"], option)
    return match["name"], match["tag"] or "", match["digest"] or ""


def on_this_machine(repository: str) -> bool:
    """Whether the registry is on this machine: it may then speak HTTP, as for Docker."""
    host = repository.partition("/")[0].partition(":")[0]
    return host == "localhost" or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None
