"""How a source archive becomes a wheel. The script is part of the action's key; a pin may prepare the source."""

from __future__ import annotations

__all__ = ["WHEEL_SCRIPT"]

# Unpacked at a fixed place: pip builds an archive in a folder with a random name, which debug information keeps.
WHEEL_SCRIPT = """\
set -e
mkdir /tmp/source
cd /tmp/source
case "$1" in
*.zip) /usr/bin/python3 -m zipfile -e "$1" . ;;
*) tar -xf "$1" --no-same-owner ;;
esac
cd ./*
eval "$PREPARE"
exec "$PYTHON" -m pip wheel --no-index --no-deps --no-build-isolation --no-cache-dir --wheel-dir /out .
"""
