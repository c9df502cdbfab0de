"""The stat index: unchanged files are not read, changed ones always are."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.files import mark_of
from primus_images.plan.stats import StatIndex


def settle(path: Path) -> None:
    """Let the file be older than the racy window, as most files are."""
    past = time.time_ns() - 10**10
    os.utime(path, ns=(past, past))
    time.sleep(0.06)


def test_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_text("one")
    settle(file)
    index = StatIndex(tmp_path / "index")
    assert index.sha256(str(file)) == hashlib.sha256(b"one").hexdigest()
    index.save()
    again = StatIndex(tmp_path / "index")
    monkeypatch.setattr(Path, "open", lambda *a, **k: pytest.fail("the file was read again"))
    assert again.sha256(str(file)) == hashlib.sha256(b"one").hexdigest()


def test_a_file_of_the_same_size_is_read_again_if_a_time_of_it_changed(tmp_path: Path) -> None:
    file = tmp_path / "a"
    index = StatIndex(tmp_path / "index")
    for text in ("one", "two"):
        file.write_text(text)
        settle(file)
        assert index.sha256(str(file)) == hashlib.sha256(text.encode()).hexdigest()


def test_file_written_just_now_is_not_remembered(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("one")
    index = StatIndex(tmp_path / "index")
    index.sha256(str(file))
    index.save()
    assert not (tmp_path / "index").exists()


def test_tree_lists_files_links_and_modes_without_caches(tmp_path: Path) -> None:
    root = tmp_path / "t"
    (root / "sub/__pycache__").mkdir(parents=True)
    (root / "sub/__pycache__/x.pyc").write_bytes(b"x")
    (root / "sub/run").write_text("r")
    (root / "sub/run").chmod(0o755)
    (root / "link").symlink_to("sub/run")
    digest = hashlib.sha256(b"r").hexdigest()
    assert StatIndex(tmp_path / "i").tree(root) == [
        ("link", "link", "sub/run"),
        ("sub/run", "exec", digest),
    ]


def test_include_takes_only_what_it_names(tmp_path: Path) -> None:
    for name in ("a/x", "b/y", "c"):
        path = tmp_path / "t" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    names = [n for n, _, _ in StatIndex(tmp_path / "i").tree(tmp_path / "t", ("a", "c"))]
    assert names == ["a/x", "c"]


def test_missing_folder_or_child_is_named(tmp_path: Path) -> None:
    index = StatIndex(tmp_path / "i")
    with pytest.raises(InputError, match="no such folder"):
        index.tree(tmp_path / "absent")
    with pytest.raises(InputError, match="no 'gone'"):
        index.tree(tmp_path, ("gone",))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [(0o644, "file"), (0o755, "exec"), (0o744, "exec"), (0o655, "file"), (0o611, "file")],
)
def test_a_file_is_a_program_if_its_owner_may_run_it(mode: int, kind: str, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t/a").write_text("a")
    (tmp_path / "t/a").chmod(mode)
    ((_, found, _),) = StatIndex(tmp_path / "i").tree(tmp_path / "t")
    assert found == kind


def test_an_index_that_is_not_trusted_reads_every_file(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("one")
    settle(file)
    index = StatIndex(tmp_path / "index")
    index._entries[str(file)] = [*mark_of(file.stat()), "0" * 64]
    assert index.sha256(str(file)) == "0" * 64
    index.trusted = False
    assert index.sha256(str(file)) == hashlib.sha256(b"one").hexdigest()
    assert index.digest(file) == f"sha256:{hashlib.sha256(b'one').hexdigest()}"


def test_caches_and_repositories_are_no_part_of_a_tree(tmp_path: Path) -> None:
    for name in (".git/config", "a.pyc", "__pycache__/a", "sub/.git/x", "sub/b.py", ".gitignore"):
        path = tmp_path / "t" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    names = [name for name, _, _ in StatIndex(tmp_path / "i").tree(tmp_path / "t")]
    assert names == [".gitignore", "sub/b.py"]


def test_what_an_image_cannot_contain_is_refused_at_its_place(tmp_path: Path) -> None:
    root = tmp_path / "t"
    root.mkdir()
    (root / "a\nb").write_text("x")
    with pytest.raises(InputError, match="cannot be in an image") as caught:
        StatIndex(tmp_path / "i").tree(root)
    assert caught.value.where == str(root)
    assert caught.value.hint == "rename it, or leave it out with `include`"
    (root / "a\nb").unlink()
    (root / "link").symlink_to("x\ny")
    with pytest.raises(InputError, match="the target of this link cannot be used") as caught:
        StatIndex(tmp_path / "i").tree(root)
    assert caught.value.where == str(root / "link")
