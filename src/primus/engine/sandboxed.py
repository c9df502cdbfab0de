"""Run a command of an action in the root file system that other actions created."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from primus.engine.space import disk_is_full
from primus.errors import CheckFailed
from primus.oci.roots import root_of_layers
from primus.sandbox.engines import choose
from primus.sandbox.isolated import log_tail, run_isolated

if TYPE_CHECKING:
    from primus.engine.execute import Workshop
    from primus.plan.action import Action


def prepare(shop: Workshop) -> None:
    """Check that this machine can isolate a command. Raises HostError that names what is missing."""
    choose(shop.engine, shop.progress.say).prepare_host()


def run(
    action: Action,
    shop: Workshop,
    argv: Sequence[str],
    *,
    inputs: Mapping[str, Path],
    outputs: Path,
    what: str,
    env: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run ``argv`` on the layers of the action's tools, without network. ``outputs`` is mounted at /out.

    Raises CheckFailed with the end of the log if the command fails, HostError if the disk is full.
    """
    log = shop.log(action)
    code = run_isolated(
        root_of_layers(shop.workspace.store, shop.workspace.unpacked, [shop.layer(tool) for tool in action.tools]),
        argv,
        inputs=inputs,
        outputs=outputs,
        env=env,
        log=log,
        engine=choose(shop.engine, shop.progress.say),
    )
    if code != 0:
        if full := disk_is_full(log, shop.workspace.store.root):
            raise full
        raise CheckFailed(f"{what} ended with exit code {code}:\n{log_tail(log)}")


def own_code(action: Action, name: str, path: Path, scratch: Path) -> Path:
    """Copy a file of this package to ``scratch`` to run it in the sandbox. Its bytes are those that the action's
    key names.
    """
    data = path.read_bytes()
    if f"sha256:{hashlib.sha256(data).hexdigest()}" not in (i.value for i in action.inputs if i.name == name):
        raise CheckFailed(f"{path} changed while the build read it", hint="build again")
    copy = scratch / path.name
    copy.write_bytes(data)
    return copy
