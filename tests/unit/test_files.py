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


def test_the_umask_decides_who_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        files.write_file(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
