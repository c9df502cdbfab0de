"""Can this process make the namespaces a run needs? Asked in a process of its own, which then ends."""

from __future__ import annotations

from primus.sandbox import syscalls

__all__ = ["main"]


def main(_: list[str]) -> int:
    """Return 0 when a mount namespace can be made and changed, else 1."""
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNET)
        syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    except OSError:
        return 1
    return 0
