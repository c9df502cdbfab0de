"""Verbs that use a built image: run a command in it, or load it into a Docker engine."""

import argparse
import os
import re
import sys
from pathlib import Path

from primus.cli.host.common import ENGINE, SINGLE, SOURCE, TARGET, resolved_target
from primus.cli.verb import answer, option, rest, several, verb
from primus.engine.workshop import root_of_image
from primus.errors import InputError
from primus.oci.canonical import digest_of
from primus.sandbox import images
from primus.sandbox.container import GIB, Command, Mount, RootFs, gpus, listed
from primus.sandbox.engines import choose

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@verb(*SINGLE, example="primus load cpu")
def load(args: argparse.Namespace) -> int:
    """Load an image as rocm/primus:RELEASE-TARGET into the Docker engine of DOCKER_HOST (or of the default socket).

    Nothing is sent if the engine already has the image. The last line is the image ID.
    """
    root = _image_root(args)
    tag = f"rocm/primus:{root.name}"
    image_id, sent = images.load(root, tag)
    document = {"image_id": image_id, "tag": tag, "manifest": digest_of(root.manifest), "bytes_sent": sent}
    if not args.json:
        note = f"sent {sent / 1e6:.1f} MB" if sent else "the engine already has it, nothing sent"
        print(f"{tag}: {note}", file=sys.stderr)
    answer(args, document, [image_id])
    return 0


@verb(
    TARGET,
    rest("command", "primus run TARGET [options] [-- COMMAND ...]"),
    ENGINE,
    several("--volume", "mount a path of this machine", "SRC:DST[:ro]", short="-v"),
    several("--env", "set a variable; K alone takes its value from your environment", "K=V|K", short="-e"),
    option("--gpus", default="none", metavar="all|N|none", help="GPUs: all, the first N or none (default: none)"),
    several("--device", "add a device: a node or folder in /dev, or a CDI name such as amd.com/gpu=0", "DEV"),
    option("--memory", metavar="SIZE", help="memory limit, e.g. 2g"),
    option("--shm-size", metavar="SIZE", help="size of /dev/shm (default: 8g)"),
    option("--user", metavar="NAME|UID[:GID]", help="user in the container (default: the image's)"),
    option("--network", choices=("none", "host"), default="none", help="none: loopback only; host: this machine's"),
    option("--no-entrypoint", action="store_false", dest="entrypoint", help="leave out the image's entrypoint"),
    *SOURCE,
    example="primus run cpu -v $PWD/runs:/workspace/runs --memory 8g -- primus train llama3-proxy --steps 10",
)
def run(args: argparse.Namespace) -> int:
    """Run a command in an image, as it would run on a cluster.

    The exit code is that of the command: 128+n if signal n ended it, 127 if the image does not contain it.
    Without a command, the image's own command runs. Changes outside mounts are discarded.
    """
    if args.command and not args.command[0]:
        raise InputError("the command is empty", hint="leave it out to run the image's own command")
    if args.user == "":
        raise InputError("--user is empty")
    command = Command(
        argv=tuple(args.command),
        env=dict(_variable(item) for item in args.env if "=" in item or item in os.environ or not item),
        mounts=tuple(_mount(item) for item in args.volume),
        devices=gpus(args.gpus) + listed(args.device),
        memory_bytes=_bytes("--memory", args.memory),
        network=args.network == "host",
        user=args.user,
        entrypoint=args.entrypoint,
        shm_bytes=_bytes("--shm-size", args.shm_size) or 8 * GIB,
    )
    return choose(args.engine, _say).run(_image_root(args), command)


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
    match = _SIZE.fullmatch(text.strip())
    amount = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if not 1 << 20 <= amount < 1 << 60:
        raise InputError(f"{option} {text[:40]!r} is not a size of at least 1 MiB", hint=f"{option} 512m, {option} 2g")
    return amount


def _image_root(args: argparse.Namespace) -> RootFs:
    """Return the root file system of the image of ``args.target``. Raises InputError if the store has no such image."""
    resolved, workspace = resolved_target(args)
    return root_of_image(workspace.store, workspace.unpacked, args.target, ref=resolved.ref)
