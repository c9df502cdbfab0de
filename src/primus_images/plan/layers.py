"""Pins, lock and local files → the actions of an image.

Pure, except that local files are hashed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import zstandard

from primus_images.errors import InputError
from primus_images.gpucode import FORMAT
from primus_images.oci.layer import assembler
from primus_images.oci.store import key_of
from primus_images.plan import skeleton
from primus_images.plan.action import Action, ImagePlan, Input
from primus_images.plan.request import build_root, extra_root
from primus_images.plan.resolve import ResolvedTarget, with_lock
from primus_images.plan.stats import StatIndex
from primus_images.versions.components import Base, Build, Pin
from primus_images.versions.lock import Lock, LockedFile, normalised, upstream

# A wheel of the closure at least this large gets its own layer: small wheels change together, large
# ones rarely.
_OWN_LAYER = 8_000_000


def plan_image(resolved: ResolvedTarget, stats: StatIndex) -> ImagePlan:
    """Return the plan of one image, whose lock is not stale; ``stats`` hashes local files."""
    planner = _Planner(resolved, stats)
    constraints = skeleton.constraints(resolved)
    prefix = planner.prefix if planner.base_name else None
    return ImagePlan(
        resolved=resolved,
        layers=tuple(planner.layers(constraints)),
        config=skeleton.image_config(resolved, prefix, constraints),
        annotations=skeleton.manifest_annotations(resolved),
    )


def plan_images(targets: Sequence[ResolvedTarget], stats: StatIndex) -> list[ImagePlan]:
    """Return the plans of the targets. Raises InputError for a missing or stale lock."""
    return [plan_image(with_lock(target), stats) for target in targets]


class _Planner:
    """The actions of one image. Only a target with a base has ``base``, ``prefix`` and ``root``."""

    def __init__(self, resolved: ResolvedTarget, stats: StatIndex) -> None:
        self.resolved = resolved
        self.stats = stats
        self.tool = Input(name="assembler", value=assembler())
        channel = resolved.choice.channel
        nothing = Lock(target=resolved.name, channel=channel, pins={}, files=())
        self.lock = resolved.lock or nothing
        self.base_name = resolved.choice.base or ""
        if self.base_name:
            self.base = resolved.versions.bases[self.base_name]
            self.prefix = skeleton.Prefix(python=self.base.python_minor)
            self.root = self.root_called(self.base_name)

    def layers(self, constraints: str) -> list[Action]:
        if self.base_name:
            layers = self.layers_over_base(constraints)
        else:
            layers = self.components()
        # Gates and records know layers by their names, so they would miss one of two.
        names = [action.name for action in layers]
        for component, pin in self.resolved.pins.items():
            if names.count(component) > 1:
                raise InputError(
                    f"no component can be called {component!r}, because a layer of "
                    f"{self.resolved.name} has this name",
                    where=self.resolved.pin_place(component, pin),
                    hint="give it another name",
                )
        return layers

    def layers_over_base(self, constraints: str) -> list[Action]:
        resolved = self.resolved
        layers = list(self.root)
        if self.base.kernels:
            layers.append(self.kernels())
        # The environment sees the base's own Python packages only if one of them is pinned.
        system = any(pin.deb for pin in resolved.pins.values())
        layers.append(self.inline("environment", skeleton.environment(self.prefix, system)))
        layers += self.components()
        layers += [self.extra(extra) for extra in resolved.extras]
        facts = {"etc/primus/image.json": {"text": json.dumps(_facts(resolved), indent=1) + "\n"}}
        if constraints:
            facts[skeleton.CONSTRAINTS] = {"text": constraints}
        return [*layers, self.inline("facts", facts)]

    def inline(self, name: str, entries: skeleton.Inline) -> Action:
        content = Input(name="content", value=key_of(entries))
        return Action(
            name=name, kind="files", inputs=(self.tool, content), spec={"inline": entries}
        )

    def root_called(self, root: str) -> tuple[Action, ...]:
        """Return the layers of the base, or of ``root``, a build's base with more packages."""
        where = self.resolved.base_place(self.base_name)
        layers = []
        for file in self.lock.of("layer", root):
            digest = Input(name=file.name, value=f"sha256:{file.sha256}", where=where)
            layers.append(
                Action(name=f"base {file.name}", kind="image", inputs=(digest,), files=(file,))
            )
        if self.base.packages or root != self.base_name or not layers:
            layers.append(self.packages(root, where))
        return tuple(layers)

    def packages(self, root: str, where: str) -> Action:
        base = self.base
        inputs = [Input(name="suite", value=base.suite, where=where)]
        spec: dict[str, object] = {}
        if base.kernels:
            spec["kernels"] = _patterns(base)
        if base.image:
            spec["over"] = base.image
        else:
            # Not part of the spec, which also affects builds in this root: both ways give the same
            # packages.
            inputs.append(Input(name="variant", value=skeleton.VARIANT))
        return self.debs(f"base {root}", self.lock.of("deb", root), inputs, where, spec)

    def debs(
        self,
        name: str,
        debs: tuple[LockedFile, ...],
        inputs: Sequence[Input],
        where: str,
        spec: Mapping[str, object],
    ) -> Action:
        trim = list(chain(*skeleton.TRIM.values()))
        return Action(
            name=name,
            kind="debs",
            inputs=(self.tool, *inputs, *_locked(debs, where)),
            spec={"suite": self.base.suite, "trim": trim, **spec},
            files=debs,
        )

    def extra(self, extra: str) -> Action:
        base = self.base_name
        debs = self.lock.of("deb", extra_root(base, extra))
        if not debs:
            raise InputError(
                f"extra {extra} adds nothing to {self.resolved.name}: base {base} already has "
                "its packages",
                where=self.resolved.place("extras", self.resolved.choice.channel),
                hint="leave it out",
            )
        where = self.resolved.base_place(base, "extras", extra)
        return self.debs(f"extra {extra}", debs, (), where, {"over": base})

    def kernels(self) -> Action:
        resolved = self.resolved
        if resolved.arch is None:
            raise InputError(
                f"base {self.base_name} has separate kernel files per GPU, but {resolved.name} "
                "has no GPU",
                where=resolved.place(),
                hint="set `gpu`",
            )
        debs = self.lock.of("deb", self.base_name)
        debs = tuple(file for file in debs if file.name in self.base.kernels)
        rewriter = f"fat binary {FORMAT}, zstandard {zstandard.__version__}"
        locked = _locked(debs, resolved.base_place(self.base_name))
        return Action(
            name=f"kernels {resolved.arch}",
            kind="kernels",
            inputs=(self.tool, Input(name="fat binaries", value=rewriter), *locked),
            spec={"arch": resolved.arch, "kernels": _patterns(self.base)},
            files=debs,
        )

    def components(self) -> list[Action]:
        pins = self.resolved.pins
        wheels = {file.name: file for file in self.lock.of("wheel")}
        layers: dict[str, Action] = {}
        # A component built with another built component follows it, whatever their order in the
        # target.
        for component in sorted(pins, key=lambda name: _is_built_with_another(pins[name])):
            pin = pins[component]
            where = self.resolved.pin_place(component, pin)
            if pin.deb is not None:
                self.check_deb(pin, where)
            elif pin.path is not None:
                layers[component] = self.folder(component, pin, where)
            elif not self.base_name:
                raise InputError(
                    f"{component} is a Python package, but target {self.resolved.name} has no "
                    "base for it",
                    where=where,
                )
            elif pin.wheel is not None:
                wheel = wheels.pop(normalised(pin.wheel))
                layers[component] = self.wheels(component, (wheel,), where, without=pin.without)
            else:
                build = self.build(pin, where, layers)
                layers[component] = self.wheels(component, (), where, built=build)
        closure = self.closure("python", wheels.values()) if self.base_name else []
        ordered = [layers[component] for component in pins if component in layers]
        # Local trees change most often, so they lie on top.
        return [*closure, *sorted(ordered, key=lambda action: action.kind == "files")]

    def closure(self, name: str, wheels: Iterable[LockedFile]) -> list[Action]:
        where = self.resolved.lock_name
        layers = []
        small = []
        for wheel in wheels:
            if wheel.size < _OWN_LAYER:
                small.append(wheel)
            else:
                layers.append(self.wheels(f"python-{wheel.name}", (wheel,), where))
        if small:
            layers.append(self.wheels(name, tuple(small), where))
        return layers

    def check_deb(self, pin: Pin, where: str) -> None:
        base = self.base_name
        versions = {file.name: upstream(file.version) for file in self.lock.of("deb", base)}
        version = versions.get(pin.deb or "")
        if version is None:
            raise InputError(
                f"base {base} does not contain {pin.deb}",
                where=where,
                hint=f"add it under bases.{base}.packages",
            )
        if version != pin.version:
            raise InputError(
                f"{pin.text} is pinned, but base {base} has {version}",
                where=where,
                hint=f"pin {version}",
            )

    def _require_inside(self, component: str, pin: Pin, where: str) -> None:
        """Raise InputError if a folder of the pin lies outside of the repository.

        Links above a file are followed; one within a folder is copied as a link.
        """
        project = self.resolved.root.resolve()
        root = self.resolved.root / str(pin.path)
        folders = {str(pin.path): root}
        for name in pin.include:
            folders[f"{pin.path}/{name}"] = (root / name).parent
        for name, folder in folders.items():
            if not folder.resolve().is_relative_to(project):
                raise InputError(
                    f"{component}: {name} is outside of this repository",
                    where=where,
                    hint="copy it into the repository",
                )

    def folder(self, component: str, pin: Pin, where: str) -> Action:
        path = str(pin.path)
        root = self.resolved.root / path
        self._require_inside(component, pin, where)
        tree = tuple(self.stats.tree(root, pin.include))
        to = pin.to or "/"
        if "{site}" in to:
            if not self.base_name:
                raise InputError(
                    f"{component} is installed with the Python packages, but its target has no "
                    "base",
                    where=where,
                )
            to = to.replace("{site}", self.prefix.site)
        to = to.strip("/")
        if component == "primus":
            inline = skeleton.own_command(to)
        else:
            inline = skeleton.working_folders(to, [name for name, _, _ in tree])
        # Names of inputs must differ, or the key would lack one of them.
        name = f"./{path}" if path in ("assembler", "to") else path
        content = Input(name=name, value=f"tree:{key_of(tree)}", where=where)
        place = Input(name="to", value="/" + to, where=where)
        return Action(
            name=component,
            kind="files",
            inputs=(self.tool, content, place),
            spec={"to": to, "inline": dict(inline)},
            root=str(root),
            tree=tree,
        )

    def wheels(
        self,
        name: str,
        files: tuple[LockedFile, ...],
        where: str,
        *,
        built: Action | None = None,
        without: Sequence[str] = (),
    ) -> Action:
        spec: dict[str, object] = {
            "prefix": self.prefix.root,
            "python": self.prefix.python,
            "built": built.key if built else None,
        }
        if without:
            spec["without"] = list(without)
        # The image's own interpreter compiles the bytecode, so its packages, not the whole base,
        # are an input.
        base_inputs = chain.from_iterable(action.inputs for action in self.root)
        python = [entry for entry in base_inputs if "python3" in entry.name]
        bytecode = Input(name="bytecode", value=self.stats.digest(skeleton.BYTECODE))
        return Action(
            name=name,
            kind="wheels",
            inputs=(self.tool, *_locked(files, where), *python, bytecode),
            spec=spec,
            needs=(built,) if built else (),
            files=files,
            tools=self.root,
        )

    def build(self, pin: Pin, where: str, components: Mapping[str, Action]) -> Action:
        """Return the action that builds the pin's source; ``components`` are built before it."""
        package = normalised(pin.source or "")
        build = pin.build or Build()
        sources = {file.name: file for file in self.lock.of("git" if pin.git else "sdist")}
        source = sources[package]
        root = build_root(package)
        system = self.root_called(root) if build.debs else self.root
        built = self.built(pin, build, where, components)
        wheels = self.lock.of("wheel", root)
        layers: list[Action] = []
        python = f"/usr/bin/python{self.prefix.python}"
        if wheels or built:
            python = self.prefix.interpreter
            environment = skeleton.environment(self.prefix, system=True)
            layers = [self.inline("environment", environment)]
            layers += self.closure(f"wheels of {root}", wheels)
        variables = dict(build.environment)
        if pin.git:
            # A source archive has no git history, from which setuptools-scm would derive the
            # version.
            variables.setdefault("SETUPTOOLS_SCM_PRETEND_VERSION", pin.version or "")
        inputs = _locked([source], where)
        order = self.stats.digest(skeleton.ORDER)
        inputs.append(Input(name="sorted folders", value=order))
        # The wheel does not depend on how the tools' layers are compressed, so their packages are
        # inputs, not their keys.
        packages = [*chain.from_iterable(action.files for action in system), *wheels]
        for file, locked in zip(packages, _locked(packages, where), strict=True):
            inputs.append(locked._replace(name=f"{file.kind} {file.name}"))
        for name, value in variables.items():
            inputs.append(Input(name=f"environment {name}", value=value, where=where))
        return Action(
            name=f"build {package}",
            kind="build",
            inputs=tuple(inputs),
            spec={
                "package": package,
                "script": skeleton.BUILD_WHEEL.read_text(encoding="utf-8"),
                "python": python,
                "environment": {**variables, "PREPARE": build.prepare},
                "root": [action.spec for action in system],
            },
            needs=tuple(chain.from_iterable(action.needs for action in built)),
            tools=(*system, *layers, *built),
            files=(source,),
        )

    def built(
        self, pin: Pin, build: Build, where: str, components: Mapping[str, Action]
    ) -> list[Action]:
        """Return the layers of the components that the build installs."""
        for name in build.built:
            if name not in components:
                raise InputError(
                    f"{pin.text} is built with {name}, which {self.resolved.name} lacks or builds "
                    "with other packages",
                    where=where,
                )
        return [components[name] for name in build.built]


def _is_built_with_another(pin: Pin) -> bool:
    return pin.build is not None and bool(pin.build.built)


def _facts(resolved: ResolvedTarget) -> dict[str, object]:
    components = {}
    for name, pin in resolved.all_pins.items():
        if pin.version:
            components[resolved.versions.components[name].name] = pin.version
    facts: dict[str, object] = {
        "release": resolved.versions.release,
        "target": resolved.name,
        "channel": resolved.choice.channel,
        "preview": resolved.choice.preview,
        "components": components,
    }
    if resolved.versions.supported_until:
        facts["supported_until"] = resolved.versions.supported_until
    if resolved.extras:
        facts["extras"] = list(resolved.extras)
    return facts


def _locked(files: Iterable[LockedFile], where: str) -> list[Input]:
    return [
        Input(name=file.name, value=f"{file.version} sha256:{file.sha256}", where=where)
        for file in files
    ]


def _patterns(base: Base) -> dict[str, list[str]]:
    return {package: list(patterns) for package, patterns in base.kernels.items()}
