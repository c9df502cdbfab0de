"""A commit with its submodules as one archive, from repositories on this machine."""

import socket
import tarfile
from pathlib import Path

import pytest

from gits import commit, git
from primus_images.errors import HostError, InputError
from primus_images.versions import remotes as repository
from primus_images.versions.lock import Commit
from primus_images.versions.remotes import archive_commit, resolve_commit

MODULES = '[submodule "part"]\n\tpath = 3rdparty/part\n\turl = ../part\n'


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A repository with a submodule; its second-last commit is on no branch's tip."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    part = "3rdparty/part", commit(tmp_path / "part", {"inside.txt": "of the submodule\n"})
    # An attribute must not change the bytes.
    files = {
        "setup.py": "pass\n",
        ".gitmodules": MODULES,
        ".gitattributes": "* export-ignore\nsetup.py text eol=crlf\n",
    }
    commit(tmp_path / "main", files, part)
    commit(tmp_path / "main", {"later.txt": "later\n"}, part)
    return f"file://{tmp_path}/main"


def parent(url: str) -> str:
    return git(Path(url.removeprefix("file://")), "rev-parse", "HEAD~1")


def test_the_archive_has_every_file_of_the_commit_and_its_submodules(
    main: str, tmp_path: Path
) -> None:
    archive_commit(Commit(url=main, commit=parent(main), version="1.0"), "a.tar", tmp_path)
    with tarfile.open(tmp_path / "a.tar") as archive:
        names = archive.getnames()
        assert {member.mtime for member in archive} == {315532800}
        setup = archive.extractfile("source/setup.py")
        assert setup is not None
        assert setup.read() == b"pass\n"
    files = (".gitattributes", ".gitmodules", "3rdparty/part/inside.txt", "setup.py")
    assert names == [f"source/{name}" for name in files]


def test_the_archive_of_a_commit_always_has_the_same_bytes(main: str) -> None:
    pin = Commit(url=main, commit=parent(main), version="1.0")
    assert resolve_commit("main", pin) == resolve_commit("main", pin)


def test_a_commit_of_nobody_is_named(main: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"main .*{'1' * 40}") as caught:
        archive_commit(Commit(url=main, commit="1" * 40, version="1.0"), "a.tar", tmp_path)
    assert caught.value.about == "main"


def test_a_repository_that_is_not_there_or_silent_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "_SILENCE_S", 1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        urls = {
            f"file://{tmp_path}/main": "not",
            f"http://me:SECRET@127.0.0.1:{silent.getsockname()[1]}/main": "1 s",
        }
        for url, words in urls.items():
            with pytest.raises(HostError, match=f"/main does not answer: .*{words}") as caught:
                archive_commit(Commit(url=url, commit="1" * 40, version="1.0"), "a.tar", tmp_path)
            assert "SECRET" not in str(caught.value)
            assert caught.value.about == "main"
