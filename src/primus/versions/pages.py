"""The files that an index offers: simple pages (PEP 503 HTML, PEP 691 JSON) and local folders."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import url2pathname

# The types that pip accepts. It ignores a page of any other type, and then reports that the version does not exist.
_TYPES = ("text/html", "application/vnd.pypi.simple.")
_ARCHIVES = (".whl", ".tar.gz", ".zip", ".metadata")


class NotAPage(Exception):
    """The answer is not a list of files. The message describes it."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One file of an index. ``sha256`` and ``size`` are None if the page does not state them."""

    file: str
    url: str
    sha256: str | None = None
    size: int | None = None
    requires_python: str | None = None


def parse_page(text: str, content_type: str, url: str) -> tuple[Link, ...]:
    """Return the links of a simple page, PEP 691 JSON or PEP 503 HTML. Raises NotAPage for anything else."""
    if not content_type.lower().startswith(_TYPES):
        raise NotAPage(f"it sends {content_type.partition(';')[0] or 'no Content-Type'}, which pip does not read")
    if "json" in content_type:
        return _json_links(text, url)
    reader = _Anchors()
    reader.feed(text)
    if reader.form and not any(urlsplit(href).path.endswith(_ARCHIVES) for href, _ in reader.hrefs):
        raise NotAPage("it sends a web page with a form, such as a login, and no list of files")
    base = urljoin(url, reader.base) if reader.base else url
    return tuple(_link(urljoin(base, href), needs) for href, needs in reader.hrefs)


def _json_links(text: str, url: str) -> tuple[Link, ...]:
    try:
        files = json.loads(text)["files"]
        return tuple(
            Link(
                file=f["filename"],
                url=urljoin(url, f["url"]),
                sha256=f.get("hashes", {}).get("sha256"),
                size=f.get("size"),
                requires_python=f.get("requires-python"),
            )
            for f in files
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotAPage("it sends JSON that is no list of files (PEP 691)") from None


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[tuple[str, str | None]] = []
        self.base: str | None = None
        self.form = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        href = names.get("href")
        self.form = self.form or tag == "form"
        if href and tag == "a":
            self.hrefs.append((href, names.get("data-requires-python")))
        elif href and tag == "base" and self.base is None:
            self.base = href


def _link(url: str, requires_python: str | None) -> Link:
    bare, fragment = urldefrag(url)
    match = re.search(r"(?:^|&)sha256=([0-9a-f]{64})", fragment)
    return Link(
        file=unquote(urlsplit(bare).path.rpartition("/")[2]),
        url=bare,
        sha256=match[1] if match else None,
        requires_python=requires_python,
    )


def local_path(url: str) -> Path | None:
    """Return the path of a file: URL or a bare path; None for a remote URL."""
    parts = urlsplit(url)
    if parts.scheme in ("file", "copy"):
        return Path(url2pathname(parts.path))
    return Path(url).expanduser() if parts.scheme == "" else None


def folder(path: Path) -> tuple[Link, ...]:
    """Return the files of a find-links folder, of one page file, or of a static index folder (with index.html)."""
    if path.is_file():
        return parse_page(path.read_text(encoding="utf-8"), "text/html", path.as_uri())
    if not path.is_dir():
        return ()
    index = path / "index.html"
    if index.is_file():
        return parse_page(index.read_text(encoding="utf-8"), "text/html", path.resolve().as_uri() + "/")
    return tuple(Link(file=p.name, url=p.resolve().as_uri()) for p in sorted(path.iterdir()) if p.is_file())
