"""`primus run` and `primus load`: a built image as a container, and in a Docker engine."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from primus_images.cli.host.common import (
    SingleOptions,
    TargetOptions,
    resolved_target,
    warn_of_state,
)
from primus_images.cli.verb import answer, note
from primus_images.engine.workshop import root_of_image
from primus_images.errors import InputError
from primus_images.oci.store import digest_of
from primus_images.progress import choose_progress
from primus_images.sandbox.container import GIB, Command, Mount, RootFs, devices_named, gpus
from primus_images.sandbox.docker import load_image
from primus_images.sandbox.engines import choose
from primus_images.terminal import say

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class RunOptions(TargetOptions):
    """The options of ``run``."""

    engine: str
    volume: Sequence[str]
    env: Sequence[str]
    gpus: str
    device: Sequence[str]
    memory: str | None
    shm_size: str | None
    user: str | None
    network: str
    entrypoint: bool
    command: Sequence[str]


def load(options: SingleOptions) -> int:
    """Load an image as REPOSITORY:RELEASE-TARGET into the Docker engine.

    REPOSITORY is `image.name` of versions.yaml. The engine is the one that Docker's client
    chooses, by DOCKER_HOST, DOCKER_CONTEXT or its settings.
    """
    resolved, workspace = resolved_target(options)
    warn_of_state(resolved)
    root = root_of_image(workspace.store, workspace.unpacked, options.target, ref=resolved.ref)
    tag = f"{resolved.versions.image.name}:{root.name}"
    with choose_progress(options.json) as progress:
        image_id, sent = load_image(root, tag, progress)
    done = "the engine already has it, nothing sent"
    if sent:
        done = f"sent {sent / 1e6:.1f} MB"
    note(options, f"{tag}: {done}")
    document = {
        "image_id": image_id,
        "tag": tag,
        "manifest": digest_of(root.manifest),
        "bytes_sent": sent,
    }
    return answer(options, document, [image_id])


def run(options: RunOptions) -> int:
    """Run a command in an image, as it would run on a cluster."""
    if options.command and not options.command[0]:
        raise InputError("the command is empty", hint="leave it out to run the image's own command")
    if options.user == "":
        raise InputError("--user is empty")
    environment: dict[str, str] = {}
    for item in options.env:
        environment |= _variable(item)
    command = Command(
        argv=tuple(options.command),
        env=environment,
        mounts=tuple(_mount(item) for item in options.volume),
        devices=gpus(options.gpus) + devices_named(options.device),
        memory_bytes=_bytes("--memory", options.memory),
        network=options.network == "host",
        user=options.user,
        entrypoint=options.entrypoint,
        shm_bytes=_bytes("--shm-size", options.shm_size) or 8 * GIB,
    )
    return choose(options.engine).run(_image_root(options), command)


def _variable(item: str) -> dict[str, str]:
    """Return the variable of ``KEY=VALUE``, or of ``KEY`` with the user's own value."""
    key, equals, value = item.partition("=")
    if not key or "\0" in item:
        raise InputError(
            f"-e {item!r} is not a variable", hint="-e KEY=VALUE, or -e KEY to copy your own value"
        )
    if equals:
        return {key: value}
    if key in os.environ:
        return {key: os.environ[key]}
    say(
        f"primus run: -e {key}: your environment has no such variable, so the command has none, "
        "either"
    )
    return {}


def _mount(item: str) -> Mount:
    parts = item.split(":")
    mode = "rw"
    if len(parts) > 2 and parts[-1] in ("ro", "rw"):
        mode = parts.pop()
    if len(parts) != 2 or not parts[0] or not parts[1].startswith("/"):
        raise InputError(
            f"-v {item!r} is not a volume", hint="-v SOURCE:/path/inside; add :ro for read-only"
        )
    return Mount(source=Path(parts[0]).expanduser(), target=parts[1], read_only=mode == "ro")


def _bytes(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    amount = 0
    if match:
        amount = int(float(match[1]) * _UNITS[match[2].lower()])
    if not 1 << 20 <= amount <= 1 << 50:
        raise InputError(
            f"{option} {text[:40]!r} is not a size from 1m to 1024t",
            hint=f"{option} 512m, {option} 2g",
        )
    return amount


def _image_root(options: TargetOptions) -> RootFs:
    """Return the root file system of the image. Raises InputError if it is not built."""
    resolved, workspace = resolved_target(options)
    warn_of_state(resolved)
    return root_of_image(workspace.store, workspace.unpacked, options.target, ref=resolved.ref)
