"""Links from the first use of each word of the glossary on a page to its meaning."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from docutils import nodes

PAGE = "glossary"
_ROW = re.compile(r"^\| ([a-z][\w -]*?)(?: \([^)]*\))? \| (.+) \|$")
# Words that also have an everyday meaning. They are linked on these pages alone.
_ONLY_ON: Mapping[str, frozenset[str]] = {
    "action": frozenset({"architecture", "engine"}),
    "base": frozenset({"using"}),
    "budget": frozenset({"gates"}),
    "case": frozenset({"recipes", "contributing"}),
    "check": frozenset({"validation"}),
    "component": frozenset({"using", "release", "architecture"}),
    "extra": frozenset({"using", "preflight"}),
    "family": frozenset({"training", "contributing"}),
    "judge": frozenset({"training", "validation"}),
    "key": frozenset({"architecture", "engine"}),
    "level": frozenset({"validation"}),
    "mode": frozenset({"training", "recipes"}),
    "proxy": frozenset({"running", "training", "recipes", "validation", "contributing", "release"}),
    "record": frozenset({"validation"}),
    "reference": frozenset({"validation", "training"}),
    "release": frozenset({"using", "release", "statements"}),
    "store": frozenset({"using", "release", "validation"}),
    "suite": frozenset({"validation", "statements", "recipes"}),
    "validation": frozenset({"release", "statements", "using"}),
}
# What a reader takes for text that cannot have a link.
_WITHOUT_LINKS = (
    nodes.literal,
    nodes.literal_block,
    nodes.reference,
    nodes.title,
    nodes.rubric,
    nodes.raw,
)


@dataclass(frozen=True, kw_only=True)
class Word:
    """A word of the glossary, the id of its section, and its meaning as plain text."""

    text: str
    section: str
    meaning: str


def words(page: Path) -> list[Word]:
    """Return the words of the glossary in ``page``."""
    found = []
    section = ""
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").lower()
        row = _ROW.match(line)
        if row and row[1] != "word":
            meaning = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", row[2])
            found.append(Word(text=row[1], section=section, meaning=meaning))
    return found


def words_of(page: str, every: list[Word]) -> list[Word]:
    """Return the words that have their special meaning on the page with the name ``page``."""
    if page == PAGE or "/" in page or page in ("index", "changelog", "keys", "releases"):
        return []
    return [word for word in every if page in _ONLY_ON.get(word.text, {page})]


def link(document: nodes.document, every: list[Word], address: str) -> None:
    """Link the first use of each word in ``document`` to the page at ``address``."""
    waiting = {word.text: word for word in every}
    for text in list(document.findall(nodes.Text)):
        if not waiting:
            return
        if not _inside(text, _WITHOUT_LINKS):
            parts = list(_parts(str(text), waiting, address))
            text.parent.replace(text, parts)


def _parts(text: str, waiting: dict[str, Word], address: str) -> Iterator[nodes.Node]:
    """Yield ``text`` with links for words that are ``waiting``, and take these from it."""
    longest_first = sorted(waiting, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest_first))})(?=s?(?![\w-]))")
    end = 0
    for match in pattern.finditer(text):
        word = waiting.pop(match[1], None)
        if word is None:
            continue
        if text[end : match.start()]:
            yield nodes.Text(text[end : match.start()])
        anchor = f"{address}#{word.section}"
        shown = nodes.reference("", match[1], refuri=anchor, internal=True, classes=["term"])
        shown["reftitle"] = word.meaning
        yield shown
        end = match.end()
    if text[end:] or end == 0:
        yield nodes.Text(text[end:])


def _inside(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    parent = node.parent
    while parent is not None:
        if isinstance(parent, kinds):
            return True
        parent = parent.parent
    return False
