"""Find the network interface on the route to another machine, for NCCL and gloo. Reads the kernel; sends nothing."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # connecting a datagram socket only selects a route


def own_address(host: str) -> str:
    """Return this machine's IPv4 address on the route to ``host``; empty without a route, or if ``host`` is unknown."""
    with suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        address = str(probe.getsockname()[0])
        return "" if address == "0.0.0.0" else address
    return ""


def interfaces() -> dict[str, str]:
    """Return interface → its first IPv4 address, for the interfaces that have one."""
    found = {}
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_towards(host: str) -> str:
    """Return the interface on the route to ``host``; empty if unknown."""
    if not host or not (address := own_address(host)):
        return ""
    if address.startswith("127."):
        return "lo"
    return next((name for name, own in interfaces().items() if own == address), "")
