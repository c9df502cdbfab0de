"""Files are written whole or not at all."""

import os
from pathlib import Path

import pytest

from primus_images import files
from primus_images.errors import InputError


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    files.write_file(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_file(path, "half \ud800")
    assert path.read_text() == "old"
    with path.open() as reader:
        files.write_file(path, "new")
        assert reader.read() == "old", "a file is replaced, and not written into"
    assert path.read_text() == "new"
    assert [file.name for file in path.parent.iterdir()] == ["file"]


def test_a_file_replaces_no_pipe_and_no_device_and_an_error_names_the_path(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path / "pipe", Path("/dev/full"), Path("/dev/stdout")):
        with pytest.raises(InputError, match="this is not a regular file"):
            files.write_file(special, "")
        assert not special.is_file() or special.is_symlink()
    with pytest.raises(IsADirectoryError) as caught:
        files.write_file(tmp_path, "")
    assert caught.value.filename == str(tmp_path)


def test_what_is_no_file_is_named_by_its_path_or_as_the_user_wrote_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path, "this is a directory"),
        (tmp_path / "pipe", "not a regular file"),
    ):
        for shown in (None, "--data x"):
            with pytest.raises(InputError, match=said) as caught:
                files.read_bytes(path, shown)
            assert caught.value.where == (shown or str(path))


def test_a_plain_path_is_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    monkeypatch.chdir(tmp_path / "a")
    assert files.plain(Path("../a/new")) == tmp_path / "a/new"
    # "a", and not the folder of the link
    assert files.plain(tmp_path / "link/../c") == tmp_path / "link/../c"
    assert files.plain(tmp_path / "link") == tmp_path / "link"


def test_the_umask_decides_who_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        files.write_file(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_the_end_of_a_text_and_files_of_the_kernel_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\nl\xffst\n")
    assert files.text_if_readable(path, 5) == "l\ufffdst\n"
    assert files.text_if_readable(path, 500) == "first\nl\ufffdst\n"
    assert files.text_if_readable(Path("/proc/self/status")).startswith("Name:")
    os.mkfifo(tmp_path / "pipe")
    assert files.text_if_readable(tmp_path / "pipe") == ""


def test_stems_are_those_of_visible_yaml_files(tmp_path: Path) -> None:
    for name in ("b.yaml", "a.b.yaml", ".hidden.yaml", "c.yml", "d.yaml.bak"):
        (tmp_path / name).touch()
    assert files.stems(tmp_path) == ["a.b", "b"]
    assert files.stems(tmp_path / "absent") == []


def test_a_file_of_the_greatest_size_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MOST_BYTES", 4)
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    assert files.read_bytes(path) == b"1234"
    path.write_bytes(b"12345")
    with pytest.raises(InputError, match="the file is larger than 0 MiB"):
        files.read_bytes(path)


def test_a_file_of_more_than_64_mib_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as stream:
        stream.truncate((64 << 20) + 1)
    with pytest.raises(InputError, match="the file is larger than 64 MiB"):
        files.read_bytes(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "content"),
    [('{"a": 1}', {"a": 1}), ("[1]", {}), ("1", {}), ("{", {}), ("[" * 100_000, {}), (None, {})],
)
def test_json_that_is_no_object_is_an_empty_one(
    text: str | None, content: dict[str, int], tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "file").write_text(text)
    assert files.json_if_readable(tmp_path / "file") == content


def test_a_link_is_followed_unless_it_must_not(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").write_bytes(b"x")
    with files.open_regular(tmp_path / "link") as stream:
        assert stream.read() == b"x"
    with pytest.raises(InputError, match="not a regular file"):
        files.open_regular(tmp_path / "link", follow=False)
    with pytest.raises(InputError, match="a directory, not a file"):
        files.open_regular(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"1", b"00000000\n1", b"6b86b273\n"])
def test_a_damaged_sealed_file_counts_as_absent(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_sealed(path, {"a": [1]})
    assert files.read_sealed(path) == {"a": [1]}
    path.write_bytes(damage)
    assert files.read_sealed(path) is None


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("a/b.c", None),
        ("a" * 255, None),
        ("", "it is empty"),
        ("/a", "it is absolute"),
        ("a/../b", "it leaves its folder"),
        ("a//b", "an empty part"),
        ("a/.", "a dot as a part"),
        ("a/.wh.b", "removes files"),
        (".wh.b", "removes files"),
        ("a\nb", "a control character"),
        ("a\ud800", "it is not UTF-8"),
        ("é" * 128, "longer than 255 bytes"),
        ("ab/" * 1365, "an empty part"),
        ("ab/" * 1366, "longer than 4095 bytes"),
    ],
)
def test_a_path_of_an_image_is_clean(path: str, fault: str | None) -> None:
    found = files.path_fault(path)
    if fault is None:
        assert found is None
    else:
        assert found is not None
        assert fault in found
