"""Pins, lock and local files → the actions of an image. Pure, but for hashing local files by stat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from primus.errors import InputError
from primus.images.action import Action, ImagePlan, Input
from primus.images.canonical import key_of
from primus.images.layer import assembler
from primus.images.prefix import Prefix
from primus.images.skeleton import console_script, distribution, environment
from primus.images.source import WHEEL_SCRIPT
from primus.images.target import normalised
from primus.images.trim import TRIM, kernels_of_others
from primus.versions.lock import Lock, LockedFile
from primus.versions.model import Pin

if TYPE_CHECKING:
    from primus.images.project import Project

__all__ = ["plan_image"]

# A wheel of the closure at least this large gets a layer of its own: small ones change together, large ones rarely.
_OWN_LAYER = 8_000_000
_BYTECODE = Path(__file__).with_name("compile_bytecode.py")
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
        layers += _root(project, choice.base, lock, name, tool)
        # What the base's own Python packages provide is seen from the environment only when one of them is pinned.
        layers.append(_inline("environment", environment(prefix, any(p.deb for p in pins.values())), tool))
    layers += _components(project, name, pins, lock, prefix, tuple(layers), tool)
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
        budget_bytes=round(budget * 1e9) if (budget := project.budget_gb(name)) else None,
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


def _root(project: Project, base: str, lock: Lock | None, name: str, tool: str) -> list[Action]:
    """The layers of a base: those of its image as they are, over them its packages."""
    about, where = project.versions.bases[base], project.base_place(base)
    layers = [
        Action(
            name=f"base {layer.name}",
            kind="image",
            inputs=(Input(name=layer.name, value=f"sha256:{layer.sha256}", where=where),),
            files=(layer,),
        )
        for layer in _need(lock, name).of("layer", base)
    ]
    if about.image and not layers:
        raise InputError(f"the lock of {name} has no layers for base {base}", hint=f"primus lock {name}")
    return [*layers, *([_base(project, base, lock, name, tool)] if about.packages else [])]


def _base(project: Project, base: str, lock: Lock | None, name: str, tool: str) -> Action:
    debs = _need(lock, name).of("deb", base)
    if not debs:
        raise InputError(f"the lock of {name} has no packages for base {base}", hint=f"primus lock {name}")
    where, about = project.base_place(base), project.versions.bases[base]
    kernels = {"arch": about.arch, "kernels": list(kernels_of_others(about.arch))} if about.arch else {}
    return Action(
        name=f"base {base}",
        kind="debs",
        inputs=(
            Input(name="assembler", value=tool),
            Input(name="suite", value=about.suite, where=where),
            *(Input(name=f.name, value=f"{f.version} sha256:{f.sha256}", where=where) for f in debs),
        ),
        spec={"suite": about.suite, "trim": list(TRIM), **kernels, **({"over": about.image} if about.image else {})},
        files=debs,
    )


def _components(
    project: Project,
    name: str,
    pins: Mapping[str, Pin],
    lock: Lock | None,
    prefix: Prefix | None,
    root: tuple[Action, ...],
    tool: str,
) -> list[Action]:
    wheels = {f.name: f for f in lock.of("wheel")} if lock else {}
    pinned = {normalised(pin.wheel) for pin in pins.values() if pin.wheel}
    closure = _closure(project, name, [f for f in wheels.values() if f.name not in pinned], root, prefix, tool)
    made: dict[str, Action] = {}
    layers: list[Action] = []
    for component, pin in pins.items():
        where = project.pin_place(component, pin)
        if pin.deb is not None:
            _check_deb(project, name, pin, lock, where)
            continue
        if pin.path is not None:
            layers.append(_tree(project, component, pin, where, prefix, tool))
            continue
        if prefix is None:
            raise InputError(f"{component} is a Python package, and target {name} has no base to hold it", where=where)
        if pin.wheel is not None:
            wheel = _locked(wheels, pin, name, where)
            layers.append(_wheels(project, component, (wheel,), where, root, prefix, tool))
        else:
            tools = _tools(project, name, pin, made, lock, root, prefix, tool)
            built = _build(project, name, pin, lock, where, tool, tools, closure)
            layers.append(_wheels(project, component, (), where, root, prefix, tool, built))
        made[component] = layers[-1]
    # Local trees change most often: they lie on top of what rarely does.
    local = [a for a in layers if a.kind == "files"]
    return [*closure, *(a for a in layers if a.kind != "files"), *local]


def _locked(wheels: Mapping[str, LockedFile], pin: Pin, name: str, where: str) -> LockedFile:
    wheel = wheels.get(normalised(pin.wheel or ""))
    if wheel is None or wheel.version != pin.version:
        locked = f"has {wheel.version}" if wheel else "has none"
        raise InputError(f"{pin.text} is pinned, the lock of {name} {locked}", where=where, hint=f"primus lock {name}")
    return wheel


def _closure(
    project: Project,
    name: str,
    wheels: Sequence[LockedFile],
    root: tuple[Action, ...],
    prefix: Prefix | None,
    tool: str,
) -> list[Action]:
    """The layers of what pinned wheels need: a large one has its own."""
    if prefix is None:
        return []
    where = str(project.lock_path(name).relative_to(project.root))
    large = [f for f in wheels if f.size >= _OWN_LAYER]
    small = tuple(f for f in wheels if f.size < _OWN_LAYER)
    layers = [_wheels(project, f"python-{f.name}", (f,), where, root, prefix, tool) for f in large]
    return [*layers, *([_wheels(project, "python", small, where, root, prefix, tool)] if small else [])]


def _tools(
    project: Project,
    name: str,
    pin: Pin,
    made: Mapping[str, Action],
    lock: Lock | None,
    root: tuple[Action, ...],
    prefix: Prefix,
    tool: str,
) -> tuple[Action, ...]:
    """The layers of the components that are there while ``pin`` is built; InputError for one that comes after it."""
    locked = {f.name: f for f in _need(lock, name).of("tool")}
    extra = project.tools(name)
    layers = []
    for component in pin.tools:
        if component in extra:
            one = extra[component]
            where = project.pin_place(component, one)
            wheel = _locked(locked, one, name, where)
            layers.append(_wheels(project, f"tool {component}", (wheel,), where, root, prefix, tool))
        elif component in made:
            layers.append(made[component])
        else:
            raise InputError(
                f"{pin.text} is built with {component}, which {name} does not list before it",
                where=project.target_place(name, "components"),
                hint=f"list {component} first; it must be a Python package",
            )
    return tuple(layers)


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
    root: tuple[Action, ...],
    prefix: Prefix,
    tool: str,
    built: Action | None = None,
) -> Action:
    # Bytecode is compiled by the image's own interpreter: its packages, not the whole base, are an input.
    base = tuple(a for a in root if a.kind in ("image", "debs"))
    python = [i for a in base for i in a.inputs if "python3" in i.name]
    return Action(
        name=name,
        kind="wheels",
        inputs=(
            Input(name="assembler", value=tool),
            *(Input(name=f.name, value=f"{f.version} sha256:{f.sha256}", where=where) for f in files),
            *python,
            Input(name="bytecode", value="sha256:" + project.stats.sha256(str(_BYTECODE))),
        ),
        spec={"prefix": prefix.root, "python": prefix.python, "built": built.key if built else None},
        needs=(built,) if built else (),
        files=files,
        tools=base,
    )


def _build(
    project: Project,
    name: str,
    pin: Pin,
    lock: Lock | None,
    where: str,
    tool: str,
    tools: tuple[Action, ...],
    closure: Sequence[Action],
) -> Action:
    package = normalised(pin.source or "")
    source = next((f for f in _need(lock, name).of("git" if pin.git else "sdist") if f.name == package), None)
    if source is None or source.version != pin.version or (pin.commit or "") not in source.file:
        raise InputError(f"{pin.text} is pinned, the lock of {name} has not got it", where=where, hint="primus lock")
    variables = dict(pin.environment)
    if pin.git:
        # An archive has no history, from which setuptools-scm would tell the version.
        variables.setdefault("SETUPTOOLS_SCM_PRETEND_VERSION", pin.version or "")
    python = "/usr/bin/python3"
    if tools:
        about = Prefix(python=".".join(project.versions.bases[pin.builder or ""].python.split(".")[:2]))
        tools = (_inline("environment", environment(about), tool), *tools)
        python = about.interpreter
        variables["PATH"] = f"/{about.root}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return Action(
        name=f"build {package}",
        kind="build",
        inputs=(
            Input(name=package, value=f"{source.version} sha256:{source.sha256}", where=where),
            *(Input(name=variable, value=text, where=where) for variable, text in variables.items()),
        ),
        spec={
            "package": package,
            "script": WHEEL_SCRIPT,
            "environment": {**variables, "PYTHON": python, "PREPARE": pin.prepare or ""},
        },
        needs=(*_root(project, pin.builder or "", lock, name, tool), *tools),
        # What the tools need to start is there too; it leaves no trace in what they make.
        tools=tuple(closure) if tools else (),
        files=(source,),
    )
