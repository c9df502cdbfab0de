"""The synthetic graph: twelve components with one blob and many small files each, and a folder of
recipes.

The same folder is a Docker build context and a project of ours, so both builders read the same
bytes from the same page cache.
"""

import random
from dataclasses import dataclass
from pathlib import Path

COMPONENTS = 12
RECIPES = 24
TARGETS = ("a", "b", "c", "d")
_SEED = 20261120


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The generated folder and its sizes."""

    root: Path
    blob_megabytes: int
    small_files: int

    def change_component(self, turn: int) -> None:
        """Rewrite one component's blob with different bytes of the same size."""
        _blob(
            self.root / "components" / _names()[turn % COMPONENTS] / "blob.bin",
            self.blob_megabytes,
            f"turn {turn}",
        )

    def change_recipe(self, turn: int) -> None:
        """Rewrite one recipe file."""
        (self.root / "recipes" / "r00.yaml").write_text(_recipe(0, turn))

    def warm(self) -> None:
        """Read every input once, so that a cold build starts with its inputs in the page cache."""
        for path in sorted(self.root.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    while file.read(1 << 20):
                        pass


def generate(root: Path, *, blob_megabytes: int = 20, small_files: int = 200) -> Graph:
    """Write the components, the recipes and both builders' descriptions of them below ``root``."""
    for name in _names():
        folder = root / "components" / name
        (folder / "lib").mkdir(parents=True)
        _blob(folder / "blob.bin", blob_megabytes, name)
        rng = random.Random(f"{_SEED} {name}")
        for index in range(small_files):
            (folder / "lib" / f"m{index:03}.py").write_text(f"VALUE = {rng.getrandbits(4096):#x}\n")
    (root / "recipes").mkdir()
    for index in range(RECIPES):
        (root / "recipes" / f"r{index:02}.yaml").write_text(_recipe(index, 0))
    _describe_for_docker(root)
    _describe_for_primus(root)
    return Graph(root=root, blob_megabytes=blob_megabytes, small_files=small_files)


def _names() -> tuple[str, ...]:
    return tuple(f"c{index:02}" for index in range(1, COMPONENTS + 1))


def _blob(path: Path, megabytes: int, salt: str) -> None:
    rng = random.Random(f"{_SEED} {salt}")
    # One megabyte at a time, so that this process stays small: a child inherits its parent's peak
    # memory in ru_maxrss.
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(rng.randbytes(1 << 20))


def _recipe(index: int, turn: int) -> str:
    return f"model: m{index:02}\nsteps: {10 + turn}\n"


def _describe_for_docker(root: Path) -> None:
    lines = []
    for name in _names():
        lines += [f"FROM scratch AS {name}", f"COPY components/{name} /opt/{name}", ""]
    for target in TARGETS:
        lines += [f"FROM scratch AS {target}"]
        lines += [f"COPY --from={name} /opt/{name} /opt/{name}" for name in _names()]
        lines += ["COPY recipes /opt/primus/recipes", f"LABEL target={target}", ""]
    (root / "Dockerfile").write_text("\n".join(lines))
    (root / ".dockerignore").write_text("*\n!components\n!recipes\n")


def _describe_for_primus(root: Path) -> None:
    """Write our project files. Only this function depends on the format of images/*.yaml."""
    paths = {name: (f"components/{name}", f"/opt/{name}") for name in _names()}
    paths["recipes"] = ("recipes", "/opt/primus/recipes")
    lines = ["release: v26.11", "created: 2026-11-20", "bases: {}", "components:"]
    for name, (path, to) in paths.items():
        lines += [
            f"  {name}:",
            f"    name: {name}",
            f"    pins: [{{path: {path}, to: {to}, channel: local}}]",
        ]
    (root / "versions.yaml").write_text("\n".join(lines) + "\n")
    (root / "images").mkdir()
    for target in TARGETS:
        text = (
            f"description: Synthetic {target}\nchannels: [local]\ncomponents: "
            f"[{', '.join(paths)}]\n"
        )
        (root / "images" / f"{target}.yaml").write_text(text)
