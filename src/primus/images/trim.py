"""What a base leaves out. Part of the base's key."""

from __future__ import annotations

__all__ = ["LEFT_OUT", "NOT_UNPACKED", "TRIM", "UNPACKED_STILL"]

# Man pages and documentation help nobody in a training image; copyright files must stay with the binaries.
NOT_UNPACKED = (
    "/usr/share/man/*",
    "/usr/share/info/*",
    "/usr/share/lintian/*",
    "/usr/share/linda/*",
    "/usr/share/locale/*",
    "/usr/share/doc/*",
    # A test server's private key: published, but a key in an image is a finding for every scanner.
    "/usr/lib/python3/dist-packages/fsspec/implementations/tests/*",
)
UNPACKED_STILL = ("/usr/share/doc/*/copyright", "/usr/share/locale/locale.alias")

# Patterns of paths that differ from machine to machine or run to run, or that the container runtime provides.
LEFT_OUT = (
    "dev/*",
    "run/*",
    "tmp/*",
    "proc/*",
    "sys/*",
    "etc/machine-id",
    "etc/hostname",
    "etc/resolv.conf",
    "etc/apt/sources.list",
    "etc/apt/sources.list.d/*",
    "etc/apt/apt.conf.d/99mmdebstrap",
    "etc/*-",
    "var/cache/*",
    "var/log/*",
    "var/lib/apt/*",
    "var/lib/dpkg/*-old",
    "var/lib/dpkg/lock*",
    "var/lib/dpkg/triggers/Lock",
    "var/lib/systemd/*",
)

TRIM = (*NOT_UNPACKED, *UNPACKED_STILL, *LEFT_OUT)
