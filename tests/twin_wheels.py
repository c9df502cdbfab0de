"""How indexes answer pip, which reads a wheel's metadata."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from source_twins import PEP, Answer, Behaviour, Twins
from twin_indexes import PIP, TORCH, Part, page


def wheel(page_of: Callable[[Answer, Path], str], metadata: Part | None = None) -> Part:
    """An index of the wheel of torch; pip reads its metadata."""

    def answer(one: Answer, rest: str) -> None:
        path = one.twins.wheel
        if rest.startswith("simple/torch/"):
            return page(one, page_of(one, path))
        if rest.endswith(".metadata"):
            return (metadata or (lambda a, _: a.reply(200, pkg_info(path), Content_Type="text/plain")))(one, rest)
        if rest.startswith("files/") and not rest.endswith(".metadata"):
            return one.reply(200, path.read_bytes(), Content_Type="application/octet-stream")
        return one.reply(403)

    return answer


def pkg_info(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA")))


def wheel_link(more: Callable[[Path], str] = lambda _: "") -> Callable[[Answer, Path], str]:
    def text(one: Answer, path: Path) -> str:
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        return f'<a href="../../files/{quote(path.name)}#sha256={sha256}"{more(path)}>{path.name}</a>'

    return text


def core_metadata(path: Path) -> str:
    return f' data-core-metadata="sha256={hashlib.sha256(pkg_info(path)).hexdigest()}"'


def busy(one: Answer, rest: str) -> None:
    # The probe and this project's own look at the page come on top of pip's.
    if rest.startswith("simple/") and "pip/" in one.headers.get("User-Agent", "") and one.nth() < 1:
        return one.reply(429, Retry_After="1")
    return wheel(wheel_link())(one, rest)


def pip_hangs(one: Answer, rest: str) -> None:
    if rest.startswith("simple/") and "pip/" in one.headers.get("User-Agent", ""):
        return one.hang()
    return wheel(wheel_link())(one, rest)


def not_read(here: Twins, name: str) -> bool:
    """pip took the metadata alone, not the gigabytes of the wheel."""
    return not [rest for method, rest, _ in here.seen[name] if method == "GET" and rest.endswith(".whl")]


TORCH_PIN = {"way": "wheel", "package": "torch", "version": "2.12.0+rocm10.0.0"}
WHEELS = (
    Behaviour(
        name="metadata-beside",
        source=PEP.format("0658"),
        answer=wheel(wheel_link(core_metadata)),
        check=lambda here, _: not_read(here, "metadata-beside"),
        **TORCH_PIN,
    ),
    Behaviour(
        name="metadata-differs",
        source=TORCH.format(197552),
        answer=wheel(
            wheel_link(core_metadata),
            lambda one, _: one.reply(200, b"Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0+rocm10.0.0\n\nother\n"),
        ),
        says="sent different bytes than it announced",
        **TORCH_PIN,
    ),
    Behaviour(
        name="wheel-yanked",
        source=PEP.format("0592"),
        answer=wheel(wheel_link(lambda _: ' data-yanked=""')),
        **TORCH_PIN,
    ),
    Behaviour(
        name="wheel-for-another-python",
        source=PEP.format("0503"),
        answer=wheel(wheel_link(lambda _: ' data-requires-python="&gt;=3.13"')),
        says="torch",
        **TORCH_PIN,
    ),
    Behaviour(name="wheel-429", source=PIP.format(11006), answer=busy, **TORCH_PIN),
    Behaviour(name="wheel-index-403", source=TORCH.format(81900), answer=wheel(wheel_link()), **TORCH_PIN),
    Behaviour(
        name="pip-waits",
        source="https://github.com/ROCm/legacy-rocm-build/issues/1153",
        answer=pip_hangs,
        says="stopped answering while pip resolved",
        warns="has sent nothing",
        **TORCH_PIN,
    ),
)
