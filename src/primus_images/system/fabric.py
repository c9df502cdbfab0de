"""Network devices for several nodes.

RDMA ports with their GID, and the interface that NCCL and gloo should use.
"""

import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

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
_DEFAULT_GID = "3"  # older launch scripts set this index


def devices(host: Host) -> list[Path]:
    """Return the RDMA devices in /sys/class/infiniband."""
    return host.glob("sys/class/infiniband/*")


def rdma(host: Host) -> Iterator[Finding]:
    """Check that each RDMA port is up, has a usable GID and may be opened."""
    cards = devices(host)
    if not cards:
        yield finding("no_rdma")
        return
    yield from _chosen_cards(host, cards)
    ports = _ports(host)
    for port, problem in ports.items():
        if isinstance(problem, Finding):
            card = port.parents[1].name
            message = f"{card} port {port.name}: {problem.message}"
            yield replace(problem, message=message)
    yield from _rights(host)
    index = _common_gid(ports)
    advice = ""
    if index:
        advice = f"; NCCL_IB_GID_INDEX={index}"
        if index != _DEFAULT_GID:
            advice += " (older scripts set 3)"
    yield finding("rdma", ports=len(ports), advice=advice)


def _chosen_cards(host: Host, cards: Sequence[Path]) -> Iterator[Finding]:
    """Check that NCCL_IB_HCA names devices by the beginnings of their names."""
    chosen = host.environment.get("NCCL_IB_HCA", "")
    if chosen.startswith("^"):
        return
    for word in chosen.lstrip("=").split(","):
        name = word.partition(":")[0]
        if not any(card.name.startswith(name) for card in cards):
            yield finding("unknown_hca", name=name)


def _ports(host: Host) -> dict[Path, Finding | str]:
    return {port: _port(host, port) for port in host.glob(_PORTS)}


def _common_gid(ports: Mapping[Path, Finding | str]) -> str:
    """Return the GID index of all RoCE ports; empty if they have none, or not the same."""
    indices = {*ports.values()} - {""}
    if len(indices) == 1:
        (index,) = indices
        if isinstance(index, str):
            return index
    return ""


def _rights(host: Host) -> Iterator[Finding]:
    files = host.glob("dev/infiniband/uverbs*")
    if not files:
        yield finding("no_verbs")
    for path in files:
        if path.exists() and not os.access(path, os.R_OK | os.W_OK):
            shown = host.shown(path)
            group = path.stat().st_gid
            yield finding("closed_verbs", path=shown, user=os.geteuid(), group=group)
            return


def libraries(host: Host) -> Iterator[Finding]:
    """Check for libibverbs and the provider of each RDMA device.

    Without them, NCCL and RCCL fall back to TCP.
    """
    cards = devices(host)
    if not cards:
        return
    if not _library(host, "libibverbs.so.1"):
        yield finding("no_libibverbs")
        return
    table = _table()
    lacking: dict[str, list[str]] = {}
    for card in cards:
        provider = _provider(card, table["providers"])
        if provider and not _installed(host, provider):
            lacking.setdefault(provider, []).append(card.name)
    for provider, names in lacking.items():
        row = table["providers"][provider]
        yield finding("no_provider", provider=provider, row=row, names=", ".join(names))
    if not lacking:
        yield finding("providers")


@cache
def _table() -> Any:
    return read_values(Path(__file__).with_name("nics.yaml")).data


def _of_cards(host: Host) -> dict[str, Any]:
    """Return variable → its row, of those that concern the network devices of this machine."""
    table = _table()
    rows: dict[str, Any] = {}
    for card in devices(host):
        provider = _provider(card, table["providers"])
        rows |= table["variables"].get(provider, {})
    return rows


def faults(host: Host) -> Iterator[Finding]:
    """Check that no variable that the user has set causes a known fault of a network device."""
    for name, row in _of_cards(host).items():
        safe = row["value"]
        value = host.environment.get(name, safe)
        if "fault" in row and value != safe:
            sources = [source["by"] for source in row["stated"]]
            listed = "; ".join(sources)
            yield finding("nic_fault", name=name, value=value, row=row, sources=listed)


def _provider(card: Path, providers: Mapping[str, Any]) -> str:
    """Return the provider that a device needs; empty for a virtual one, which is in no table."""
    driver = (card / "device/driver").resolve().name
    for name, row in providers.items():
        if driver in row["driver"]:
            return name
    return ""


def _installed(host: Host, provider: str) -> bool:
    known = bool(host.glob(f"etc/libibverbs.d/{provider}.driver"))
    return known and _library(host, f"libibverbs/lib{provider}-rdmav*.so")


def _library(host: Host, name: str) -> bool:
    folders = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "lib64")
    return any(host.glob(f"{folder}/{name}") for folder in folders)


def _port(host: Host, port: Path) -> Finding | str:
    """Return the GID index to use ("" for InfiniBand), or what keeps the port from being used."""
    state = _state(host, port / "state")
    if "ACTIVE" not in state:
        physical = _state(host, port / "phys_state")
        return finding("link", state=state, physical=physical)
    if host.text(port / "link_layer") != "Ethernet":
        return ""
    usable = _usable_gids(host, port)
    if not usable:
        return finding("no_gid")
    routed = [index for index, gid in usable.items() if gid.startswith(_IPV4)]
    best = min(routed or usable)
    chosen = host.environment.get("NCCL_IB_GID_INDEX", "")
    if chosen.isdecimal() and int(chosen) not in usable:
        return finding("other_gid", gid=chosen, best=best)
    return str(best)


def _state(host: Host, file: Path) -> str:
    """Return the words of a state, which the kernel writes after its number."""
    _, _, words = host.text(file).partition(": ")
    return words or "unknown"


def _usable_gids(host: Host, port: Path) -> dict[int, str]:
    """Return index → GID of RoCE version 2."""
    usable = {}
    kinds = port / "gid_attrs/types"
    for path in (port / "gids").glob("*"):
        index = path.name
        gid = host.text(path)
        kind = host.text(kinds / index)
        if index.isdigit() and gid not in ("", _EMPTY_GID) and "v2" in kind:
            usable[int(index)] = gid
    return usable


def variables(host: Host) -> dict[str, str]:
    """Return the variables that make NCCL and RCCL use the ports that can be used, and safely.

    They are empty without such a port. A variable that the user has set, and a GID index on which
    the ports do not agree, are left out.
    """
    usable: dict[Path, Finding | str] = {}
    names = []
    for port, index in _ports(host).items():
        if isinstance(index, str):
            usable[port] = index
            card = port.parents[1].name
            names.append(f"{card}:{port.name}")
    if not usable or any(_rights(host)):
        return {}
    safe = {name: row["value"] for name, row in _of_cards(host).items()}
    safe["NCCL_IB_HCA"] = "=" + ",".join(names)
    safe["NCCL_IB_GID_INDEX"] = _common_gid(usable)
    return {name: value for name, value in safe.items() if value and name not in host.environment}


def _best_interface(host: Host) -> str:
    """Return the interface of the default route, else the fastest one that is up."""
    speeds = {}
    for path in host.glob("sys/class/net/*"):
        up = host.text(path / "operstate") in ("up", "unknown")
        if up and not _VIRTUAL.match(path.name):
            speeds[path.name] = host.number(path / "speed") or 0
    for line in host.text("proc/net/route").splitlines()[1:]:
        fields = line.split()
        if len(fields) <= 7:
            continue
        name = fields[0]
        everywhere = fields[1] == fields[7] == "00000000"
        if everywhere and name in speeds:
            return name
    return max(speeds, key=speeds.__getitem__, default="")


def interface(host: Host) -> Iterator[Finding]:
    """Check that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name interfaces that are up.

    Recommends that of the default route, else the fastest that is up.
    """
    best = _best_interface(host)
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        text = host.environment.get(variable, "")
        if not text or text.startswith("^"):
            continue
        for word in text.lstrip("=").split(","):
            problem = _interface_problem(host, word.strip())
            if problem:
                yield finding(
                    "wrong_interface",
                    variable=variable,
                    word=word,
                    what=problem,
                    best=best or "NAME",
                )
    if best:
        yield finding("interface", best=best)
    else:
        yield finding("no_interface")


def _interface_problem(host: Host, beginning: str) -> str:
    folders = [path for path in host.glob("sys/class/net/*") if path.name.startswith(beginning)]
    if not folders:
        return "does not exist"
    if all(host.text(folder / "operstate") == "down" for folder in folders):
        return "is down"
    return ""


def own_address(host: str) -> str:
    """Return this machine's IPv4 address on the route to ``host``.

    It is empty without a route, or if ``host`` is unknown.
    """
    with suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        address = str(probe.getsockname()[0])
        if address != "0.0.0.0":
            return address
    return ""


def interface_towards(host: str) -> str:
    """Return the interface on the route to ``host``; empty if unknown."""
    address = ""
    if host:
        address = own_address(host)
    if not address:
        return ""
    if address.startswith("127."):
        return "lo"
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
