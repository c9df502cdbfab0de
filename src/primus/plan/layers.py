"""Pins, lock and local files → the actions of an image. Pure, except that local files are hashed (by stat)."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from primus.errors import InputError
from primus.gpucode.fatbinary import FORMAT
from primus.oci.canonical import key_of
from primus.oci.layer import assembler, zstandard_version
from primus.plan.action import Action, ImagePlan, Input, tree_value
from primus.plan.config import image_config, manifest_annotations
from primus.plan.prefix import Prefix
from primus.plan.resolve import ResolvedTarget
from primus.plan.skeleton import (
    CONSTRAINTS,
    console_script,
    constraints,
    distribution,
    environment,
    shell_setup,
    working_folders,
)
from primus.plan.source import BYTECODE, ORDER, WHEEL_SCRIPT
from primus.plan.target import build_root, extra_root
from primus.plan.trim import TRIM, VARIANT
from primus.versions.components import Base, Build, Pin
from primus.versions.lock import Lock, LockedFile
from primus.versions.names import normalised
from primus.versions.suites import upstream

if TYPE_CHECKING:
    from primus.plan.stats import StatIndex

# A wheel of the closure at least this large gets its own layer: small wheels change together, large ones rarely.
_OWN_LAYER = 8_000_000


def plan_image(resolved: ResolvedTarget, stats: StatIndex) -> ImagePlan:
    """Return the plan of one image; ``stats`` hashes local files.

    Raises InputError if the lock lacks a file that the target needs.
    """
    base = resolved.choice.base
    prefix = Prefix(python=".".join(resolved.versions.bases[base].python.split(".")[:2])) if base else None
    held = constraints(resolved)
    layers = _layers(resolved, stats, prefix, held)
    _check_names(resolved, layers)
    return ImagePlan(
        resolved=resolved,
        layers=tuple(layers),
        config=image_config(resolved, prefix, held),
        annotations=manifest_annotations(resolved),
    )


def _layers(resolved: ResolvedTarget, stats: StatIndex, prefix: Prefix | None, held: str) -> list[Action]:
    """Return the layers, lowest first. ``held`` is the text of the constraints for pip."""
    target, base = resolved.target, resolved.choice.base
    tool = assembler(target.compression)
    layers: list[Action] = []
    if prefix and base:
        layers += _root(resolved, base, tool)
        if resolved.versions.bases[base].kernels:
            layers.append(_kernels(resolved, base, tool))
        # The environment sees the base's own Python packages only if one of them is pinned.
        layers.append(_inline("environment", environment(prefix, any(p.deb for p in resolved.pins.values())), tool))
    root = tuple(a for a in layers if a.kind in ("image", "debs"))
    layers += _components(resolved, stats, prefix, root, tool)
    layers += [_extra(resolved, base, extra, tool) for extra in resolved.extras if base]
    if prefix:
        entries = {"etc/primus/image.json": {"text": json.dumps(_facts(resolved), indent=1) + "\n"}}
        if held:
            entries[CONSTRAINTS] = {"text": held}
        layers.append(_inline("facts", entries, tool))
    return layers


def _facts(resolved: ResolvedTarget) -> dict[str, object]:
    """Return what the image says of itself in ``/etc/primus/image.json``."""
    components = resolved.versions.components
    every = {**resolved.pins, **resolved.inside}
    return {
        "release": resolved.versions.release,
        "target": resolved.name,
        "channel": resolved.choice.channel,
        "preview": resolved.choice.preview,
        "components": {components[name].name: pin.version for name, pin in every.items() if pin.version},
        **({"extras": list(resolved.extras)} if resolved.extras else {}),
    }


def _check_names(resolved: ResolvedTarget, layers: Iterable[Action]) -> None:
    """Raise InputError for a component that is called like a layer of the engine. Gates and records know layers by
    their names, so they would miss one of the two.
    """
    seen: set[str] = set()
    for action in layers:
        if action.name in seen:
            pin = resolved.pins.get(action.name)
            raise InputError(
                f"no component can be called {action.name!r}, because a layer of {resolved.name} has this name",
                where=resolved.pin_place(action.name, pin) if pin else None,
                hint="give it another name",
            )
        seen.add(action.name)


def _need(resolved: ResolvedTarget) -> Lock:
    if resolved.lock is None:
        raise InputError(f"{resolved.name} has no lock yet", hint=resolved.lock_command)
    return resolved.lock


def _inline(name: str, entries: Mapping[str, Mapping[str, object]], tool: str) -> Action:
    return Action(
        name=name,
        kind="files",
        inputs=(Input(name="assembler", value=tool), Input(name="content", value=key_of(entries))),
        spec={"inline": entries},
    )


def _root(resolved: ResolvedTarget, base: str, tool: str, root: str = "") -> tuple[Action, ...]:
    """Return the layers of ``base``, or of the build's ``root``: those of its image unchanged, with its packages on
    top.
    """
    name, about, where = resolved.name, resolved.versions.bases[base], resolved.base_place(base)
    layers = tuple(
        Action(
            name=f"base {layer.name}",
            kind="image",
            inputs=(Input(name=layer.name, value=f"sha256:{layer.sha256}", where=where),),
            files=(layer,),
        )
        for layer in _need(resolved).of("layer", root or base)
    )
    if about.image and not layers:
        raise InputError(f"the lock of {name} has no layers for {root or base}", hint=resolved.lock_command)
    if about.image and not (about.packages or root):
        return layers
    return (*layers, _base(resolved, base, tool, root))


def _base(resolved: ResolvedTarget, base: str, tool: str, root: str = "") -> Action:
    """Return the root file system of ``base``, or of the build's ``root``, which contains more packages."""
    debs = _need(resolved).of("deb", root or base)
    if not debs:
        name = resolved.name
        raise InputError(f"the lock of {name} has no packages for {root or base}", hint=resolved.lock_command)
    where, about = resolved.base_place(base), resolved.versions.bases[base]
    kernels = {"kernels": _patterns(about)} if about.kernels else {}
    over = {"over": about.image} if about.image else {}
    return Action(
        name=f"base {root or base}",
        kind="debs",
        inputs=(
            Input(name="assembler", value=tool),
            Input(name="suite", value=about.suite, where=where),
            # Not part of the spec, which also affects builds in this root: both ways give the same packages.
            *([] if about.image else [Input(name="variant", value=VARIANT)]),
            *_locked(debs, where),
        ),
        spec={"suite": about.suite, "trim": list(TRIM), **kernels, **over},
        files=debs,
    )


def _locked(files: Iterable[LockedFile], where: str) -> Iterator[Input]:
    """Return one input per locked file. Its value is the version and the digest."""
    return (Input(name=f.name, value=f"{f.version} sha256:{f.sha256}", where=where) for f in files)


def _extra(resolved: ResolvedTarget, base: str, extra: str, tool: str) -> Action:
    """Return the packages of an extra, unpacked on top of the base."""
    debs, where = _need(resolved).of("deb", extra_root(base, extra)), resolved.base_place(base, "extras", extra)
    if not debs:
        raise InputError(
            f"extra {extra} adds nothing to {resolved.name}: base {base} already has its packages",
            where=resolved.place("extras", resolved.choice.channel),
            hint="leave it out",
        )
    return Action(
        name=f"extra {extra}",
        kind="debs",
        inputs=(
            Input(name="assembler", value=tool),
            *_locked(debs, where),
        ),
        spec={"suite": resolved.versions.bases[base].suite, "trim": list(TRIM), "over": base},
        files=debs,
    )


def _kernels(resolved: ResolvedTarget, base: str, tool: str) -> Action:
    """Return the layer with the base's GPU code for the target's architecture: separate files, and libraries
    reduced to it.
    """
    where, kernels, arch = resolved.base_place(base), resolved.versions.bases[base].kernels, resolved.arch
    if arch is None:
        raise InputError(
            f"base {base} has separate kernel files per GPU, but {resolved.name} has no GPU",
            where=resolved.place(),
            hint="set `gpu`",
        )
    debs = tuple(f for f in _need(resolved).of("deb", base) if f.name in kernels)
    return Action(
        name=f"kernels {arch}",
        kind="kernels",
        inputs=(
            Input(name="assembler", value=tool),
            Input(name="fat binaries", value=_rewriter()),
            *_locked(debs, where),
        ),
        spec={"arch": arch, "kernels": _patterns(resolved.versions.bases[base])},
        files=debs,
    )


def _rewriter() -> str:
    """Return what rewrites libraries for one GPU architecture: our format and the compressors."""
    return f"fat binary {FORMAT}, zstandard {zstandard_version()}, zlib {zlib.ZLIB_RUNTIME_VERSION}"


def _patterns(base: Base) -> dict[str, list[str]]:
    return {package: list(patterns) for package, patterns in base.kernels.items()}


def _components(
    resolved: ResolvedTarget, stats: StatIndex, prefix: Prefix | None, root: tuple[Action, ...], tool: str
) -> list[Action]:
    name, lock, pins = resolved.name, resolved.lock, resolved.pins
    wheels = {f.name: f for f in lock.of("wheel")} if lock else {}
    made: dict[str, Action] = {}
    # A component built with another built component follows it, whatever their order in the target.
    for component, pin in sorted(pins.items(), key=lambda item: bool(item[1].build and item[1].build.built)):
        where = resolved.pin_place(component, pin)
        if pin.deb is not None:
            _check_deb(resolved, pin, where)
            continue
        if pin.path is not None:
            made[component] = _tree(resolved.root, stats, component, pin, where, prefix, tool)
            continue
        if prefix is None:
            raise InputError(f"{component} is a Python package, but target {name} has no base for it", where=where)
        if pin.wheel is not None:
            wheel = wheels.pop(normalised(pin.wheel), None)
            if wheel is None or wheel.version != pin.version:
                locked = f"has {wheel.version}" if wheel else "has none"
                raise InputError(
                    f"{pin.text} is pinned, but the lock of {name} {locked}", where=where, hint=resolved.lock_command
                )
            made[component] = _wheels(stats, component, (wheel,), where, root, prefix, tool, without=pin.without)
        else:
            built = _build(resolved, stats, pin, where, root, prefix, tool, made)
            made[component] = _wheels(stats, component, (), where, root, prefix, tool, built)
    closure = _closure(stats, "python", wheels.values(), resolved.lock_name, root, prefix, tool) if prefix else []
    layers = [made[component] for component in pins if component in made]
    # Local trees change most often, so they lie on top.
    local = [a for a in layers if a.kind == "files"]
    return [*closure, *(a for a in layers if a.kind != "files"), *local]


def _closure(
    stats: StatIndex,
    name: str,
    wheels: Iterable[LockedFile],
    where: str,
    root: tuple[Action, ...],
    prefix: Prefix,
    tool: str,
) -> list[Action]:
    """Return layers for wheels that no pin names: one for each large wheel, one for all small ones."""
    wheels = tuple(wheels)
    small = tuple(f for f in wheels if f.size < _OWN_LAYER)
    layers = [
        _wheels(stats, f"python-{f.name}", (f,), where, root, prefix, tool) for f in wheels if f.size >= _OWN_LAYER
    ]
    return [*layers, _wheels(stats, name, small, where, root, prefix, tool)] if small else layers


def _check_deb(resolved: ResolvedTarget, pin: Pin, where: str) -> None:
    """Raise InputError unless the base contains the package in the pinned version."""
    base = resolved.choice.base
    version = next((f.version for f in _need(resolved).of("deb", base) if f.name == pin.deb), None)
    if version is None:
        raise InputError(
            f"base {base} does not contain {pin.deb}", where=where, hint=f"add it under bases.{base}.packages"
        )
    if upstream(version) != pin.version:
        raise InputError(
            f"{pin.text} is pinned, but base {base} has {upstream(version)}",
            where=where,
            hint=f"pin {upstream(version)}",
        )


def _tree(
    folder: Path, stats: StatIndex, component: str, pin: Pin, where: str, prefix: Prefix | None, tool: str
) -> Action:
    root = folder / (pin.path or "")
    # Links above a file are followed; one within a folder is copied as a link.
    followed = {str(pin.path): root} | {f"{pin.path}/{name}": (root / name).parent for name in pin.include}
    for name, path in followed.items():
        if not pin.outside and not path.resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"{component}: {name} is outside of this repository",
                where=where,
                hint="if this is intended, set `outside: true` for the pin",
            )
    tree = tuple(stats.tree(root, pin.include))
    if prefix is None and "{site}" in (pin.to or ""):
        raise InputError(f"{component} is installed with the Python packages, but its target has no base", where=where)
    to = (pin.to or "/").replace("{site}", prefix.site if prefix else "").strip("/")
    extra = dict(working_folders(to, (path for path, _, _ in tree)))
    if component == "primus":
        extra = {**distribution(to), **console_script(to), **shell_setup(to)}
    return Action(
        name=component,
        kind="files",
        inputs=(
            Input(name="assembler", value=tool),
            Input(name=_apart(pin.path or ""), value=tree_value(tree), where=where),
            Input(name="to", value="/" + to, where=where),
        ),
        spec={"to": to, "inline": extra},
        root=str(root),
        tree=tree,
    )


def _apart(path: str) -> str:
    """Return the input's name for a folder. Names of inputs must differ, or the key would lack one of them."""
    return f"./{path}" if path in ("assembler", "to") else path


def _wheels(
    stats: StatIndex,
    name: str,
    files: tuple[LockedFile, ...],
    where: str,
    root: tuple[Action, ...],
    prefix: Prefix,
    tool: str,
    built: Action | None = None,
    without: tuple[str, ...] = (),
) -> Action:
    # The image's own interpreter compiles the bytecode, so its packages, not the whole base, are an input.
    python = [i for a in root for i in a.inputs if "python3" in i.name]
    return Action(
        name=name,
        kind="wheels",
        inputs=(
            Input(name="assembler", value=tool),
            *_locked(files, where),
            *python,
            Input(name="bytecode", value="sha256:" + stats.sha256(str(BYTECODE))),
        ),
        spec={
            "prefix": prefix.root,
            "python": prefix.python,
            "built": built.key if built else None,
            **({"without": list(without)} if without else {}),
        },
        needs=(built,) if built else (),
        files=files,
        tools=root,
    )


def _build(
    resolved: ResolvedTarget,
    stats: StatIndex,
    pin: Pin,
    where: str,
    base: tuple[Action, ...],
    prefix: Prefix,
    tool: str,
    made: Mapping[str, Action],
) -> Action:
    package, build = normalised(pin.source or ""), pin.build or Build()
    name, lock = resolved.name, _need(resolved)
    source = next((f for f in lock.of("git" if pin.git else "sdist") if f.name == package), None)
    if source is None or source.version != pin.version or (pin.commit or "") not in source.file:
        raise InputError(
            f"{pin.text} is pinned, but the lock of {name} has no entry for it", where=where, hint=resolved.lock_command
        )
    root, wheels = build_root(package), lock.of("wheel", build_root(package))
    own = _root(resolved, resolved.choice.base or "", tool, root) if build.debs else base
    if lacking := [one for one in build.built if one not in made]:
        raise InputError(
            f"{pin.text} is built with {lacking[0]}, which {name} lacks or builds with other packages",
            where=where,
        )
    built = [made[one] for one in build.built]
    variables = dict(build.environment)
    if pin.git:
        # A source archive has no git history, from which setuptools-scm would derive the version.
        variables.setdefault("SETUPTOOLS_SCM_PRETEND_VERSION", pin.version or "")
    layers: list[Action] = []
    if wheels or built:
        layers = [
            _inline("environment", environment(prefix, system=True), tool),
            *_closure(stats, f"wheels of {root}", wheels, resolved.lock_name, base, prefix, tool),
        ]
    return Action(
        name=f"build {package}",
        kind="build",
        inputs=(
            Input(name=package, value=f"{source.version} sha256:{source.sha256}", where=where),
            Input(name="sorted folders", value="sha256:" + stats.sha256(str(ORDER))),
            *(
                Input(name=f"{f.kind} {f.name}", value=f"{f.version} sha256:{f.sha256}", where=where)
                for f in [*(f for a in own for f in a.files), *wheels]
            ),
            *(Input(name=f"environment {k}", value=v, where=where) for k, v in variables.items()),
        ),
        spec={
            "package": package,
            "script": WHEEL_SCRIPT,
            "python": prefix.interpreter if layers else f"/usr/bin/python{prefix.python}",
            "environment": {**variables, "PREPARE": build.prepare},
            "root": [a.spec for a in own],
        },
        needs=tuple(n for a in built for n in a.needs),
        # The wheels do not depend on how the tools' layers are compressed, so their packages are inputs, not their
        # keys.
        tools=(*own, *layers, *built),
        files=(source,),
        job_bytes=round(build.job_gb * 1e9),
    )
