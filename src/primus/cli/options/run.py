"""Run a command in an image, as it would run on a cluster.

The exit code is that of the command: 128+n if signal n ended it, 127 if the image does not contain it.
Without a command, the image's own command runs. Changes outside mounts are discarded.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from primus.cli.options.common import add_engine, add_project_options, add_target
from primus.errors import InputError

EXAMPLE = "primus run cpu -v $PWD/runs:/workspace/runs --memory 8g -- primus train llama3-proxy --steps 10"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus run``."""
    parser.usage = "primus run TARGET [options] [-- COMMAND ...]"
    add_target(parser)
    _split_at_dashes(parser)
    add_engine(parser)
    parser.add_argument(
        "-v", "--volume", action="append", default=[], metavar="SRC:DST[:ro]", help="mount a path of this machine"
    )
    parser.add_argument(
        "-e",
        "--env",
        action="append",
        default=[],
        metavar="K=V|K",
        help="set a variable; K alone copies its value from your environment",
    )
    parser.add_argument(
        "--gpus",
        default="none",
        metavar="all|N|none",
        help="GPUs of this machine: all, the first N or none (default: none)",
    )
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="DEV",
        help="add a device: a node or folder in /dev, or a CDI name such as amd.com/gpu=0",
    )
    parser.add_argument("--memory", metavar="SIZE", help="memory limit, e.g. 2g")
    parser.add_argument("--shm-size", metavar="SIZE", help="size of /dev/shm (default: 8g)")
    parser.add_argument("--cpus", type=_cores, metavar="N", help="CPU limit in cores, e.g. 1.5")
    parser.add_argument("--user", metavar="NAME|UID[:GID]", help="user in the container (default: the image's)")
    parser.add_argument("--workdir", metavar="DIR", help="working directory (default: the image's)")
    parser.add_argument(
        "--network",
        choices=("none", "host"),
        default="none",
        help="none: loopback only; host: this machine's network (default: none)",
    )
    parser.add_argument(
        "--entrypoint",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use the image's entrypoint (default: yes)",
    )
    parser.add_argument("-t", "--tty", action="store_true", default=None, help="always allocate a terminal")
    add_project_options(parser, json=False)


def _split_at_dashes(parser: argparse.ArgumentParser) -> None:
    # Everything after "--" belongs to the command. argparse would look for its own options there, and leaves a second
    # positional argument empty if options stand between it and the first.
    plain = parser.parse_args

    def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
        words = list(sys.argv[1:] if args is None else args)
        cut = words.index("--") if "--" in words else len(words)
        options = plain(words[:cut])
        options.command = words[cut + 1 :]
        return options

    parser.parse_args = parse_args  # type: ignore[method-assign, assignment]


def _cores(text: str) -> float:
    cores = float(text) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) else 0
    if not 0.01 <= cores <= 65536:
        raise InputError(f"--cpus {text[:40]!r} is not a number of cores", hint="at least 0.01, e.g. --cpus 1.5")
    return cores
