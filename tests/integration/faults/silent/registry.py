"""The faults by name. A fault changes a module after it was loaded; training goes on, and nothing
is printed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Silent(NamedTuple):
    """``kind`` is the class of fault. At least one of the checks must fail; their names lack the
    word "reference".
    """

    kind: str
    backend: str
    words: tuple[str, ...]
    module: str
    checks: tuple[str, ...]
    change: Callable[[Any], None]


SILENT: dict[str, Silent] = {}


def silent(kind: str, job: str, module: str, *checks: str) -> Any:
    """Register a function that changes ``module`` for a ``job``, which is a backend and words of
    the command.
    """
    backend, *words = job.split()

    def register(change: Callable[[Any], None]) -> Callable[[Any], None]:
        SILENT[f"{backend}_{change.__name__}"] = Silent(
            kind, backend, tuple(words), module, checks, change
        )
        return change

    return register


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``around(original, *arguments)``."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
