"""What a power cut leaves of a file of ``.primus``: the next command works, heals it, or names the
remedy.
"""

import re
from pathlib import Path

import pytest
from sandbox_kit import APPLETS, BUSYBOX, needs_busybox

from host_tools import needs
from project_kit import Kit, add_shell, make_project

pytestmark = [
    pytest.mark.integration,
    # By default, test_store_damage.py, test_filecache.py and test_podman_state.py show it.
    pytest.mark.slow,
    needs_busybox,
    needs("podman"),
]
RUN = ("run", "demo", "--", "sh", "-c", "cat /opt/alpha/blob /opt/beta/blob > /dev/null && exit 7")


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    kit = make_project(tmp_path_factory.mktemp("project"))
    add_shell(kit, BUSYBOX, APPLETS, "demo")
    return kit


def files(workspace: Path) -> list[Path]:
    """All files but those inside unpacked layers, whose listings tell them apart."""
    found = []
    for path in sorted(workspace.rglob("*")):
        inside = "layers" in path.relative_to(workspace).parts[:-2]
        if path.is_file() and not inside:
            found.append(path)
    return found


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "half":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(bytes(len(data)))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["missing", "empty", "half", "zeros"])
@pytest.mark.parametrize("first", ["run", "build"])
def test_the_next_command_works_heals_or_names_the_remedy(kit: Kit, how: str, first: str) -> None:
    digest = kit.build().digest
    assert kit.primus(*RUN).code == 7
    commands = {"run": RUN, "build": ("build", "demo")}
    wrong = []
    for path in files(kit.root / ".primus"):
        if not path.exists():
            # An earlier command has replaced it.
            continue
        damage(path, how)
        ended = kit.primus(*commands[first])
        if ended.code not in (0, 7):
            # What cannot be healed at once is named, and the named command does it.
            if not re.search("primus build|build the image again", ended.err):
                wrong.append(f"{path.name}: {first} ended with {ended.code}: {ended.err}")
            kit.primus("build", "demo", "--rehash")
        built = kit.primus("build", "demo")
        ran = kit.primus(*RUN)
        if built.code or built.digest != digest or ran.code != 7:
            wrong.append(f"{path.name}: {built.code}, {ran.code}: {built.err} {ran.err}")
    assert not wrong, "\n".join(wrong)
