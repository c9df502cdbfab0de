"""Packages over an image that a registry gave."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from primus_images.engine.kinds import debs
from primus_images.errors import HostError
from primus_images.oci.tar import Entry
from primus_images.plan.action import Action
from primus_images.versions.lock import LockedFile


def _deb(name: str) -> LockedFile:
    return LockedFile(kind="deb", name=name, version="1", file=name, size=1, sha256="0" * 64)


@pytest.mark.parametrize(("shared", "kind"), [("usr/lib", "dir"), ("usr/lib/file", "file")])
def test_two_packages_share_folders_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shared: str, kind: str
) -> None:
    def entries(deb: LockedFile, path: Path, scratch: Path) -> Iterator[Entry]:
        yield Entry(path=shared, kind=kind)  # type: ignore[arg-type]
        yield Entry(path=f"usr/share/{deb.name}")

    monkeypatch.setattr(debs, "_entries", entries)
    action = Action(name="a", kind="debs", inputs=(), files=(_deb("one"), _deb("two")))
    shop = SimpleNamespace(file=lambda deb: tmp_path)
    if kind == "dir":
        paths = [entry.path for entry in debs._over_entries(action, shop, tmp_path)]  # type: ignore[arg-type]
        assert paths == [shared, "usr/share/one", "usr/share/two"]
    else:
        with pytest.raises(HostError, match=f"/{shared} is in two packages, one of which is two"):
            debs._over_entries(action, shop, tmp_path)  # type: ignore[arg-type]
