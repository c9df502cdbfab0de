"""Where Python lives in an image."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The Python environment of the image: ``root`` without leading slash, ``python`` as major.minor."""

    root: str = "opt/venv"
    python: str

    @property
    def site(self) -> str:
        """Where modules go."""
        return f"{self.root}/lib/python{self.python}/site-packages"

    @property
    def interpreter(self) -> str:
        """The interpreter that scripts name."""
        return f"/{self.root}/bin/python3"
