"""Changes of a document's content, for tests of what is told of a changed one."""

from collections.abc import Callable
from typing import Any

Change = Callable[[Any], object]


def put(*path: str | int, value: Any) -> Change:
    """Return the change that sets ``value`` at ``path``, or what it makes of the old one."""

    def change(content: Any) -> None:
        *above, last = path
        for part in above:
            content = content[part]
        content[last] = value(content[last]) if callable(value) else value

    return change
