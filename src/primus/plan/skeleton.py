"""What of an image comes from no package: how its root file system is installed, its Python environment, the ``primus``
command, its settings and labels.

Entries are plain data (path → text or link, mode), because they are part of an action's key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from primus import __version__
from primus.oci.tar import Entry
from primus.versions.lock import normalised

if TYPE_CHECKING:
    from primus.plan.resolve import ResolvedTarget

Inline = Mapping[str, Mapping[str, object]]
WORKSPACE = "workspace"
# Packages that pip and uv in the image must not replace.
CONSTRAINTS = "etc/primus/constraints.txt"
# Commands of older documents that no other program of the image has.
_COMMANDS = f"/{WORKSPACE}/bin"
_SOURCE = "https://github.com/AMD-AGI/Primus"
_OPEN: Mapping[str, object] = {"folder": True, "mode": 0o1777}
# A login shell starts with the distribution's own PATH. Run no program here: a shell must open at once.
_PROFILE = """\
case ":$PATH:" in
*:/{bin}:*) ;;
*) PATH="/{bin}:$PATH:{commands}" ;;
esac
export PATH
if [ -n "${{BASH_VERSION-}}" ]; then
    # Status 124 tells bash to try again with the completion that argcomplete has registered by then.
    _primus_first_tab() {{ eval "$(register-python-argcomplete primus)" && return 124; }}
    complete -F _primus_first_tab primus
fi
"""
# Setup for an interactive bash that is not a login shell and therefore reads no profile; the entry point passes it.
_BASHRC = """\
if [ -r ~/.bashrc ]; then . ~/.bashrc; fi
. /etc/profile.d/primus.sh
"""

# mmdebstrap unpacks the packages of the variant itself, to have a dpkg to run, and dpkg then unpacks them again. Other
# packages are unpacked by dpkg only. So use the smallest variant that has a dpkg; otherwise, half of the work for a
# large base is done twice.
VARIANT = "essential"

# A training image needs no man pages or documentation. Copyright files must stay with the binaries.
NOT_UNPACKED = (
    "/usr/share/man/*",
    "/usr/share/info/*",
    "/usr/share/lintian/*",
    "/usr/share/linda/*",
    "/usr/share/locale/*",
    "/usr/share/doc/*",
    # The private key of a test server. It is public, but every scanner reports a key in an image.
    "/usr/lib/python3/dist-packages/fsspec/implementations/tests/*",
)
UNPACKED_STILL = ("/usr/share/doc/*/copyright", "/usr/share/locale/locale.alias")

# Patterns of paths that differ between machines or runs, or that the container runtime provides.
LEFT_OUT = (
    "dev/*",
    "run/*",
    "tmp/*",
    "proc/*",
    "sys/*",
    "etc/machine-id",
    "etc/hostname",
    "etc/resolv.conf",
    "etc/apt/sources.list",
    "etc/apt/sources.list.d/*",
    "etc/apt/apt.conf.d/99mmdebstrap",
    "etc/*-",
    "var/cache/*",
    "var/log/*",
    "var/lib/apt/*",
    "var/lib/dpkg/*-old",
    "var/lib/dpkg/lock*",
    "var/lib/dpkg/triggers/Lock",
    "var/lib/systemd/*",
    # Python writes these when packages are configured, with other bytes each time.
    "usr/share/python3/debpython/__pycache__*",
    "usr/lib/python3/dist-packages/_distutils_hack/__pycache__*",
)

TRIM = (*NOT_UNPACKED, *UNPACKED_STILL, *LEFT_OUT)

# Compiles a layer's modules, and lists folders in sorted order while a wheel is built.
BYTECODE = Path(__file__).with_name("compile_bytecode.py")
ORDER = Path(__file__).with_name("sorted_folders.py")

# Builds a wheel from a source archive. $1 is the archive, $2 the Python of the build root. The archive is unpacked at a
# fixed path: pip would build it in a folder with a random name, which debug information contains. Tools from wheels
# (ninja) lie beside the interpreter.
WHEEL_SCRIPT = """\
set -e
mkdir /tmp/source
cd /tmp/source
PATH="${2%/*}:$PATH"
case "$1" in
*.zip) "$2" -m zipfile -e "$1" . ;;
*) tar -xf "$1" --no-same-owner ;;
esac
cd ./*
eval "$PREPARE"
exec "$2" -m pip wheel --no-index --no-deps --no-build-isolation --no-cache-dir --wheel-dir /out .
"""


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The Python environment of the image: ``root`` without a leading slash, ``python`` as major.minor."""

    root: str = "opt/venv"
    python: str

    @property
    def site(self) -> str:
        """The folder of the modules."""
        return f"{self.root}/lib/python{self.python}/site-packages"

    @property
    def interpreter(self) -> str:
        """The path of the interpreter, as scripts name it."""
        return f"/{self.root}/bin/python3"


def environment(prefix: Prefix, system: bool = False) -> Inline:
    """Return a virtual environment based on the base's interpreter, laid out as by ``python -m venv``.

    It is a virtual environment because Debian and Ubuntu mark their own site-packages as externally managed (PEP
    668), and users expect ``pip install`` to work. With ``system``, it also sees the base's packages. The working
    folder is writable for every user id.
    """
    root = prefix.root
    config = f"home = /usr/bin\ninclude-system-site-packages = {str(system).lower()}\nversion = {prefix.python}\n"
    return {
        f"{root}/pyvenv.cfg": {"text": config},
        f"{root}/bin/python{prefix.python}": {"link": f"/usr/bin/python{prefix.python}"},
        f"{root}/bin/python3": {"link": f"python{prefix.python}"},
        f"{root}/bin/python": {"link": "python3"},
        WORKSPACE: _OPEN,
    }


def working_folders(to: str, paths: Iterable[str]) -> Inline:
    """Return the folders of a tree in the working folder, and the working folder itself, writable for every user
    id.

    Users change into them and start jobs there, which write results to the current folder.
    """
    if PurePosixPath(to).parts[:1] != (WORKSPACE,):
        return {}
    folders = {str(parent) for path in paths for parent in PurePosixPath(to, path).parents} - {"."}
    return dict.fromkeys(sorted(folders), _OPEN)


def distribution(package: str) -> Inline:
    """Return the metadata of the ``primus`` package at ``package``, so that pip and importlib.metadata find it."""
    site = PurePosixPath(package).parent
    folder = f"{site}/primus_images-{__version__}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: primus-images\nVersion: {__version__}\nRequires-Dist: PyYAML>=6.0\n"
    return {
        f"{folder}/METADATA": {"text": metadata},
        f"{folder}/INSTALLER": {"text": "primus\n"},
        f"{folder}/RECORD": {"text": f"{folder.rpartition('/')[2]}/METADATA,,\n"},
    }


def console_script(package: str) -> Inline:
    """Return the ``primus`` command of the environment that contains ``package``."""
    root = PurePosixPath(package).parents[3]
    script = f"#!/{root}/bin/python3\nimport sys\n\nfrom primus.cli.main import main\n\nsys.exit(main())\n"
    return {f"{root}/bin/primus": {"text": script, "mode": 0o755}}


def shell_setup(package: str) -> Inline:
    """Return the files that give every bash the ``primus`` command with completion, whether or not it is a login
    shell.

    The entry point (``primus.system.banner``) passes the second file to shells that are not login shells.
    """
    bin_folder = PurePosixPath(package).parents[3] / "bin"
    return {
        "etc/profile.d/primus.sh": {"text": _PROFILE.format(bin=bin_folder, commands=_COMMANDS)},
        "etc/primus/bashrc": {"text": _BASHRC},
    }


def constraints(resolved: ResolvedTarget) -> str:
    """Return the constraints file with the version of each protected Python package. Empty if the target protects
    none.
    """
    held = {
        normalised(pin.wheel or pin.source or (pin.deb or "").removeprefix("python3-")): pin.version
        for component, pin in resolved.pins.items()
        if resolved.versions.components[component].held and (not pin.deb or pin.deb.startswith("python3-"))
    }
    if not held:
        return ""
    why = "# `pip install` keeps these versions: they are built for each other and for this image's GPU.\n"
    return why + "".join(f"{name}=={version}\n" for name, version in sorted(held.items()))


def inline_entries(inline: Inline) -> list[Entry]:
    """Return the data as layer entries."""
    result = []
    for path, what in inline.items():
        if "link" in what:
            result.append(Entry(path=path, kind="symlink", mode=0o777, link=str(what["link"])))
        elif what.get("folder"):
            result.append(Entry(path=path, kind="dir", mode=int(str(what["mode"]))))
        else:
            text = str(what["text"]).encode()
            result.append(Entry(path=path, mode=int(str(what.get("mode", 0o644))), size=len(text), source=text))
    return result


def image_config(resolved: ResolvedTarget, prefix: Prefix | None, held: str) -> dict[str, object]:
    """Return the config: platform, environment, command and labels. ``held``: pip's constraints, if there are any."""
    target, preview = resolved.target, resolved.choice.preview
    env = dict(resolved.environment)
    if prefix:
        system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        env.setdefault("PATH", f"/{prefix.root}/bin:{system}:{_COMMANDS}")
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
