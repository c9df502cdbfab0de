from pathlib import Path

import pytest

from primus_images.system import host

ROOT = "overlay / overlay rw,relatime,lowerdir=/x 0 0\n"
OUT = "/dev/sda1 /workspace/runs ext4 rw,relatime 0 0\n"
SHM = "shm /dev/shm tmpfs rw,nosuid 0 0\n"
SPACE = "/dev/sdb1 /data/my\\040runs xfs rw 0 0\n"
FUSE_ROOT = "fuse-overlayfs / fuse.fuse-overlayfs rw,relatime 0 0\n"


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that takes itself for a container of ours; returns its table of mounts."""
    image, info = tmp_path / "image.json", tmp_path / "mounts"
    image.write_text("{}")
    monkeypatch.setattr(host, "IMAGE_FILE", image)
    monkeypatch.setattr(host, "MOUNTS", info)
    monkeypatch.setattr(Path, "cwd", lambda: Path("/workspace"))
    return info


@pytest.mark.parametrize(
    ("table", "folder", "lost"),
    [
        (ROOT, "/workspace/runs/a", '-v "$PWD/runs:/workspace/runs"'),
        (FUSE_ROOT, "/workspace/runs/a", '-v "$PWD/runs:/workspace/runs"'),
        (ROOT, "/workspace/a", '-v "$PWD/a:/workspace/a"'),
        (ROOT, "/a", '-v "$PWD/a:/a"'),
        (ROOT + SHM, "/dev/shm/runs/a", '-v "$PWD/runs:/dev/shm/runs"'),
        (ROOT + OUT, "/workspace/runs/a", ""),
        (ROOT + OUT, "/workspace/runs", ""),
        (ROOT + OUT, "/workspace/runs2/a", '-v "$PWD/runs2:/workspace/runs2"'),
        (ROOT + SPACE, "/data/my runs/a", ""),
        # Covered by a later mount: what is written there is lost.
        (ROOT + OUT + "none /workspace/runs tmpfs rw 0 0\n", "/workspace/runs/a", "-v "),
        ("broken\n\n1 \n", "/workspace/runs/a", "-v "),
    ],
)
def test_a_folder_without_a_mount_is_said_to_be_lost(
    inside: Path, table: str, folder: str, lost: str
) -> None:
    inside.write_text(table)
    said = host.lost_warning(Path(folder))
    assert lost in said if lost else said == ""


def test_elsewhere_nothing_is_said(
    inside: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inside.write_text(ROOT)
    monkeypatch.setattr(host, "IMAGE_FILE", tmp_path / "nothing")
    assert host.lost_warning(Path("/workspace/runs/a")) == ""
    monkeypatch.setattr(host, "IMAGE_FILE", tmp_path)
    inside.unlink()
    assert host.lost_warning(Path("/workspace/runs/a")) == ""
