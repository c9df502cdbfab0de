"""How root file systems are installed, and the programs that run in them. Parts of the keys of actions."""

from __future__ import annotations

from pathlib import Path

# mmdebstrap unpacks the packages of the variant itself, to have a dpkg to run, and dpkg then unpacks them again. Other
# packages are unpacked by dpkg only. So use the smallest variant that has a dpkg; otherwise, half of the work for a
# large base is done twice.
VARIANT = "essential"

# A training image needs no man pages or documentation. Copyright files must stay with the binaries.
NOT_UNPACKED = (
    "/usr/share/man/*",
    "/usr/share/info/*",
    "/usr/share/lintian/*",
    "/usr/share/linda/*",
    "/usr/share/locale/*",
    "/usr/share/doc/*",
    # The private key of a test server. It is public, but every scanner reports a key in an image.
    "/usr/lib/python3/dist-packages/fsspec/implementations/tests/*",
)
UNPACKED_STILL = ("/usr/share/doc/*/copyright", "/usr/share/locale/locale.alias")

# Patterns of paths that differ between machines or runs, or that the container runtime provides.
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
    # Python writes these when packages are configured, with other bytes each time.
    "usr/share/python3/debpython/__pycache__*",
    "usr/lib/python3/dist-packages/_distutils_hack/__pycache__*",
)

TRIM = (*NOT_UNPACKED, *UNPACKED_STILL, *LEFT_OUT)

# Compiles a layer's modules, and lists folders in sorted order while a wheel is built.
BYTECODE = Path(__file__).with_name("compile_bytecode.py")
ORDER = Path(__file__).with_name("sorted_folders.py")

# Builds a wheel from a source archive. $1 is the archive, $2 the Python of the build root. The archive is unpacked at a
# fixed path: pip would build it in a folder with a random name, which debug information contains. Tools from wheels
# (ninja) lie beside the interpreter.
WHEEL_SCRIPT = """\
set -e
mkdir /tmp/source
cd /tmp/source
PATH="${2%/*}:$PATH"
case "$1" in
*.zip) "$2" -m zipfile -e "$1" . ;;
*) tar -xf "$1" --no-same-owner ;;
esac
cd ./*
eval "$PREPARE"
exec "$2" -m pip wheel --no-index --no-deps --no-build-isolation --no-cache-dir --wheel-dir /out .
"""
