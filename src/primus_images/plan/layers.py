"""Pins, lock and local files → the actions of an image. Pure, except that local files are hashed
(by stat).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import cast

import zstandard

from primus_images.errors import InputError
from primus_images.gpucode import FORMAT
from primus_images.oci.layer import assembler
from primus_images.oci.store import key_of
from primus_images.plan import skeleton
from primus_images.plan.action import Action, ImagePlan, Input
from primus_images.plan.resolve import ResolvedTarget, with_lock
from primus_images.plan.stats import StatIndex
from primus_images.plan.target import build_root, extra_root
from primus_images.versions.components import Base, Build, Pin
from primus_images.versions.lock import Lock, LockedFile, normalised, upstream

# A wheel of the closure at least this large gets its own layer: small wheels change together, large
# ones rarely.
_OWN_LAYER = 8_000_000


def plan_image(resolved: ResolvedTarget, stats: StatIndex) -> ImagePlan:
    """Return the plan of one image, whose lock is not stale; ``stats`` hashes local files."""
    planner = _Planner(resolved, stats)
    constraints = skeleton.constraints(resolved)
    return ImagePlan(
        resolved=resolved,
        layers=tuple(planner.layers(constraints)),
        config=skeleton.image_config(
            resolved, planner.prefix if planner.base_name else None, constraints
        ),
        annotations=skeleton.manifest_annotations(resolved),
    )


def plan_images(targets: Sequence[ResolvedTarget], stats: StatIndex) -> list[ImagePlan]:
    """Return the plans of the targets. Raises InputError for a missing or stale lock."""
    return [plan_image(with_lock(target), stats) for target in targets]


class _Planner:
    def __init__(self, resolved: ResolvedTarget, stats: StatIndex) -> None:
        self.resolved, self.stats, self.lock = resolved, stats, cast(Lock, resolved.lock)
        self.tool = Input(name="assembler", value=assembler())
        self.base_name, self.root = resolved.choice.base or "", tuple[Action, ...]()
        if self.base_name:
            self.base = resolved.versions.bases[self.base_name]
            self.prefix = skeleton.Prefix(python=".".join(self.base.python.split(".")[:2]))
            self.root = self.root_called(self.base_name)

    def layers(self, constraints: str) -> list[Action]:
        resolved = self.resolved
        layers = list(self.root)
        if self.base_name:
            if self.base.kernels:
                layers.append(self.kernels())
            # The environment sees the base's own Python packages only if one of them is pinned.
            system = any(pin.deb for pin in resolved.pins.values())
            layers.append(self.inline("environment", skeleton.environment(self.prefix, system)))
        layers += self.components()
        if self.base_name:
            layers += [self.extra(extra) for extra in resolved.extras]
            entries = {
                "etc/primus/image.json": {"text": json.dumps(_facts(resolved), indent=1) + "\n"}
            }
            if constraints:
                entries[skeleton.CONSTRAINTS] = {"text": constraints}
            layers.append(self.inline("facts", entries))
        # Gates and records know layers by their names, so they would miss one of two.
        names = [action.name for action in layers]
        name = next((name for name in resolved.pins if names.count(name) > 1), None)
        if name:
            raise InputError(
                f"no component can be called {name!r}, because a layer of {resolved.name} has "
                "this name",
                where=resolved.pin_place(name, resolved.pins[name]),
                hint="give it another name",
            )
        return layers

    def inline(self, name: str, entries: skeleton.Inline) -> Action:
        content = Input(name="content", value=key_of(entries))
        return Action(
            name=name, kind="files", inputs=(self.tool, content), spec={"inline": entries}
        )

    def script(self, name: str, path: Path) -> Input:
        return Input(name=name, value="sha256:" + self.stats.sha256(str(path)))

    def root_called(self, root: str) -> tuple[Action, ...]:
        """Return the layers of the base, or of the ``root`` of a build, which is the base with more
        packages.
        """
        where = self.resolved.base_place(self.base_name)
        files = ()
        if self.base.image:
            files = self.lock.of("layer", root)
        digests = [
            (file, Input(name=file.name, value=f"sha256:{file.sha256}", where=where))
            for file in files
        ]
        layers = tuple(
            Action(name=f"base {f.name}", kind="image", inputs=(i,), files=(f,)) for f, i in digests
        )
        if layers and not self.base.packages and root == self.base_name:
            return layers
        return (*layers, self.packages(root, where))

    def packages(self, root: str, where: str) -> Action:
        debs = self.lock.of("deb", root)
        base = self.base
        inputs = [Input(name="suite", value=base.suite, where=where)]
        if not base.image:
            # Not part of the spec, which also affects builds in this root: both ways give the same
            # packages.
            inputs.append(Input(name="variant", value=skeleton.VARIANT))
        if base.kernels:
            spec = {"kernels": _patterns(base)}
        else:
            spec = {}
        return self.debs(
            f"base {root}",
            debs,
            where,
            inputs,
            **spec,
            **({"over": base.image} if base.image else {}),
        )

    def debs(
        self,
        name: str,
        debs: tuple[LockedFile, ...],
        where: str,
        inputs: Sequence[Input] = (),
        **spec: object,
    ) -> Action:
        spec = {"suite": self.base.suite, "trim": list(chain(*skeleton.TRIM.values())), **spec}
        return Action(
            name=name,
            kind="debs",
            inputs=(self.tool, *inputs, *_locked(debs, where)),
            spec=spec,
            files=debs,
        )

    def extra(self, extra: str) -> Action:
        base = self.base_name
        debs = self.lock.of("deb", extra_root(base, extra))
        if not debs:
            where = self.resolved.place("extras", self.resolved.choice.channel)
            raise InputError(
                f"extra {extra} adds nothing to {self.resolved.name}: base {base} already has "
                "its packages",
                where=where,
                hint="leave it out",
            )
        return self.debs(
            f"extra {extra}", debs, self.resolved.base_place(base, "extras", extra), over=base
        )

    def kernels(self) -> Action:
        resolved = self.resolved
        if resolved.arch is None:
            raise InputError(
                f"base {self.base_name} has separate kernel files per GPU, but {resolved.name} "
                "has no GPU",
                where=resolved.place(),
                hint="set `gpu`",
            )
        debs = tuple(
            file for file in self.lock.of("deb", self.base_name) if file.name in self.base.kernels
        )
        rewriter = f"fat binary {FORMAT}, zstandard {zstandard.__version__}"
        locked = _locked(debs, resolved.base_place(self.base_name))
        inputs = (self.tool, Input(name="fat binaries", value=rewriter), *locked)
        spec = {"arch": resolved.arch, "kernels": _patterns(self.base)}
        return Action(
            name=f"kernels {resolved.arch}", kind="kernels", inputs=inputs, spec=spec, files=debs
        )

    def components(self) -> list[Action]:
        resolved = self.resolved
        pins = self.resolved.pins
        if resolved.lock:
            wheels = {file.name: file for file in resolved.lock.of("wheel")}
        else:
            wheels = {}
        layers: dict[str, Action] = {}
        # A component built with another built component follows it, whatever their order in the
        # target.
        for component, pin in sorted(
            pins.items(), key=lambda item: bool(item[1].build and item[1].build.built)
        ):
            where = resolved.pin_place(component, pin)
            if pin.deb is not None:
                self.check_deb(pin, where)
            elif pin.path is not None:
                layers[component] = self.folder(component, pin, where)
            elif not self.base_name:
                raise InputError(
                    f"{component} is a Python package, but target {resolved.name} has no base "
                    "for it",
                    where=where,
                )
            elif pin.wheel is not None:
                file = (wheels.pop(normalised(pin.wheel)),)
                layers[component] = self.wheels(component, file, where, without=pin.without)
            else:
                layers[component] = self.wheels(
                    component, (), where, built=self.build(pin, where, layers)
                )
        if self.base_name:
            closure = self.closure("python", wheels.values())
        else:
            closure = []
        ordered = [layers[component] for component in pins if component in layers]
        # Local trees change most often, so they lie on top.
        return [*closure, *sorted(ordered, key=lambda action: action.kind == "files")]

    def closure(self, name: str, wheels: Iterable[LockedFile]) -> list[Action]:
        wheels = tuple(wheels)
        where = self.resolved.lock_name
        small = tuple(file for file in wheels if file.size < _OWN_LAYER)
        layers = [
            self.wheels(f"python-{f.name}", (f,), where) for f in wheels if f.size >= _OWN_LAYER
        ]
        if small:
            return [*layers, self.wheels(name, small, where)]
        return layers

    def check_deb(self, pin: Pin, where: str) -> None:
        base = self.base_name
        version = next(
            (file.version for file in self.lock.of("deb", base) if file.name == pin.deb), None
        )
        if version is None:
            raise InputError(
                f"base {base} does not contain {pin.deb}",
                where=where,
                hint=f"add it under bases.{base}.packages",
            )
        if upstream(version) != pin.version:
            version_text = upstream(version)
            raise InputError(
                f"{pin.text} is pinned, but base {base} has {version_text}",
                where=where,
                hint=f"pin {version_text}",
            )

    def folder(self, component: str, pin: Pin, where: str) -> Action:
        project = self.resolved.root
        root = project / (pin.path or "")
        # Links above a file are followed; one within a folder is copied as a link.
        followed = {str(pin.path): root} | {
            f"{pin.path}/{name}": (root / name).parent for name in pin.include
        }
        for name, path in followed.items():
            if not path.resolve().is_relative_to(project.resolve()):
                raise InputError(
                    f"{component}: {name} is outside of this repository",
                    where=where,
                    hint="copy it into the repository",
                )
        tree = tuple(self.stats.tree(root, pin.include))
        to = pin.to or "/"
        if "{site}" in to and not self.base_name:
            raise InputError(
                f"{component} is installed with the Python packages, but its target has no base",
                where=where,
            )
        to = (to.replace("{site}", self.prefix.site) if "{site}" in to else to).strip("/")
        extra = dict(skeleton.working_folders(to, (path for path, _, _ in tree)))
        if component == "primus":
            extra = dict(skeleton.own_command(to))
        # Names of inputs must differ, or the key would lack one of them.
        if pin.path in ("assembler", "to"):
            name = f"./{pin.path}"
        else:
            name = pin.path or ""
        place = Input(name="to", value="/" + to, where=where)
        inputs = (self.tool, Input(name=name, value=f"tree:{key_of(tree)}", where=where), place)
        spec = {"to": to, "inline": extra}
        return Action(
            name=component, kind="files", inputs=inputs, spec=spec, root=str(root), tree=tree
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
        # The image's own interpreter compiles the bytecode, so its packages, not the whole base,
        # are an input.
        python = [i for action in self.root for i in action.inputs if "python3" in i.name]
        inputs = (
            self.tool,
            *_locked(files, where),
            *python,
            self.script("bytecode", skeleton.BYTECODE),
        )
        spec: dict[str, object] = {"prefix": self.prefix.root, "python": self.prefix.python}
        spec["built"] = built.key if built else None
        spec |= {"without": list(without)} if without else {}
        needs = ()
        if built:
            needs = (built,)
        return Action(
            name=name,
            kind="wheels",
            inputs=inputs,
            spec=spec,
            needs=needs,
            files=files,
            tools=self.root,
        )

    def build(self, pin: Pin, where: str, components: Mapping[str, Action]) -> Action:
        resolved = self.resolved
        package = normalised(pin.source or "")
        build = pin.build or Build()
        source = next(f for f in self.lock.of("git" if pin.git else "sdist") if f.name == package)
        root = build_root(package)
        wheels = self.lock.of("wheel", build_root(package))
        if build.debs:
            system = self.root_called(root)
        else:
            system = self.root
        lacking = [name for name in build.built if name not in components]
        if lacking:
            other = lacking[0]
            raise InputError(
                f"{pin.text} is built with {other}, which {resolved.name} lacks or builds with "
                "other packages",
                where=where,
            )
        built = [components[name] for name in build.built]
        variables = dict(build.environment)
        if pin.git:
            # A source archive has no git history, from which setuptools-scm would derive the
            # version.
            variables.setdefault("SETUPTOOLS_SCM_PRETEND_VERSION", pin.version or "")
        layers: list[Action] = []
        if wheels or built:
            layers.append(
                self.inline("environment", skeleton.environment(self.prefix, system=True))
            )
            layers += self.closure(f"wheels of {root}", wheels)
        packages = [*(file for action in system for file in action.files), *wheels]
        return Action(
            name=f"build {package}",
            kind="build",
            inputs=(
                *_locked([source], where),
                self.script("sorted folders", skeleton.ORDER),
                *_locked(packages, where, "{0.kind} {0.name}"),
                *(
                    Input(name=f"environment {k}", value=v, where=where)
                    for k, v in variables.items()
                ),
            ),
            spec={
                "package": package,
                "script": skeleton.BUILD_WHEEL.read_text(encoding="utf-8"),
                "python": self.prefix.interpreter
                if layers
                else f"/usr/bin/python{self.prefix.python}",
                "environment": {**variables, "PREPARE": build.prepare},
                "root": [action.spec for action in system],
            },
            needs=tuple(needed for action in built for needed in action.needs),
            # The wheels do not depend on how the tools' layers are compressed, so their packages
            # are inputs, not their keys.
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
        "components": {
            components[name].name: pin.version for name, pin in pins.items() if pin.version
        },
        **({"extras": list(resolved.extras)} if resolved.extras else {}),
    }


def _locked(files: Iterable[LockedFile], where: str, name: str = "{0.name}") -> Iterator[Input]:
    return (
        Input(name=name.format(f), value=f"{f.version} sha256:{f.sha256}", where=where)
        for f in files
    )


def _patterns(base: Base) -> dict[str, list[str]]:
    return {package: list(patterns) for package, patterns in base.kernels.items()}
