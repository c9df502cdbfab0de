"""Compare the machine code in two folders of kernels compiled ahead of time for one NVIDIA architecture.

``python -m benchmarks.same_kernels ONE OTHER ARCH`` takes folders as `primus turbo compile --out` writes them. Keys and
debug lines may differ, because they depend on the Triton version and the source folder. Instructions, constants and
shared memory must be equal; otherwise the exit code is 1.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

from primus.gpucode.elf import read_elf

_CODE = (".text", ".nv.constant", ".nv.shared")


def machine_code(path: Path) -> str:
    """Return a hash of what a GPU runs of the cubin at ``path``: instructions, constants and the size of shared
    memory.
    """
    found = hashlib.sha256()
    with path.open("rb") as stream:
        for section in sorted(read_elf(stream).sections, key=lambda one: one.name):
            if section.name.startswith(_CODE):
                found.update(f"{section.name} {section.size}\0".encode())
                # Shared memory has a size but no bytes in the file.
                if not section.name.startswith(".nv.shared"):
                    stream.seek(section.offset)
                    found.update(stream.read(section.size))
    return found.hexdigest()


def _kernels(folder: Path, arch: str) -> Counter[tuple[str, str, str]]:
    """Return the function, the requesting call and the machine code of each kernel."""
    (base,) = folder.glob(f"*/{arch}")
    index = json.loads((base / "index.json").read_text(encoding="utf-8"))
    found: Counter[tuple[str, str, str]] = Counter()
    for kernel in index["kernels"]:
        (cubin,) = (base / kernel["key"]).glob("*.cubin")
        found[kernel["function"], kernel["case"], machine_code(cubin)] += 1
    return found


def compare(one: Path, other: Path, arch: str) -> dict[str, int]:
    """Return the number of kernels in each folder, and how many of them are the same in both."""
    first, second = _kernels(one, arch), _kernels(other, arch)
    return {"kernels": first.total(), "others": second.total(), "same_machine_code": (first & second).total()}


def main() -> int:
    """Print the comparison."""
    found = compare(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    print(json.dumps(found))
    return 0 if len(set(found.values())) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
