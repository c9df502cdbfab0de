"""The Docker engine, without a Docker daemon."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from primus.sandbox import docker

FRAME = b"\x01\0\0\0\0\0\0\x02y\n"


class _Api:
    """A daemon whose only container prints until it is removed."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.removed = False
        self._talk = threading.Thread(target=self._print, daemon=True)

    def _print(self) -> None:
        with self.theirs:
            while not self.removed:
                try:
                    self.theirs.sendall(FRAME)
                except OSError:
                    return

    def create_host_config(self, **_: Any) -> dict[str, Any]:
        return {}

    def create_container(self, **_: Any) -> dict[str, str]:
        return {"Id": "one"}

    def attach_socket(self, *_: Any, **__: Any) -> socket.socket:
        return self.ours

    def start(self, _: str) -> None:
        self._talk.start()

    def remove_container(self, *_: Any, **__: Any) -> None:
        self.removed = True
        self._talk.join()


def test_an_endless_command_ends_with_the_reader_of_its_output() -> None:
    class Client:
        api = _Api()

    read, write = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    with os.fdopen(nothing) as stdin, os.fdopen(write, "w") as stdout:
        os.close(read)
        streams = docker._Streams(stdin, stdout, stdout, terminal=False)
        assert docker._once(Client, {"entrypoint": ["yes"]}, {}, streams) == 141  # type: ignore[arg-type]
    assert Client.api.removed
