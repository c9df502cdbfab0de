"""How mmdebstrap installs a base and what the base leaves out. Part of its key."""

from __future__ import annotations

# mmdebstrap unpacks the variant's own packages itself, to have a dpkg to run, which unpacks them again; all others dpkg
# alone. So the smallest variant that has a dpkg: with all packages in it, half of a large base's work is done twice.
VARIANT = "essential"

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
    # Python writes these as it imports them while packages are configured, and not the same bytes each time.
    "usr/share/python3/debpython/__pycache__*",
    "usr/lib/python3/dist-packages/_distutils_hack/__pycache__*",
)

TRIM = (*NOT_UNPACKED, *UNPACKED_STILL, *LEFT_OUT)
