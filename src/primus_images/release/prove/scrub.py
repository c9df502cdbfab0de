"""Text without what names a machine or a person: paths, hosts, addresses, users and secrets."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from primus_images.files import text_if_readable, user_name

# Folders that every machine or image has.
_COMMON = r"(?:usr|opt/rocm|opt/venv|dev|proc|sys|out|workspace|lib|lib64|bin|etc)"
_PATH = re.compile(rf"(?<![\w.:/\]-])/(?!{_COMMON}(?:[/\s:'\",)\]]|$))[^\s'\"`:;,()\[\]<>|]+")
# What follows in a path says which module failed.
_MODULE = re.compile(r".*/(?:site-packages|dist-packages|src)/(.+)")
_RULES = (
    (re.compile(r"\b[a-zA-Z][\w+.-]*://[^\s'\"<>)]+"), "<address>"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "<mail>"),
    (re.compile(r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b"), "<address>"),
    (re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w.]*\d)"), "<address>"),
    (re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{1,4}(?![\w:])"), "<address>"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<number>"),
    (re.compile(r"\b(?:hf_|gh[pousr]_|glpat-|sk-|AKIA)[A-Za-z0-9_-]{12,}"), "<secret>"),
    (re.compile(r"(?i)((?:token|password|passwd|secret|api[_-]?key)\s*[=:]\s*)\S+"), r"\1<secret>"),
)
_SECRET_NAMES = re.compile(r"(?i)token|secret|password|passwd|credential|key$|auth")
# Shorter ones are words of other texts.
_SHORTEST = {"<host>": 2, "<user>": 3, "<secret>": 5, "~": 3}


class Scrubber:
    """Removes what is known of this machine and of its environment, and what looks like it."""

    def __init__(
        self, folders: Mapping[Path, str], environment: Mapping[str, str] | None = None
    ) -> None:
        """``folders`` is path → what stands for it."""
        self._words: dict[str, str] = {}
        for path, text in folders.items():
            self._words[str(path)] = text
        for word, text in _names(environment or os.environ):
            if len(word) >= _SHORTEST[text]:
                self._words.setdefault(word, text)

    def text(self, text: str) -> str:
        """Return the text without what must not leave the machine."""
        for word in sorted(self._words, key=len, reverse=True):
            if word in text:
                text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", self._words[word], text)
        for pattern, replacement in _RULES:
            text = pattern.sub(replacement, text)
        return _PATH.sub(_shortened, text)

    def value(self, value: Any) -> Any:
        """Return a JSON value, each of whose texts and keys is scrubbed."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        return value


def _shortened(match: re.Match[str]) -> str:
    module = _MODULE.fullmatch(match[0])
    if module:
        return f"…/{module[1]}"
    return "<path>"


def _names(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the words that name this machine, its user, and the values of variables to hide."""
    host = os.uname().nodename
    for name in (host, host.partition(".")[0], text_if_readable(Path("/etc/hostname")).strip()):
        yield name, "<host>"
    for line in text_if_readable(Path("/etc/resolv.conf")).splitlines():
        if line.startswith(("search", "domain", "nameserver")):
            for word in line.split()[1:]:
                yield word, "<host>"
    yield str(Path.home()), "~"
    user = user_name(os.geteuid())
    for name in (user, environment.get("USER", ""), environment.get("LOGNAME", "")):
        if name != "root":
            yield name, "<user>"
    for name, value in environment.items():
        if _SECRET_NAMES.search(name):
            yield value, "<secret>"
        if "://" in value:
            yield urlsplit(value.split()[0]).hostname or "", "<host>"
