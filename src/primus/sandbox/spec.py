"""The OCI runtime configuration (``config.json``) of one run, from the image's settings and the command's."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from primus import yamlfile
from primus.errors import HostError, InputError
from primus.sandbox.container import (
    Command,
    DeviceNode,
    Hook,
    Limits,
    Mount,
    RootFs,
    final_argv,
    host_name,
    image_env,
    merged,
)

# Docker's default set except MKNOD: enough for package managers and daemons, not enough to access the host. If no
# control group guards devices, whoever can create a device node can read the host's disks.
_CAPABILITIES = [
    *("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID"),
    *("CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SYS_CHROOT", "CAP_AUDIT_WRITE", "CAP_SETFCAP"),
]
# As in Docker and Podman: files that show the host's hardware and keys, and kernel settings.
_HIDDEN = [
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/firmware"),
    "/sys/devices/virtual/powercap",
]
_READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]
_PERIOD_US = 100_000
_SECCOMP_FILE = Path(__file__).with_name("seccomp.yaml")


def configuration(
    root: RootFs, command: Command, *, terminal: tuple[int, int] | None, user_namespace: bool
) -> dict[str, Any]:
    """Return the configuration without the user's ids, which are in the image's files.

    ``terminal`` is the size (rows, columns) of the command's terminal, or None. Without a size, the runtime copies
    that of its own terminal, possibly after the command has read it. ``user_namespace``: the runtime is root of a
    user namespace. It cannot create device nodes then, so the host's are mounted. No control group is named: runc
    names it like the container, and does without one if it cannot create any.
    """
    devices = merged(command.devices)
    mounts = [_bind(mount) for mount in (*devices.mounts, *command.mounts)]
    nodes: list[dict[str, Any]] = []
    rules: list[dict[str, Any]] = [{"allow": False, "access": "rwm"}]
    for device in devices.nodes:
        node = _node(device)
        rules.append({"allow": True, "type": node["type"], "major": node["major"], "minor": node["minor"],
                      "access": device.permissions})  # fmt: skip
        if user_namespace:
            mounts.append({"destination": device.target, "type": "bind", "source": str(device.source),
                           "options": ["bind", "rprivate", "nosuid", "noexec"]})  # fmt: skip
        else:
            nodes.append(node)
    kinds = ["mount", "ipc", "uts", "cgroup", *([] if command.network else ["network"])]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": terminal is not None,
            **({"consoleSize": {"height": terminal[0], "width": terminal[1]}} if terminal else {}),
            "user": {"uid": 0, "gid": 0},
            "args": final_argv(root, command),
            "env": [f"{key}={value}" for key, value in image_env(root, command).items()],
            "cwd": _directory(root, command),
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES),
            "noNewPrivileges": False,
        },
        "root": {"path": "root", "readonly": command.read_only_root},
        "hostname": host_name(root, command),
        "mounts": [*_standard_mounts(command, user_namespace), *mounts],
        "hooks": _hooks(devices.hooks),
        "linux": {
            "namespaces": [{"type": kind} for kind in kinds],
            "devices": nodes,
            "resources": {"devices": rules, **_resources(command.limits)},
            "seccomp": seccomp(),
            "maskedPaths": list(_HIDDEN),
            "readonlyPaths": list(_READ_ONLY),
        },
    }


def _directory(root: RootFs, command: Command) -> str:
    cwd = command.cwd or (root.config.get("config") or {}).get("WorkingDir") or "/"
    if not str(cwd).startswith("/"):
        raise InputError(f"the working directory {cwd!r} is not absolute")
    return str(cwd)


def _standard_mounts(command: Command, user_namespace: bool) -> list[dict[str, Any]]:
    plain = ["nosuid", "noexec", "nodev"]
    terminals = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]
    system = {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*plain, "ro"]}
    if command.network and user_namespace:
        # A user namespace may only mount a /sys of its own network, so the host's is used.
        system = {
            "destination": "/sys",
            "type": "bind",
            "source": "/sys",
            "options": ["rbind", "rprivate", *plain, "ro"],
        }
    return [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": plain},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
         "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": terminals},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm",
         "options": ["nosuid", "nodev", "mode=1777", f"size={command.shm_bytes}"]},
        {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": plain},
        system,
    ]  # fmt: skip


def _bind(mount: Mount) -> dict[str, Any]:
    # "rro" also makes mounts below it read-only; kernels before 5.12 do not support it.
    read_only = "rro" if _kernel() >= (5, 12) else "ro"
    options = mount.options or ("rbind", "rprivate", read_only if mount.read_only else "rw")
    return {
        "destination": mount.target,
        "type": "bind",
        "source": str(mount.source.absolute()),
        "options": list(options),
    }


def _kernel() -> tuple[int, int]:
    words = os.uname().release.split(".")
    return int(words[0]), int("".join(c for c in words[1] if c.isdigit()) or "0")


def _node(device: DeviceNode) -> dict[str, Any]:
    try:
        info = device.source.stat()
    except OSError as error:
        raise HostError(
            f"the device {device.source} cannot be used: {error.strerror}",
            hint="if a CDI specification names it, generate the specification again",
        ) from None
    kind = "c" if stat.S_ISCHR(info.st_mode) else "b" if stat.S_ISBLK(info.st_mode) else ""
    if not kind:
        raise InputError(f"{device.source} is not a device")
    node: dict[str, Any] = {"path": device.target, "type": kind}
    node |= {"major": os.major(info.st_rdev), "minor": os.minor(info.st_rdev)}
    node |= {"fileMode": stat.S_IMODE(info.st_mode) if device.mode is None else device.mode}
    node |= {"uid": info.st_uid if device.uid is None else device.uid}
    return node | {"gid": info.st_gid if device.gid is None else device.gid}


def _hooks(wanted: Iterable[Hook]) -> dict[str, Any]:
    hooks: dict[str, Any] = {}
    for hook in wanted:
        entry: dict[str, Any] = {"path": hook.path, "args": list(hook.args), "env": list(hook.env)}
        if hook.timeout is not None:
            entry["timeout"] = hook.timeout
        hooks.setdefault(hook.name, []).append(entry)
    return hooks


def _resources(limits: Limits) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    if limits.memory_bytes is not None:
        resources["memory"] = {"limit": limits.memory_bytes}
        # Memory and swap together. Version 1 has the file only if the kernel accounts for swap.
        first = Path("/sys/fs/cgroup/memory")
        if not first.is_dir() or (first / "memory.memsw.limit_in_bytes").exists():
            resources["memory"]["swap"] = limits.memory_bytes
    if limits.cpus is not None:
        resources["cpu"] = {"quota": max(1000, round(limits.cpus * _PERIOD_US)), "period": _PERIOD_US}
    return resources


@cache
def seccomp() -> Mapping[str, Any]:
    """Return the filter of system calls, from ``seccomp.yaml``."""
    data = cast("dict[str, Any]", yamlfile.read(_SECCOMP_FILE, _SECCOMP_FILE.name).data)
    allow = "SCMP_ACT_ALLOW"
    calls: list[dict[str, Any]] = [{"names": words.split(), "action": allow} for words in data["allow"].values()]
    for rule in data["allow_for"]:
        argument: dict[str, Any] = {"index": int(rule["argument"])}
        if "without_bits" in rule:
            argument |= {"value": int(rule["without_bits"], 16), "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
        elif "other_than" in rule:
            argument |= {"value": int(rule["other_than"]), "op": "SCMP_CMP_NE"}
        else:
            argument |= {"value": int(rule["equal"], 16), "op": "SCMP_CMP_EQ"}
        calls.append({"names": [rule["call"]], "action": allow, "args": [argument]})
    calls.append({"names": [data["missing"]], "action": "SCMP_ACT_ERRNO", "errnoRet": 38})
    return {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 1, "syscalls": calls}
