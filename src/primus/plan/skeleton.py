"""The files of an image that come from no package: the Python environment, the ``primus`` command and its metadata.

Entries are plain data (path → text or link, mode), because they are part of an action's key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from primus import __version__
from primus.oci.tar import Entry
from primus.plan.prefix import Prefix
from primus.versions.names import normalised

if TYPE_CHECKING:
    from primus.plan.resolve import ResolvedTarget

Inline = Mapping[str, Mapping[str, object]]
WORKSPACE = "workspace"
# Packages that pip and uv in the image must not replace.
CONSTRAINTS = "etc/primus/constraints.txt"
_OPEN: Mapping[str, object] = {"folder": True, "mode": 0o1777}
# A login shell starts with the distribution's own PATH. Run no program here: a shell must open at once.
_PROFILE = """\
case ":$PATH:" in
*:/{bin}:*) ;;
*) PATH="/{bin}:$PATH" ;;
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
        "etc/profile.d/primus.sh": {"text": _PROFILE.format(bin=bin_folder)},
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
