"""What of an image comes from no package: its Python environment, the ``primus`` command, settings.

Entries are plain data (path → text or link, mode), because they are part of an action's key.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from primus_images import __version__
from primus_images.oci.tar import Entry
from primus_images.plan.resolve import ResolvedTarget
from primus_images.versions.lock import normalised
from primus_images.yamlfile import filled, read_values

Inline = Mapping[str, Mapping[str, object]]
WORKSPACE = "workspace"
# Packages that pip and uv in the image must not replace.
CONSTRAINTS = "etc/primus/constraints.txt"
# First on PATH: AMD's wheel `primus` brings a command of the same name to the environment.
_OWN = "opt/primus/bin"
# Commands of older documents that no other program of the image has.
_COMMANDS = f"/{WORKSPACE}/bin"
_OPEN: Mapping[str, object] = {"folder": True, "mode": 0o1777}
# mmdebstrap unpacks the packages of the variant itself, and dpkg then unpacks them again, so use
# the smallest one.
VARIANT = "essential"

# Compiles a layer's modules, and lists folders in sorted order while a wheel is built.
BYTECODE = Path(__file__).with_name("compile_bytecode.py")
ORDER = Path(__file__).with_name("sorted_folders.py")
_SHELL = Path(__file__).with_name("shell")
# Builds a wheel from a source archive ($1) with the Python of the build root ($2).
BUILD_WHEEL = _SHELL / "build_wheel.sh"
_DATA: Any = read_values(Path(__file__).with_name("skeleton.yaml")).data
# What of its packages a base does not contain: patterns.
TRIM: Mapping[str, Sequence[str]] = _DATA["trim"]


class Prefix(NamedTuple):
    """The Python environment of the image: ``root`` without a leading slash, ``python`` as
    major.minor.
    """

    python: str
    root: str = "opt/venv"

    @property
    def site(self) -> str:
        """The folder of the modules."""
        return f"{self.root}/lib/python{self.python}/site-packages"

    @property
    def interpreter(self) -> str:
        """The path of the interpreter, as scripts name it."""
        return f"/{self.root}/bin/python3"


def environment(prefix: Prefix, system: bool = False) -> Inline:
    """Return a virtual environment, laid out as by ``python -m venv``, and the working folder.

    Users expect ``pip install`` to work, and Debian and Ubuntu mark their own site-packages as
    externally managed (PEP 668). With ``system``, the environment also sees the base's packages.
    """
    root = prefix.root
    config = (
        f"home = /usr/bin\ninclude-system-site-packages = {str(system).lower()}\nversion = "
        f"{prefix.python}\n"
    )
    return {
        f"{root}/pyvenv.cfg": {"text": config},
        f"{root}/bin/python{prefix.python}": {"link": f"/usr/bin/python{prefix.python}"},
        f"{root}/bin/python3": {"link": f"python{prefix.python}"},
        f"{root}/bin/python": {"link": "python3"},
        WORKSPACE: _OPEN,
    }


def working_folders(to: str, paths: Iterable[str]) -> Inline:
    """Return the folders of a tree in the working folder. Users of any id start jobs in them, which
    write there.
    """
    if PurePosixPath(to).parts[:1] != (WORKSPACE,):
        return {}
    folders = {str(parent) for path in paths for parent in PurePosixPath(to, path).parents} - {"."}
    return dict.fromkeys(sorted(folders), _OPEN)


def own_command(package: str) -> Inline:
    """Return the ``primus`` command of the environment that contains the folder ``package``: its
    script, the metadata that pip and importlib.metadata find, and the files that give it to every
    bash, with completion.

    Login shells start with the distribution's own PATH and read ``profile.d``. The entry point
    (``primus_images.system.banner``) passes ``bashrc`` to other shells.
    """
    root = PurePosixPath(package).parents[3]
    site = PurePosixPath(package).parent
    info = f"primus_images-{__version__}.dist-info"
    metadata = f"Metadata-Version: 2.4\nName: primus-images\nVersion: {__version__}\n"
    metadata += "License-Expression: MIT\n"
    metadata += "".join(f"Requires-Dist: {name}\n" for name in ("Jinja2>=3.1", "PyYAML>=6.0"))
    script = (
        f"#!/{root}/bin/python3\nimport sys\n\nfrom primus_images.cli.main import "
        "main\n\nsys.exit(main())\n"
    )
    profile = (_SHELL / "profile.sh").read_text(encoding="utf-8")
    profile = profile.replace("@OWN@", f"/{_OWN}").replace("@BIN@", f"/{root}/bin")
    profile = profile.replace("@COMMANDS@", _COMMANDS)
    return {
        f"{site}/{info}/METADATA": {"text": metadata},
        f"{site}/{info}/INSTALLER": {"text": "primus\n"},
        f"{site}/{info}/RECORD": {"text": f"{info}/METADATA,,\n"},
        f"{_OWN}/primus": {"text": script, "mode": 0o755},
        f"{root}/bin/primus": {"text": script, "mode": 0o755},
        "etc/profile.d/primus.sh": {"text": profile},
        "etc/primus/bashrc": {"text": (_SHELL / "bashrc").read_text(encoding="utf-8")},
    }


def constraints(resolved: ResolvedTarget) -> str:
    """Return pip's constraints file with the version of each protected Python package; empty if
    there is none.
    """
    held = {}
    for component, pin in resolved.pins.items():
        if resolved.versions.components[component].held and pin.python_package:
            held[normalised(pin.python_package)] = pin.version
    if not held:
        return ""
    lines = [f"{name}=={version}\n" for name, version in sorted(held.items())]
    return (
        "# `pip install` keeps these versions: they are built for each other and for this "
        "image's GPU.\n" + "".join(lines)
    )


def inline_entries(inline: Inline) -> list[Entry]:
    """Return the data as layer entries."""
    entries = []
    for path, content in inline.items():
        if "link" in content:
            entries.append(Entry(path=path, kind="symlink", mode=0o777, link=str(content["link"])))
        elif "folder" in content:
            entries.append(Entry(path=path, kind="dir", mode=int(str(content["mode"]))))
        else:
            text = str(content["text"]).encode()
            mode = int(str(content.get("mode", 0o644)))
            entries.append(Entry(path=path, mode=mode, size=len(text), source=text))
    return entries


def image_config(
    resolved: ResolvedTarget, prefix: Prefix | None, constraints: str
) -> dict[str, object]:
    """Return the config: platform, environment, command and labels. ``constraints`` are pip's."""
    target = resolved.target
    env = dict(resolved.environment)
    if prefix:
        system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        env.setdefault("PATH", f"/{_OWN}:/{prefix.root}/bin:{system}:{_COMMANDS}")
    if prefix and constraints:
        env.setdefault("PIP_CONSTRAINT", f"/{CONSTRAINTS}")
        env.setdefault("UV_CONSTRAINT", f"/{CONSTRAINTS}")
    labels = {}
    for name, pin in resolved.all_pins.items():
        labels[f"io.primus.pins.{name}"] = pin.version or "local"
    if resolved.choice.preview:
        labels["io.primus.preview"] = resolved.choice.preview
    if resolved.extras:
        labels["io.primus.extras"] = " ".join(resolved.extras)
    return _form(
        "config",
        resolved,
        environment=[f"{name}={value}" for name, value in sorted(env.items())],
        workdir=target.workdir,
        labels=labels,
        entrypoint=list(target.entrypoint),
        command=list(target.command),
    )


def manifest_annotations(resolved: ResolvedTarget) -> dict[str, str]:
    """Return the annotations of the image's manifest."""
    return _form(
        "annotations",
        resolved,
        target=resolved.name,
        release=resolved.versions.release,
        title=f"primus {resolved.name}",
        description=resolved.target.description,
        ref=resolved.ref,
        channel=resolved.choice.channel,
        preview=resolved.choice.preview or None,
    )


def _form(name: str, resolved: ResolvedTarget, **values: object) -> dict[str, Any]:
    # The date of the release stands for the time of every build.
    created = f"{resolved.versions.created}T00:00:00Z"
    form: dict[str, Any] = filled(_DATA[name], {"created": created, **values})
    return form
