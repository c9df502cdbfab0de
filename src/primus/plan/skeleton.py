"""The files of an image that no package brings: the Python environment, the ``primus`` command and its metadata.

Entries are plain data (path → text or link, mode), since they are part of an action's key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from primus import __version__
from primus.oci.tar import Entry
from primus.plan.prefix import Prefix
from primus.versions.components import normalised

if TYPE_CHECKING:
    from primus.plan.resolve import ResolvedTarget

Inline = Mapping[str, Mapping[str, object]]
WORKSPACE = "workspace"
# What pip and uv in the image may not replace.
CONSTRAINTS = "etc/primus/constraints.txt"
_OPEN: Mapping[str, object] = {"folder": True, "mode": 0o1777}
# A login shell starts from the distribution's own PATH. Nothing is started here: a shell must open at once.
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
# What the image's entry point gives to an interactive bash that is no login shell; such a bash reads no profile.
_BASHRC = """\
if [ -r ~/.bashrc ]; then . ~/.bashrc; fi
. /etc/profile.d/primus.sh
"""


def environment(prefix: Prefix, system: bool = False) -> Inline:
    """A virtual environment over the base's interpreter, as ``python -m venv`` lays it out.

    A virtual environment, since Debian and Ubuntu mark their own site-packages as externally managed (PEP 668) and
    users expect ``pip install`` to work. With ``system`` it sees the base's packages behind its own. The working
    folder is open to every user id.
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
    """The folders of a tree that lies in the working folder, and that one itself: open to every user id, too.

    Users change into them and start jobs there, which leave their results in the current folder.
    """
    if PurePosixPath(to).parts[:1] != (WORKSPACE,):
        return {}
    folders = {str(parent) for path in paths for parent in PurePosixPath(to, path).parents} - {"."}
    return dict.fromkeys(sorted(folders), _OPEN)


def distribution(package: str) -> Inline:
    """Metadata of the ``primus`` package installed at ``package``, so that pip and importlib.metadata see it."""
    site = PurePosixPath(package).parent
    folder = f"{site}/primus_images-{__version__}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: primus-images\nVersion: {__version__}\nRequires-Dist: PyYAML>=6.0\n"
    return {
        f"{folder}/METADATA": {"text": metadata},
        f"{folder}/INSTALLER": {"text": "primus\n"},
        f"{folder}/RECORD": {"text": f"{folder.rpartition('/')[2]}/METADATA,,\n"},
    }


def console_script(package: str) -> Inline:
    """The ``primus`` command of the environment that holds ``package``."""
    root = PurePosixPath(package).parents[3]
    script = f"#!/{root}/bin/python3\nimport sys\n\nfrom primus.cli.main import main\n\nsys.exit(main())\n"
    return {f"{root}/bin/primus": {"text": script, "mode": 0o755}}


def shell_setup(package: str) -> Inline:
    """Files that make ``primus`` known to every bash, with completion on Tab, login shell or not.

    The entry point (``primus.system.banner``) names the second file to shells that are no login shells.
    """
    bin_folder = PurePosixPath(package).parents[3] / "bin"
    return {
        "etc/profile.d/primus.sh": {"text": _PROFILE.format(bin=bin_folder)},
        "etc/primus/bashrc": {"text": _BASHRC},
    }


def constraints(resolved: ResolvedTarget) -> str:
    """The constraints file: the version of each held Python package. Empty when the target holds none."""
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
    """The data as layer entries."""
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
