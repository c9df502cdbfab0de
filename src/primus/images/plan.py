"""Pins, lock and local files → the actions of an image. Pure, but for hashing local files by stat."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from primus.errors import InputError
from primus.images.action import Action, ImagePlan, Input
from primus.images.canonical import key_of
from primus.images.layer import assembler
from primus.images.prefix import Prefix
from primus.images.skeleton import console_script, distribution, environment
from primus.images.source import WHEEL_SCRIPT
from primus.images.target import build_root, normalised
from primus.images.trim import TRIM, kernels_of_others
from primus.versions.lock import Lock, LockedFile
from primus.versions.model import Build, Pin

if TYPE_CHECKING:
    from primus.images.project import Project

__all__ = ["plan_image"]

# A wheel of the closure at least this large gets a layer of its own: small ones change together, large ones rarely.
_OWN_LAYER = 8_000_000
_BYTECODE = Path(__file__).with_name("compile_bytecode.py")
_ORDER = Path(__file__).with_name("sorted_folders.py")
_SOURCE = "https://github.com/AMD-AGI/Primus"


def plan_image(project: Project, name: str, lock: Lock | None) -> ImagePlan:
    """The plan of target ``name``. Raises InputError when the lock lacks what the target asks for."""
    target, pins, versions = project.target(name), project.pins(name), project.versions
    choice = project.choice(name)
    tool = assembler(target.compression)
    prefix: Prefix | None = None
    layers: list[Action] = []
    if choice.base:
        base = versions.bases[choice.base]
        prefix = Prefix(python=".".join(base.python.split(".")[:2]))
        layers.append(_base(project, choice.base, lock, name, tool))
        # What the base's own Python packages provide is seen from the environment only when one of them is pinned.
        layers.append(_inline("environment", environment(prefix, any(p.deb for p in pins.values())), tool))
    layers += _components(project, name, pins, lock, prefix, layers[0] if layers else None, tool)
    facts = {
        "release": versions.release,
        "target": name,
        "channel": choice.channel,
        "preview": choice.preview,
        "components": {versions.components[c].name: p.version for c, p in pins.items() if p.version},
    }
    if prefix:
        entries = {"etc/primus/image.json": {"text": json.dumps(facts, indent=1) + "\n"}}
        layers.append(_inline("facts", entries, tool))
    env = project.environment(name)
    if prefix:
        env.setdefault("PATH", f"/{prefix.root}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    labels = {f"io.primus.pins.{c}": p.version or "local" for c, p in pins.items()}
    created = f"{versions.created}T00:00:00Z"
    return ImagePlan(
        target=name,
        release=versions.release,
        layers=tuple(layers),
        config={
            "architecture": "amd64",
            "os": "linux",
            "created": created,
            "config": {
                "Env": [f"{k}={v}" for k, v in sorted(env.items())],
                "Entrypoint": list(target.entrypoint),
                "Cmd": list(target.command),
                "WorkingDir": target.workdir,
                "Labels": labels,
            },
        },
        annotations={
            "org.opencontainers.image.created": created,
            "org.opencontainers.image.title": f"primus {name}",
            "org.opencontainers.image.description": target.description,
            "org.opencontainers.image.version": versions.release,
            "org.opencontainers.image.source": _SOURCE,
            "org.opencontainers.image.ref.name": project.ref(name),
            "io.primus.target": name,
            "io.primus.channel": choice.channel,
            **({"io.primus.preview": choice.preview} if choice.preview else {}),
        },
        suffix=choice.suffix,
        budget_bytes=round(target.budget_gb * 1e9) if target.budget_gb else None,
    )


def _need(lock: Lock | None, name: str) -> Lock:
    if lock is None:
        raise InputError(f"{name} has no lock yet", hint=f"primus lock {name}")
    return lock


def _inline(name: str, entries: Mapping[str, Mapping[str, object]], tool: str) -> Action:
    return Action(
        name=name,
        kind="files",
        inputs=(Input(name="assembler", value=tool), Input(name="content", value=key_of(entries))),
        spec={"inline": entries},
    )


def _base(project: Project, base: str, lock: Lock | None, name: str, tool: str, root: str = "") -> Action:
    """The root file system of ``base``, or ``root``, a build's, which holds more."""
    debs = _need(lock, name).of("deb", root or base)
    if not debs:
        raise InputError(f"the lock of {name} has no packages for {root or base}", hint=f"primus lock {name}")
    where, about = project.base_place(base), project.versions.bases[base]
    kernels = {"arch": about.arch, "kernels": list(kernels_of_others(about.arch))} if about.arch else {}
    return Action(
        name=f"base {root or base}",
        kind="debs",
        inputs=(
            Input(name="assembler", value=tool),
            Input(name="suite", value=about.suite, where=where),
            *(Input(name=f.name, value=f"{f.version} sha256:{f.sha256}", where=where) for f in debs),
        ),
        spec={"suite": about.suite, "trim": list(TRIM), **kernels},
        files=debs,
    )


def _components(
    project: Project,
    name: str,
    pins: Mapping[str, Pin],
    lock: Lock | None,
    prefix: Prefix | None,
    base: Action | None,
    tool: str,
) -> list[Action]:
    wheels = {f.name: f for f in lock.of("wheel")} if lock else {}
    layers: list[Action] = []
    for component, pin in pins.items():
        where = project.pin_place(component, pin)
        if pin.deb is not None:
            _check_deb(project, name, pin, lock, where)
            continue
        if pin.path is not None:
            layers.append(_tree(project, component, pin, where, prefix, tool))
            continue
        if prefix is None or base is None:
            raise InputError(f"{component} is a Python package, and target {name} has no base to hold it", where=where)
        package = normalised(pin.wheel or pin.sdist or "")
        if pin.wheel is not None:
            wheel = wheels.pop(package, None)
            if wheel is None or wheel.version != pin.version:
                locked = f"has {wheel.version}" if wheel else "has none"
                raise InputError(
                    f"{pin.text} is pinned, the lock of {name} {locked}", where=where, hint=f"primus lock {name}"
                )
            layers.append(_wheels(project, component, (wheel,), where, base, prefix, tool, without=pin.without))
        else:
            built = _build(project, name, pin, lock, where, base, prefix, tool)
            layers.append(_wheels(project, component, (), where, base, prefix, tool, built))
    lock_name = str(project.lock_path(name).relative_to(project.root))
    closure = _closure(project, "python", wheels.values(), lock_name, base, prefix, tool) if base and prefix else []
    # Local trees change most often: they lie on top of what rarely does.
    local = [a for a in layers if a.kind == "files"]
    return [*closure, *(a for a in layers if a.kind != "files"), *local]


def _closure(
    project: Project, name: str, wheels: Iterable[LockedFile], where: str, base: Action, prefix: Prefix, tool: str
) -> list[Action]:
    """Layers for wheels that no pin names: large ones each their own, small ones together."""
    wheels = tuple(wheels)
    small = tuple(f for f in wheels if f.size < _OWN_LAYER)
    layers = [
        _wheels(project, f"python-{f.name}", (f,), where, base, prefix, tool) for f in wheels if f.size >= _OWN_LAYER
    ]
    return [*layers, _wheels(project, name, small, where, base, prefix, tool)] if small else layers


def _check_deb(project: Project, name: str, pin: Pin, lock: Lock | None, where: str) -> None:
    """Raise InputError unless the base brings the package in the pinned version."""
    from primus.versions.debs import upstream

    base = project.choice(name).base
    version = next((f.version for f in _need(lock, name).of("deb", base) if f.name == pin.deb), None)
    if version is None:
        raise InputError(f"base {base} brings no {pin.deb}", where=where, hint=f"add it under bases.{base}.packages")
    if upstream(version) != pin.version:
        raise InputError(
            f"{pin.text} is pinned, base {base} has {upstream(version)}", where=where, hint=f"pin {upstream(version)}"
        )


def _tree(project: Project, component: str, pin: Pin, where: str, prefix: Prefix | None, tool: str) -> Action:
    tree = tuple(project.stats.tree(project.root / (pin.path or ""), pin.include))
    if prefix is None and "{site}" in (pin.to or ""):
        raise InputError(f"{component} goes among the Python packages, and its target has no base", where=where)
    to = (pin.to or "/").replace("{site}", prefix.site if prefix else "").strip("/")
    extra = {}
    if component == "primus":
        extra = {**distribution(to), **console_script(to)}
    return Action(
        name=component,
        kind="files",
        inputs=(
            Input(name="assembler", value=tool),
            Input(name=pin.path or "", value="tree:" + key_of(tree), where=where),
            Input(name="to", value="/" + to, where=where),
        ),
        spec={"to": to, "inline": extra},
        root=str(project.root / (pin.path or "")),
        tree=tree,
    )


def _wheels(
    project: Project,
    name: str,
    files: tuple[LockedFile, ...],
    where: str,
    base: Action,
    prefix: Prefix,
    tool: str,
    built: Action | None = None,
    without: tuple[str, ...] = (),
) -> Action:
    # Bytecode is compiled by the image's own interpreter: its packages, not the whole base, are an input.
    python = [i for i in base.inputs if "python3" in i.name]
    return Action(
        name=name,
        kind="wheels",
        inputs=(
            Input(name="assembler", value=tool),
            *(Input(name=f.name, value=f"{f.version} sha256:{f.sha256}", where=where) for f in files),
            *python,
            Input(name="bytecode", value="sha256:" + project.stats.sha256(str(_BYTECODE))),
        ),
        spec={
            "prefix": prefix.root,
            "python": prefix.python,
            "built": built.key if built else None,
            **({"without": list(without)} if without else {}),
        },
        needs=(built,) if built else (),
        files=files,
        tools=(base,),
    )


def _build(
    project: Project, name: str, pin: Pin, lock: Lock | None, where: str, base: Action, prefix: Prefix, tool: str
) -> Action:
    package, build = normalised(pin.sdist or ""), pin.build or Build()
    lock = _need(lock, name)
    source = next((f for f in lock.of("sdist") if f.name == package), None)
    if source is None or source.version != pin.version:
        raise InputError(f"{pin.text} is pinned, the lock of {name} has not got it", where=where, hint="primus lock")
    root, wheels = build_root(package), lock.of("wheel", build_root(package))
    own = _base(project, project.choice(name).base or "", lock, name, tool, root) if build.debs else base
    layers: list[Action] = []
    if wheels:
        lock_name = str(project.lock_path(name).relative_to(project.root))
        layers = [
            _inline("environment", environment(prefix, system=True), tool),
            *_closure(project, f"wheels of {root}", wheels, lock_name, base, prefix, tool),
        ]
    return Action(
        name=f"build {package}",
        kind="build",
        inputs=(
            Input(name=package, value=f"{source.version} sha256:{source.sha256}", where=where),
            Input(name="sorted folders", value="sha256:" + project.stats.sha256(str(_ORDER))),
            *(Input(name=f"deb {f.name}", value=f"{f.version} sha256:{f.sha256}", where=where) for f in own.files),
            *(Input(name=f"wheel {f.name}", value=f"{f.version} sha256:{f.sha256}", where=where) for f in wheels),
            *(Input(name=f"environment {k}", value=v, where=where) for k, v in build.environment.items()),
        ),
        spec={
            "package": package,
            "script": WHEEL_SCRIPT,
            "python": prefix.interpreter if wheels else f"/usr/bin/python{prefix.python}",
            "environment": dict(build.environment),
            "root": own.spec,
        },
        # How they are compressed and laid out changes no wheel: their packages are the inputs, not their keys.
        tools=(own, *layers),
        files=(source,),
        job_bytes=round(build.job_gb * 1e9),
    )
