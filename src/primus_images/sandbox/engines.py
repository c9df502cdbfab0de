"""The engines that can run a command in an image: podman and Docker."""

from primus_images.errors import HostError
from primus_images.sandbox.docker import Docker
from primus_images.sandbox.engine import Engine
from primus_images.sandbox.podman import Podman


def choose(name: str = "auto") -> Engine:
    """Return the engine called ``name``; ``auto`` prefers podman, which needs no daemon.

    Raises HostError, with what each engine lacks, if none can run.
    """
    problems = []
    for engine in (Podman(), Docker()):
        if name in ("auto", engine.name):
            try:
                engine.require()
            except HostError as error:
                problems.append(f"{engine.name}: {error.message} ({error.hint})")
            else:
                return engine
    raise HostError("no container engine can run here: " + "; ".join(problems))
