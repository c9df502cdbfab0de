"""Pins, lock and local files → the actions of an image. Pure, except that local files are hashed (by stat)."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import zstandard

from primus.errors import InputError
from primus.gpucode.bundles import FORMAT
from primus.oci.canonical import key_of
from primus.oci.layer import assembler
from primus.plan.action import Action, ImagePlan, Input
from primus.plan.resolve import ResolvedTarget, with_lock
from primus.plan.skeleton import (
    BYTECODE,
    CONSTRAINTS,
    ORDER,
    TRIM,
    VARIANT,
    WHEEL_SCRIPT,
    Inline,
    Prefix,
    console_script,
    constraints,
    distribution,
    environment,
    image_config,
    manifest_annotations,
    shell_setup,
    working_folders,
)
from primus.plan.target import build_root, extra_root
from primus.plan.workspace import StatIndex
from primus.versions.components import Base, Build, Pin
from primus.versions.lock import Lock, LockedFile, normalised, upstream

# A wheel of the closure at least this large gets its own layer: small wheels change together, large ones rarely.
_OWN_LAYER = 8_000_000


def plan_image(resolved: ResolvedTarget, stats: StatIndex) -> ImagePlan:
    """Return the plan of one image; ``stats`` hashes local files.

    Raises InputError if the lock lacks a file that the target needs.
    """
    return _Planner(resolved, stats).plan()


def plan_images(
    targets: Sequence[ResolvedTarget],
    stats: StatIndex,
) -> list[ImagePlan]:
    """Return the plans of the targets. Raises InputError for a missing or stale lock."""
    return [plan_image(with_lock(target), stats) for target in targets]


@dataclass(frozen=True)
class _Planner:
    resolved: ResolvedTarget
    stats: StatIndex

    @cached_property
    def tool(self) -> Input:
        return Input(name="assembler", value=assembler())

    @cached_property
    def base_name(self) -> str | None:
        return self.resolved.choice.base

    @cached_property
    def base(self) -> Base:
        return self.resolved.versions.bases[self.base_name or ""]

    @cached_property
    def prefix(self) -> Prefix | None:
        return Prefix(python=".".join(self.base.python.split(".")[:2])) if self.base_name else None

    @cached_property
    def lock(self) -> Lock:
        if self.resolved.lock is None:
            raise InputError(f"{self.resolved.name} has no lock yet", hint=self.resolved.lock_command)
        return self.resolved.lock

    def plan(self) -> ImagePlan:
        constraint_text = constraints(self.resolved)
        layers = self.layers(constraint_text)
        self.check_names(layers)
        return ImagePlan(
            resolved=self.resolved,
            layers=tuple(layers),
            config=image_config(self.resolved, self.prefix, constraint_text),
            annotations=manifest_annotations(self.resolved),
        )

    def layers(self, constraint_text: str) -> list[Action]:
        resolved, layers = self.resolved, list[Action]()
        if self.prefix and self.base_name:
            layers += self.root(self.base_name)
            if self.base.kernels:
                layers.append(self.kernels(self.base_name))
            # The environment sees the base's own Python packages only if one of them is pinned.
            system = any(pin.deb for pin in resolved.pins.values())
            layers.append(self.inline("environment", environment(self.prefix, system)))
        layers += self.components(tuple(a for a in layers if a.kind in ("image", "debs")))
        if self.prefix and self.base_name:
            layers += [self.extra(self.base_name, extra) for extra in resolved.extras]
            entries = {"etc/primus/image.json": {"text": json.dumps(_facts(resolved), indent=1) + "\n"}}
            if constraint_text:
                entries[CONSTRAINTS] = {"text": constraint_text}
            layers.append(self.inline("facts", entries))
        return layers

    def check_names(self, layers: Iterable[Action]) -> None:
        """Raise InputError for a component that is called like a layer of the engine. Gates and records know layers
        by their names, so they would miss one of the two.
        """
        seen: set[str] = set()
        for action in layers:
            if action.name in seen:
                pin = self.resolved.pins.get(action.name)
                owner = f"a layer of {self.resolved.name} has this name"
                where = self.resolved.pin_place(action.name, pin) if pin else None
                raise InputError(
                    f"no component can be called {action.name!r}, because {owner}",
                    where=where,
                    hint="give it another name",
                )
            seen.add(action.name)

    def inline(self, name: str, entries: Inline) -> Action:
        content = Input(name="content", value=key_of(entries))
        return Action(name=name, kind="files", inputs=(self.tool, content), spec={"inline": entries})

    # The root file system

    def root(self, base: str, root: str = "") -> tuple[Action, ...]:
        where = self.resolved.base_place(base)
        layers = tuple(
            Action(
                name=f"base {layer.name}",
                kind="image",
                inputs=(Input(name=layer.name, value=f"sha256:{layer.sha256}", where=where),),
                files=(layer,),
            )
            for layer in self.lock.of("layer", root or base)
        )
        if self.base.image and not layers:
            sentence = f"the lock of {self.resolved.name} has no layers for {root or base}"
            raise InputError(sentence, hint=self.resolved.lock_command)
        if self.base.image and not (self.base.packages or root):
            return layers
        return (*layers, self.packages(base, root))

    def packages(self, base: str, root: str) -> Action:
        debs, where, about = self.lock.of("deb", root or base), self.resolved.base_place(base), self.base
        if not debs:
            sentence = f"the lock of {self.resolved.name} has no packages for {root or base}"
            raise InputError(sentence, hint=self.resolved.lock_command)
        kernels = {"kernels": _patterns(about)} if about.kernels else {}
        over = {"over": about.image} if about.image else {}
        return Action(
            name=f"base {root or base}",
            kind="debs",
            inputs=(
                self.tool,
                Input(name="suite", value=about.suite, where=where),
                # Not part of the spec, which also affects builds in this root: both ways give the same packages.
                *([] if about.image else [Input(name="variant", value=VARIANT)]),
                *_locked(debs, where),
            ),
            spec={"suite": about.suite, "trim": list(TRIM), **kernels, **over},
            files=debs,
        )

    def extra(self, base: str, extra: str) -> Action:
        debs = self.lock.of("deb", extra_root(base, extra))
        if not debs:
            raise InputError(
                f"extra {extra} adds nothing to {self.resolved.name}: base {base} already has its packages",
                where=self.resolved.place("extras", self.resolved.choice.channel),
                hint="leave it out",
            )
        return Action(
            name=f"extra {extra}",
            kind="debs",
            inputs=(self.tool, *_locked(debs, self.resolved.base_place(base, "extras", extra))),
            spec={"suite": self.base.suite, "trim": list(TRIM), "over": base},
            files=debs,
        )

    def kernels(self, base: str) -> Action:
        resolved = self.resolved
        if resolved.arch is None:
            raise InputError(
                f"base {base} has separate kernel files per GPU, but {resolved.name} has no GPU",
                where=resolved.place(),
                hint="set `gpu`",
            )
        debs = tuple(file for file in self.lock.of("deb", base) if file.name in self.base.kernels)
        rewriter = f"fat binary {FORMAT}, zstandard {zstandard.__version__}, zlib {zlib.ZLIB_RUNTIME_VERSION}"
        return Action(
            name=f"kernels {resolved.arch}",
            kind="kernels",
            inputs=(
                self.tool,
                Input(name="fat binaries", value=rewriter),
                *_locked(debs, resolved.base_place(base)),
            ),
            spec={"arch": resolved.arch, "kernels": _patterns(self.base)},
            files=debs,
        )

    # Components

    def components(self, root: tuple[Action, ...]) -> list[Action]:
        resolved, pins = self.resolved, self.resolved.pins
        wheels = {file.name: file for file in resolved.lock.of("wheel")} if resolved.lock else {}
        layers: dict[str, Action] = {}
        # A component built with another built component follows it, whatever their order in the target.
        for component, pin in sorted(pins.items(), key=lambda item: bool(item[1].build and item[1].build.built)):
            where = resolved.pin_place(component, pin)
            if pin.deb is not None:
                self.check_deb(pin, where)
            elif pin.path is not None:
                layers[component] = self.folder(component, pin, where)
            elif self.prefix is None:
                raise InputError(
                    f"{component} is a Python package, but target {resolved.name} has no base for it", where=where
                )
            elif pin.wheel is not None:
                wheel = wheels.pop(normalised(pin.wheel), None)
                if wheel is None or wheel.version != pin.version:
                    locked = f"has {wheel.version}" if wheel else "has none"
                    raise InputError(
                        f"{pin.text} is pinned, but the lock of {resolved.name} {locked}",
                        where=where,
                        hint=resolved.lock_command,
                    )
                layers[component] = self.wheels(component, (wheel,), where, root, self.prefix, without=pin.without)
            else:
                built = self.build(pin, where, root, self.prefix, layers)
                layers[component] = self.wheels(component, (), where, root, self.prefix, built)
        closure = self.closure("python", wheels.values(), root, self.prefix) if self.prefix else []
        ordered = [layers[component] for component in pins if component in layers]
        # Local trees change most often, so they lie on top.
        return [*closure, *sorted(ordered, key=lambda action: action.kind == "files")]

    def closure(
        self, name: str, wheels: Iterable[LockedFile], root: tuple[Action, ...], prefix: Prefix
    ) -> list[Action]:
        wheels, where = tuple(wheels), self.resolved.lock_name
        small = tuple(file for file in wheels if file.size < _OWN_LAYER)
        large = (file for file in wheels if file.size >= _OWN_LAYER)
        layers = [self.wheels(f"python-{file.name}", (file,), where, root, prefix) for file in large]
        return [*layers, self.wheels(name, small, where, root, prefix)] if small else layers

    def check_deb(self, pin: Pin, where: str) -> None:
        base = self.base_name
        version = next((file.version for file in self.lock.of("deb", base) if file.name == pin.deb), None)
        if version is None:
            hint = f"add it under bases.{base}.packages"
            raise InputError(f"base {base} does not contain {pin.deb}", where=where, hint=hint)
        if upstream(version) != pin.version:
            sentence = f"{pin.text} is pinned, but base {base} has {upstream(version)}"
            raise InputError(sentence, where=where, hint=f"pin {upstream(version)}")

    def folder(self, component: str, pin: Pin, where: str) -> Action:
        project = self.resolved.root
        root = project / (pin.path or "")
        # Links above a file are followed; one within a folder is copied as a link.
        followed = {str(pin.path): root} | {f"{pin.path}/{name}": (root / name).parent for name in pin.include}
        for name, path in followed.items():
            if not path.resolve().is_relative_to(project.resolve()):
                raise InputError(
                    f"{component}: {name} is outside of this repository",
                    where=where,
                    hint="copy it into the repository",
                )
        tree = tuple(self.stats.tree(root, pin.include))
        to, site = pin.to or "/", self.prefix.site if self.prefix else ""
        if not site and "{site}" in to:
            sentence = f"{component} is installed with the Python packages, but its target has no base"
            raise InputError(sentence, where=where)
        to = to.replace("{site}", site).strip("/")
        extra = dict(working_folders(to, (path for path, _, _ in tree)))
        if component == "primus":
            extra = {**distribution(to), **console_script(to), **shell_setup(to)}
        # Names of inputs must differ, or the key would lack one of them.
        name = f"./{pin.path}" if pin.path in ("assembler", "to") else pin.path or ""
        return Action(
            name=component,
            kind="files",
            inputs=(
                self.tool,
                Input(name=name, value=f"tree:{key_of(tree)}", where=where),
                Input(name="to", value="/" + to, where=where),
            ),
            spec={"to": to, "inline": extra},
            root=str(root),
            tree=tree,
        )

    def wheels(
        self,
        name: str,
        files: tuple[LockedFile, ...],
        where: str,
        root: tuple[Action, ...],
        prefix: Prefix,
        built: Action | None = None,
        without: Sequence[str] = (),
    ) -> Action:
        # The image's own interpreter compiles the bytecode, so its packages, not the whole base, are an input.
        python = [i for action in root for i in action.inputs if "python3" in i.name]
        return Action(
            name=name,
            kind="wheels",
            inputs=(
                self.tool,
                *_locked(files, where),
                *python,
                Input(name="bytecode", value="sha256:" + self.stats.sha256(str(BYTECODE))),
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

    def build(
        self, pin: Pin, where: str, base: tuple[Action, ...], prefix: Prefix, components: Mapping[str, Action]
    ) -> Action:
        resolved, package, build = self.resolved, normalised(pin.source or ""), pin.build or Build()
        sources = self.lock.of("git" if pin.git else "sdist")
        source = next((file for file in sources if file.name == package), None)
        if source is None or source.version != pin.version or (pin.commit or "") not in source.file:
            raise InputError(
                f"{pin.text} is pinned, but the lock of {resolved.name} has no entry for it",
                where=where,
                hint=resolved.lock_command,
            )
        root, wheels = build_root(package), self.lock.of("wheel", build_root(package))
        system = self.root(self.base_name or "", root) if build.debs else base
        if lacking := [name for name in build.built if name not in components]:
            raise InputError(
                f"{pin.text} is built with {lacking[0]}, which {resolved.name} lacks or builds with other packages",
                where=where,
            )
        built = [components[name] for name in build.built]
        variables = dict(build.environment)
        if pin.git:
            # A source archive has no git history, from which setuptools-scm would derive the version.
            variables.setdefault("SETUPTOOLS_SCM_PRETEND_VERSION", pin.version or "")
        layers: list[Action] = []
        if wheels or built:
            layers.append(self.inline("environment", environment(prefix, system=True)))
            layers += self.closure(f"wheels of {root}", wheels, base, prefix)
        packages = [*(file for action in system for file in action.files), *wheels]
        return Action(
            name=f"build {package}",
            kind="build",
            inputs=(
                Input(name=package, value=f"{source.version} sha256:{source.sha256}", where=where),
                Input(name="sorted folders", value="sha256:" + self.stats.sha256(str(ORDER))),
                *(
                    Input(name=f"{file.kind} {file.name}", value=f"{file.version} sha256:{file.sha256}", where=where)
                    for file in packages
                ),
                *(Input(name=f"environment {k}", value=v, where=where) for k, v in variables.items()),
            ),
            spec={
                "package": package,
                "script": WHEEL_SCRIPT,
                "python": prefix.interpreter if layers else f"/usr/bin/python{prefix.python}",
                "environment": {**variables, "PREPARE": build.prepare},
                "root": [action.spec for action in system],
            },
            needs=tuple(needed for action in built for needed in action.needs),
            # The wheels do not depend on how the tools' layers are compressed, so their packages are inputs, not
            # their keys.
            tools=(*system, *layers, *built),
            files=(source,),
        )


def _facts(resolved: ResolvedTarget) -> dict[str, object]:
    components = resolved.versions.components
    pins = {**resolved.pins, **resolved.inside}
    return {
        "release": resolved.versions.release,
        "target": resolved.name,
        "channel": resolved.choice.channel,
        "preview": resolved.choice.preview,
        "components": {components[name].name: pin.version for name, pin in pins.items() if pin.version},
        **({"extras": list(resolved.extras)} if resolved.extras else {}),
    }


def _locked(files: Iterable[LockedFile], where: str) -> Iterator[Input]:
    return (Input(name=file.name, value=f"{file.version} sha256:{file.sha256}", where=where) for file in files)


def _patterns(base: Base) -> dict[str, list[str]]:
    return {package: list(patterns) for package, patterns in base.kernels.items()}
