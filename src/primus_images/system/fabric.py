"""Network devices for several nodes: RDMA ports with their GID, and the interface that NCCL and
gloo should use.
"""

import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from primus_images.system.host import Finding, Host, finding
from primus_images.yamlfile import read_values

_EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_IPV4 = "0000:0000:0000:0000:0000:ffff"
_VIRTUAL = re.compile(
    r"lo$|docker|br-|veth|virbr|cni|flannel|cali|cilium|tailscale|tun|tap|dummy|podman|lxc"
)
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # connecting a datagram socket only selects a route
_PORTS = "sys/class/infiniband/*/ports/*"
_DEFAULT_GID = 3  # older launch scripts set this index


def devices(host: Host) -> list[Path]:
    """Return the RDMA devices in /sys/class/infiniband."""
    return host.glob("sys/class/infiniband/*")


def rdma(host: Host) -> Iterator[Finding]:
    """Check that each RDMA port is up, has a usable GID and may be opened, and that like devices
    have one firmware.
    """
    cards = devices(host)
    if not cards:
        yield finding("no_rdma")
        return
    chosen = host.environment.get("NCCL_IB_HCA", "")
    if not chosen.startswith("^"):
        names = chosen.lstrip("=").split(",")
    else:
        names = []
    for name in (word.partition(":")[0] for word in names):
        if name and not any(card.name.startswith(name) for card in cards):
            yield finding("unknown_hca", name=name)
    ports = {port: _port(host, port) for port in host.glob(_PORTS)}
    for port, problem in ports.items():
        if isinstance(problem, Finding):
            yield replace(
                problem, message=f"{port.parents[1].name} port {port.name}: {problem.message}"
            )
    firmware: dict[str, set[str]] = {}
    for card in cards:
        board = host.text(card / "board_id") or host.text(card / "hca_type")
        firmware.setdefault(board, set()).add(host.text(card / "fw_ver"))
    for board, versions in firmware.items():
        if len(versions) > 1:
            yield finding(
                "firmware", board=board or "unknown", versions=", ".join(sorted(versions))
            )
    yield from _rights(host)
    indices = {*ports.values()} - {""}
    advice = ""
    if len(indices) == 1 and isinstance(index := indices.pop(), str):
        advice = f"; NCCL_IB_GID_INDEX={index}" + (
            "" if int(index) == _DEFAULT_GID else " (older scripts set 3)"
        )
    yield finding("rdma", ports=len(ports), advice=advice)


def _rights(host: Host) -> Iterator[Finding]:
    files = host.glob("dev/infiniband/uverbs*")
    closed = [path for path in files if path.exists() and not os.access(path, os.R_OK | os.W_OK)]
    if not files:
        yield finding("no_verbs")
    elif closed:
        group = closed[0].stat().st_gid
        yield finding("closed_verbs", path=host.shown(closed[0]), user=os.geteuid(), group=group)


def libraries(host: Host) -> Iterator[Finding]:
    """Check for libibverbs and the provider of each RDMA device. Without them, NCCL and RCCL fall
    back to TCP.
    """
    cards = devices(host)
    if not cards:
        return
    if not _library(host, "libibverbs.so.1"):
        yield finding("no_libibverbs")
        return
    table = cast("dict[str, Any]", read_values(Path(__file__).with_name("nics.yaml")).data)[
        "providers"
    ]
    lacking: dict[str, list[str]] = {}
    for device in cards:
        # A virtual device is not in the table.
        driver = (device / "device/driver").resolve().name
        provider = next((name for name, row in table.items() if driver in row["driver"]), None)
        if provider and not (
            host.glob(f"etc/libibverbs.d/{provider}.driver")
            and _library(host, f"libibverbs/lib{provider}-rdmav*.so")
        ):
            lacking.setdefault(provider, []).append(device.name)
    for provider, names in lacking.items():
        yield finding("no_provider", provider=provider, row=table[provider], names=", ".join(names))
    if not lacking:
        yield finding("providers")


def _library(host: Host, name: str) -> bool:
    return any(
        host.glob(f"{folder}/{name}")
        for folder in ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "lib64")
    )


def _port(host: Host, port: Path) -> Finding | str:
    """Return the GID index to use as text ("" for InfiniBand), or a finding if the port cannot be
    used.
    """
    state, physical = (
        host.text(port / name).partition(": ")[2] or "unknown" for name in ("state", "phys_state")
    )
    if "ACTIVE" not in state:
        return finding("link", state=state, physical=physical)
    if host.text(port / "link_layer") != "Ethernet":
        return ""
    gids = {
        int(path.name): host.text(path) for path in (port / "gids").glob("*") if path.name.isdigit()
    }
    types = {index: host.text(port / "gid_attrs/types" / str(index)) for index in gids}
    usable = {
        index: gid
        for index, gid in gids.items()
        if gid not in ("", _EMPTY_GID) and "v2" in types[index]
    }
    if not usable:
        return finding("no_gid")
    best = min(usable, key=lambda index: (not usable[index].startswith(_IPV4), index))
    chosen = host.environment.get("NCCL_IB_GID_INDEX", "")
    if chosen.isdecimal() and int(chosen) not in usable:
        return finding("other_gid", gid=chosen, best=best)
    return str(best)


def variables(host: Host) -> dict[str, str]:
    """Return the variables that make NCCL and RCCL use the ports that can be used; empty without
    such a port.

    A variable that the user has set, and a GID index on which the ports do not agree, are left out.
    """
    usable = {
        port: index for port in host.glob(_PORTS) if isinstance(index := _port(host, port), str)
    }
    if not usable or any(_rights(host)):
        return {}
    chosen = {
        "NCCL_IB_HCA": "=" + ",".join(f"{port.parents[1].name}:{port.name}" for port in usable)
    }
    if len(indices := {*usable.values()} - {""}) == 1:
        chosen["NCCL_IB_GID_INDEX"] = indices.pop()
    return {name: text for name, text in chosen.items() if name not in host.environment}


def _best_interface(host: Host) -> str:
    real = (path for path in host.glob("sys/class/net/*") if not _VIRTUAL.match(path.name))
    candidates = [path.name for path in real if host.text(path / "operstate") in ("up", "unknown")]
    for line in host.text("proc/net/route").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000" and fields[0] in candidates:
            return fields[0]
    return max(
        candidates, key=lambda name: host.number(f"sys/class/net/{name}/speed") or 0, default=""
    )


def interface(host: Host) -> Iterator[Finding]:
    """Check that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name interfaces that are up, or
    recommend one: that of the default route, else the fastest that is up.
    """
    best = _best_interface(host)
    folders = host.glob("sys/class/net/*")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        text = host.environment.get(variable, "")
        for word in text.lstrip("=").split(",") if text and not text.startswith("^") else ():
            states = [
                host.text(folder / "operstate")
                for folder in folders
                if folder.name.startswith(word.strip())
            ]
            if all(state == "down" for state in states):
                what = "does not exist"
                if states:
                    what = "is down"
                yield finding(
                    "wrong_interface", variable=variable, word=word, what=what, best=best or "NAME"
                )
    yield finding("interface" if best else "no_interface", best=best)


def own_address(host: str) -> str:
    """Return this machine's IPv4 address on the route to ``host``; empty without a route, or if
    ``host`` is unknown.
    """
    with suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        address = str(probe.getsockname()[0])
        if address == "0.0.0.0":
            return ""
        return address
    return ""


def interface_towards(host: str) -> str:
    """Return the interface on the route to ``host``; empty if unknown."""
    if not host or not (address := own_address(host)):
        return ""
    if address.startswith("127."):
        return "lo"
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
