"""``primus run``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from primus.cli.host.image_root import image_root
from primus.errors import InputError
from primus.sandbox.container import GIB, Command, Limits, Mount
from primus.sandbox.devices import gpus, listed
from primus.sandbox.engines import choose

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if args.command and not args.command[0]:
        raise InputError("the command is empty", hint="leave it out to run the image's own command")
    for option in ("user", "workdir"):
        if getattr(args, option) == "":
            raise InputError(f"--{option} is empty")
    command = Command(
        argv=tuple(args.command),
        env=dict(_variable(item) for item in args.env if "=" in item or item in os.environ or not item),
        cwd=args.workdir,
        mounts=tuple(_mount(item) for item in args.volume),
        devices=(*gpus(args.gpus), *listed(args.device)),
        limits=Limits(memory_bytes=_bytes("--memory", args.memory), cpus=args.cpus),
        network=args.network == "host",
        tty=args.tty,
        user=args.user,
        entrypoint=args.entrypoint,
        shm_bytes=_bytes("--shm-size", args.shm_size) or 8 * GIB,
    )
    return choose(args.engine, _say).run(image_root(args), command)


def _say(text: str) -> None:
    print(f"primus: {text}", file=sys.stderr, flush=True)


def _variable(item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not key or "\0" in item:
        raise InputError(f"-e {item!r} is not a variable", hint="-e KEY=VALUE, or -e KEY to copy your own value")
    return key, value if equals else os.environ[key]


def _mount(item: str) -> Mount:
    parts = item.split(":")
    mode = parts.pop() if len(parts) > 2 and parts[-1] in ("ro", "rw") else "rw"
    if len(parts) != 2 or not parts[0] or not parts[1].startswith("/"):
        raise InputError(f"-v {item!r} is not a volume", hint="-v SOURCE:/path/inside; add :ro for read-only")
    return Mount(source=Path(parts[0]).expanduser(), target=parts[1], read_only=mode == "ro")


def _bytes(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    found = _SIZE.fullmatch(text.strip())
    amount = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    if not 1 << 20 <= amount < 1 << 60:
        raise InputError(f"{option} {text[:40]!r} is not a size of at least 1 MiB", hint=f"{option} 512m, {option} 2g")
    return amount
