"""Which network interface leads to another machine, as NCCL and gloo must be told. Reads the kernel; sends nothing."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # connecting a datagram socket only chooses a route


def own_address(host: str) -> str:
    """This machine's IPv4 address on the route to ``host``; empty where there is no route or ``host`` is unknown."""
    with suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        address = str(probe.getsockname()[0])
        return "" if address == "0.0.0.0" else address
    return ""


def interfaces() -> dict[str, str]:
    """Interface → its first IPv4 address, of the interfaces that have one."""
    found = {}
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_towards(host: str) -> str:
    """The interface on the route to ``host``; empty where nothing tells."""
    if not host or not (address := own_address(host)):
        return ""
    if address.startswith("127."):
        return "lo"
    return next((name for name, own in interfaces().items() if own == address), "")
