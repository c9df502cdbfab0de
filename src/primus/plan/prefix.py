"""The location of Python in an image."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The Python environment of the image: ``root`` without a leading slash, ``python`` as major.minor."""

    root: str = "opt/venv"
    python: str

    @property
    def site(self) -> str:
        """The folder of the modules."""
        return f"{self.root}/lib/python{self.python}/site-packages"

    @property
    def interpreter(self) -> str:
        """The path of the interpreter, as scripts name it."""
        return f"/{self.root}/bin/python3"
