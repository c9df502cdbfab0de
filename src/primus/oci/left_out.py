"""GPU code for other GPUs that the build left out of an image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from primus.terminal import bytes_text


class LeftOut(NamedTuple):
    """Number and bytes of the files left out; number of code objects removed from files, and their bytes; path and
    targets of each file that lost code. It is a row in JSON records.
    """

    files: int = 0
    size: int = 0
    objects: int = 0
    freed: int = 0
    targets: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def of(cls, row: Sequence[Any]) -> LeftOut:
        """Create it from a row of a record, whose last items may be missing."""
        targets = row[4] if len(row) > 4 else ()
        return cls(*row[:4], targets=tuple((path, tuple(names)) for path, names in targets))  # type: ignore[misc]

    @classmethod
    def sum(cls, several: Iterable[LeftOut]) -> LeftOut:
        """Return the sum of several."""
        rows = list(several)
        return cls(
            files=sum(row.files for row in rows),
            size=sum(row.size for row in rows),
            objects=sum(row.objects for row in rows),
            freed=sum(row.freed for row in rows),
            targets=tuple(target for row in rows for target in row.targets),
        )

    def and_file(self, size: int) -> LeftOut:
        """Add one file."""
        return self._replace(files=self.files + 1, size=self.size + size)

    def and_code(self, path: str, objects: int, freed: int, targets: Sequence[str]) -> LeftOut:
        """Add the code objects removed from one file."""
        more = ((path, tuple(targets)),) if objects else ()
        return self._replace(objects=self.objects + objects, freed=self.freed + freed, targets=self.targets + more)

    def inside(self, path: str) -> list[str]:
        """Return the targets of the code removed from the file ``path`` or, if it ends with ``/``, from the
        files in that folder.
        """
        named = (of for name, of in self.targets if name == path or (path.endswith("/") and name.startswith(path)))
        return sorted({target for of in named for target in of})

    def text(self) -> str:
        """Describe it in words; empty if nothing was left out."""
        sentences = []
        if self.files:
            sentences.append(f"{self.files:,} kernel files left out, {bytes_text(self.size)}")
        if self.objects:
            where = f"{len(self.targets)} {'file' if len(self.targets) == 1 else 'files'}"
            sentences.append(f"{self.objects:,} code objects taken out of {where}, {bytes_text(self.freed)}")
        return "; ".join(sentences)


NOTHING: LeftOut = LeftOut()
