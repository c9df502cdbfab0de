"""``debs``: locked Debian packages as the base of an image, or over an image that a registry gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from primus.build.kinds import Made
from primus.build.rootfs import root_entries
from primus.build.unpacked import over_entries
from primus.errors import HostError
from primus.sandbox import userns
from primus.sandbox.tools import need

if TYPE_CHECKING:
    from primus.build.execute import Workshop
    from primus.plan.action import Action


def prepare(actions: Sequence[Action], shop: Workshop) -> None:
    """mmdebstrap, and for an ordinary user the namespaces to run it in. Packages over an image need neither."""
    if all("over" in action.spec for action in actions):
        return
    if userns.needed() and (lack := userns.missing()) is not None:
        raise HostError(f"this user cannot build a root file system: {lack[0]}", hint=lack[1])
    need("mmdebstrap", "mmdebstrap", say=shop.progress.say)


def make(action: Action, shop: Workshop, scratch: Path) -> Made:
    """Install the packages with mmdebstrap, or unpack them if they lie over an image."""
    if "over" in action.spec:
        return shop.write(action, over_entries(action.files, scratch, find=shop.file))
    entries = root_entries(
        action.files,
        str(action.spec["suite"]),
        scratch,
        find=shop.file,
        mmdebstrap=str(need("mmdebstrap", "mmdebstrap", say=shop.progress.say)),
        log=shop.log(action),
        kernels=cast("Mapping[str, Sequence[str]]", action.spec.get("kernels", {})),
    )
    return shop.write(action, entries)
