"""Entry point of the image: it prints a greeting, then becomes the command.

``python3 -m primus_images.system.banner COMMAND…`` is how an image starts. An error in the greeting
never keeps the command from running. The greeting is printed before a shell, or if standard error
is a terminal; ``PRIMUS_NO_BANNER=1`` turns it off.
"""

import os
import signal

# Ctrl-C before the command runs. Without this, Python would show a traceback.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from primus_images.files import json_if_readable
from primus_images.gpus.detect import detect
from primus_images.system.host import IMAGE_FILE
from primus_images.system.support import support_text

SHELLS = frozenset({"bash", "sh", "dash", "zsh"})
# Tab completion. bash reads this file if it is interactive and not a login shell; login shells read
# /etc/profile.d.
BASHRC = Path("/etc/primus/bashrc")
_NAMED_BASHRC = frozenset({"--rcfile", "--init-file", "--norc"})


def wanted(command: Sequence[str], environment: Mapping[str, str], *, terminal: bool) -> bool:
    """Return whether to print the greeting: before a bare shell, or on a terminal."""
    if environment.get("PRIMUS_NO_BANNER", "0") not in ("", "0"):
        return False
    # "sh -c …" runs a script, so nobody reads the greeting.
    return terminal or (Path(command[0]).name in SHELLS and "-c" not in command)


def compose(image: Mapping[str, Any], gpu: str, today: date) -> str:
    """Return the greeting of an image with the content of ``/etc/primus/image.json``.

    Missing fields are left out.
    """
    named = [str(image[key]) for key in ("release", "target") if image.get(key)]
    title = " ".join(named) or "unnamed build"
    if image.get("channel"):
        title += f" ({image['channel']} channel)"
    lines = [f"Primus {title}"]
    if image.get("preview"):
        lines.append(f"  PREVIEW, no release: {image['preview']}")
    support = support_text(str(image.get("supported_until") or ""), today)
    if support:
        lines.append(f"  {support}")
    components = image.get("components")
    if isinstance(components, Mapping) and components:
        width = max(map(len, components))
        lines += [f"  {name:<{width}}  {version}" for name, version in components.items()]
    lines += [f"  GPU: {gpu}", "  start: primus train llama3-proxy    help: primus --help"]
    return "\n".join(lines) + "\n"


def beside_amds() -> str:
    """Return a sentence if AMD's own wheel of the name ``primus`` is installed; else ""."""
    try:
        found = version("primus")
    except PackageNotFoundError:
        return ""
    return (
        f"AMD's primus {found} is installed, too: `primus-cli` and `python3 -m primus.cli.main` "
        "are AMD's, `primus` is this image's"
    )


def with_bashrc(command: Sequence[str]) -> list[str]:
    """Return ``command``; bash gets the image's start-up file unless the command says which."""
    first, *rest = command
    if Path(first).name != "bash" or _NAMED_BASHRC.intersection(rest) or not BASHRC.exists():
        return list(command)
    return [first, "--rcfile", str(BASHRC), *rest]


def main(argv: Sequence[str]) -> int:
    """Print the greeting and replace this process by ``argv`` (default: bash, else sh).

    Returns only on failure. The exit codes are a shell's: 127 for a command that does not exist,
    126 for one that cannot be executed.
    """
    command = list(argv)
    if not command:
        command = ["/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"]
    if wanted(command, os.environ, terminal=sys.stderr.isatty()):
        with suppress(Exception):
            greeting = compose(json_if_readable(IMAGE_FILE), detect().sentence(), date.today())
            print(greeting, end="", file=sys.stderr, flush=True)
            if beside_amds():
                print(f"  {beside_amds()}", file=sys.stderr, flush=True)
    try:
        os.execvp(command[0], with_bashrc(command))
    except (OSError, ValueError) as error:  # ValueError: the command is empty
        reason = getattr(error, "strerror", error)
        print(f"primus: {command[0]!r} cannot be run: {reason}", file=sys.stderr)
        if isinstance(error, FileNotFoundError | ValueError):
            return 127
        return 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
