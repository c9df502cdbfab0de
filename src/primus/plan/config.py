"""What an image says of itself: the OCI config and the annotations of its manifest."""

from __future__ import annotations

from primus.plan.prefix import Prefix
from primus.plan.resolve import ResolvedTarget
from primus.plan.skeleton import CONSTRAINTS

_SOURCE = "https://github.com/AMD-AGI/Primus"


def image_config(resolved: ResolvedTarget, prefix: Prefix | None, held: str) -> dict[str, object]:
    """Return the config: platform, environment, command and labels. ``held``: pip's constraints, if there are any."""
    target, preview = resolved.target, resolved.choice.preview
    env = dict(resolved.environment)
    if prefix:
        env.setdefault("PATH", f"/{prefix.root}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        if held:
            env |= {name: f"/{CONSTRAINTS}" for name in ("PIP_CONSTRAINT", "UV_CONSTRAINT") if name not in env}
    every = {**resolved.pins, **resolved.inside}
    labels = {f"io.primus.pins.{name}": pin.version or "local" for name, pin in every.items()}
    if preview:
        labels["io.primus.preview"] = preview
    if resolved.extras:
        labels["io.primus.extras"] = " ".join(resolved.extras)
    return {
        "architecture": "amd64",
        "os": "linux",
        "created": _created(resolved),
        "config": {
            "Env": [f"{name}={value}" for name, value in sorted(env.items())],
            "Entrypoint": list(target.entrypoint),
            "Cmd": list(target.command),
            "WorkingDir": target.workdir,
            "Labels": labels,
        },
    }


def manifest_annotations(resolved: ResolvedTarget) -> dict[str, str]:
    """Return the annotations of the image's manifest."""
    choice = resolved.choice
    return {
        "org.opencontainers.image.created": _created(resolved),
        "org.opencontainers.image.title": f"primus {resolved.name}",
        "org.opencontainers.image.description": resolved.target.description,
        "org.opencontainers.image.version": resolved.versions.release,
        "org.opencontainers.image.source": _SOURCE,
        "org.opencontainers.image.ref.name": resolved.ref,
        "io.primus.target": resolved.name,
        "io.primus.channel": choice.channel,
        **({"io.primus.preview": choice.preview} if choice.preview else {}),
    }


def _created(resolved: ResolvedTarget) -> str:
    """Return the date of the release, which stands for the time of every build."""
    return f"{resolved.versions.created}T00:00:00Z"
