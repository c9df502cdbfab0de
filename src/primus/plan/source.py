"""Programs that run in the sandbox. They are part of the keys of the actions that run them."""

from __future__ import annotations

from pathlib import Path

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
