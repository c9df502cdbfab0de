"""Build the site: ``python -m docs.site [--links] [--versions SITE] [FOLDER]`` writes it to
FOLDER/source and FOLDER/html (out/site).

``--versions`` also copies it to SITE/RELEASE, beside the sites of other releases, and lists them in
SITE/index.html. DOCS_URL is the address of the site, which its page for missing pages needs, and
DOCS_SOURCE that of the repository, for the footer.

The pages are those of docs/ and of other folders, as they are, and pages made from the same
functions as the commands. Every warning is an error, and so is a link to a page, a heading or a
file that does not exist. ``--links`` follows the links to other sites instead, and lists them with
their status in FOLDER/links/output.txt. It needs a network.
"""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

from docs.site.models import gpu_page, models_page
from docs.site.performance import performance
from docs.site.picker import picker
from docs.site.reference import reference
from docs.site.rocm import rocm_data
from primus_images.cli.version import release_of
from primus_images.gpus.table import load_table
from primus_images.yamlfile import read_values

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
# What is not in docs/, and the page that the site has for it.
ELSEWHERE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "src/primus_images/training/judge/reference/README.md": "reference-model.md",
    "src/primus_images/engine/README.md": "engine.md",
    "src/primus_images/gates/README.md": "how-gates-examine.md",
    "src/primus_images/release/README.md": "statement-format.md",
    "src/primus_images/training/README.md": "flops.md",
    "src/primus_images/turbo/README.md": "self-test.md",
    "src/primus_images/compat/README.md": "old-commands.md",
}
STANDS_FOR = {
    "README.md": "index.md",
    "README.md#targets": "reference/images.md",
    "README.md#quickstart": "index.md#quickstart",
    "recipes": "models.md",
    "src/primus_images/gpus/generations.yaml": "gpus.md",
    "images": "reference/images.md",
    "LICENSE": "license.md",
    "src/primus_images/recipes/keys": "recipes.md",
}
# The words that a search finds a page by, besides those on it.
_KEYWORDS = HERE / "keywords.yaml"
# The order of the pages beside each page of the site.
_CONTENTS = HERE / "contents.md"
_VERSIONS = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>primus-images: versions of the documentation</title>
<h1>primus-images: versions of the documentation</h1>
<ul>
{rows}
</ul>
</html>
"""
_NOT_FOUND = """\
---
orphan: true
---
# This page does not exist

It may have moved. <a href="search.html">Search</a> for a word of its title, or begin at the
[first page](index.md).
"""
_LINK = re.compile(r"(?<=\]\()([^)\s:#]*)(#[^)\s]*)?(?=\))")
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def written() -> dict[str, str]:
    """Return path in the repository → path in the site, for every page that people write."""
    paths = [*(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks/reports").glob("*.md")]
    names = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    return {
        name: name.removeprefix("docs/").replace("benchmarks/reports", "measured") for name in names
    } | ELSEWHERE


def assemble(source: Path) -> list[str]:
    """Write the sources of all pages, and the files that they link to. Returns the links that lead
    nowhere.
    """
    places, broken = written(), []
    made = {
        **reference(ROOT),
        "models.md": models_page(),
        "gpus.md": gpu_page(load_table()),
        "performance.md": performance(ROOT),
        "license.md": f"# License\n\n{(ROOT / 'LICENSE').read_text('utf-8')}",
        "404.md": _NOT_FOUND,
    }
    texts = {page: ((ROOT / page).read_text("utf-8"), target) for page, target in places.items()}
    front, target = texts["docs/index.md"]
    texts["docs/index.md"] = f"{front}\n{_CONTENTS.read_text('utf-8')}", target
    texts |= {f"docs/{target}": (text, target) for target, text in made.items()}
    places |= {f"docs/{target}": target for target in made} | STANDS_FOR

    for page, (text, target) in texts.items():

        def link(match: re.Match[str], page: str = page, target: str = target) -> str:
            if not match[1]:
                return match[0]
            path, heading = os.path.normpath(Path(page).parent / match[1]), match[2] or ""
            if path + heading in places:
                path, heading = path + heading, ""
            if path == "README.md":  # the first page has none of its headings
                heading = ""
            place = places.get(path)
            if place == target and path.endswith(".json"):  # the page that is made of this file
                place = None
            if place is None and (ROOT / path).is_file():
                place = f"files/{path}"
                (source / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, source / place)
            if place is None:
                broken.append(f"{page}: {match[0]}")
                return match[0]
            return os.path.relpath(place, Path(target).parent) + heading

        parts = _FENCED.split(text)
        body = "".join(
            part if number % 2 else _LINK.sub(link, part) for number, part in enumerate(parts)
        )
        (source / target).parent.mkdir(parents=True, exist_ok=True)
        body = _with_keywords(target.removesuffix(".md"), body)
        (source / target).write_text(body, "utf-8")
    return broken


def _with_keywords(page: str, text: str) -> str:
    """Return ``text`` with the words that a search for the page may use besides its own."""
    words = read_values(_KEYWORDS).data.get(page, [])
    if not words:
        return text
    head = f'---\nmyst:\n  html_meta:\n    keywords: "{", ".join(words)}"\n---\n'
    return head + text


def for_machines(source: Path, html: Path) -> None:
    """Write each page as Markdown beside its HTML, and llms.txt, which lists them
    (https://llmstxt.org).
    """
    if (files := source / "files").is_dir():
        shutil.copytree(files, html / "files")
    lines = [
        "# primus-images",
        "",
        "> Container images for LLM training on AMD Instinct GPUs.",
        "",
        "## Pages",
        "",
    ]
    for path in sorted(source.rglob("*.md")):
        name = path.relative_to(source)
        (html / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, html / name)
        title = re.search(r"^# (.+)$", path.read_text("utf-8"), re.MULTILINE)
        lines.append(f"- [{title[1] if title else name.stem}]({name})")
    (html / "llms.txt").write_text("\n".join([*lines, ""]), "utf-8")


def add_version(html: Path, site: Path, release: str) -> None:
    """Copy the site in ``html`` to the folder ``release`` of ``site``, and list all of them there.

    A site of the same release is replaced.
    """
    shutil.rmtree(site / release, ignore_errors=True)
    shutil.copytree(html, site / release)
    names = [page.parent.name for page in site.glob("*/index.html")]
    names.sort(key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)
    rows = "\n".join(f'<li><a href="{name}/index.html">{name}</a></li>' for name in names)
    (site / "index.html").write_text(_VERSIONS.format(rows=rows), "utf-8")


def main(words: list[str]) -> int:
    """Build the site and return an exit code."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--links", action="store_true", help="follow the links to other sites")
    parser.add_argument("--versions", type=Path, metavar="SITE", help="site of all releases")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "out/site")
    options = parser.parse_args(words)
    out = options.folder
    source, html = out / "source", out / "html"
    for folder in ("source", "html", "links", "doctrees"):
        shutil.rmtree(out / folder, ignore_errors=True)
    if broken := assemble(source):
        print("\n".join(f"leads nowhere: {link}" for link in broken), file=sys.stderr)
        return 1
    settings = ["-q", "-W", "--keep-going", "-c", str(HERE), "-d", str(out / "doctrees")]
    if options.links:
        return build_main([*settings, "-b", "linkcheck", str(source), str(out / "links")])
    if options.versions:
        settings += ["-A", "versions=1"]
    if code := build_main([*settings, str(source), str(html)]):
        return code
    for name, text in {**picker(ROOT), **rocm_data(ROOT)}.items():
        (html / name).write_text(text, "utf-8")
    for_machines(source, html)
    if options.versions:
        add_version(html, options.versions, release_of(ROOT))
    print(html / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
