"""Running pip as a program, with its requests recorded and its failures explained in one sentence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from urllib.parse import unquote, urlsplit

from primus.errors import HostError, InputError
from primus.versions.answers import ABSENT, cause
from primus.versions.indexes import pip_failure_hides_network
from primus.versions.traffic import Request, bare_url, requesting


def run_pip(
    shim: Sequence[str], args: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run pip, and report its requests while it runs."""
    reading, writing = os.pipe()
    command = [*shim, str(writing), *args]
    pipe = subprocess.PIPE
    with (
        os.fdopen(reading, encoding="utf-8") as lines,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=environment,
            pass_fds=(writing,),
        ) as process,
    ):
        os.close(writing)
        listener = threading.Thread(target=_report_requests, args=(lines,), daemon=True)
        listener.start()
        try:
            out, err = process.communicate()
        except BaseException:
            process.kill()
            raise
        listener.join(1.0)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _report_requests(lines: Iterable[str]) -> None:
    """Report the requests that pip writes to the listeners."""
    with ExitStack() as every:
        running: dict[int, tuple[ExitStack, Request]] = {}
        for line in lines:
            event = json.loads(line)
            if "url" in event:
                one = every.enter_context(ExitStack())
                about = unquote(urlsplit(event["url"]).path.rstrip("/").rpartition("/")[2])
                running[event["id"]] = one, one.enter_context(requesting("pip", event["url"], about, event["method"]))
                continue
            one, request = running.pop(event["id"])
            if "failed" in event:
                request.verdict = f"failed: {event['failed']}"
            else:
                request.answer(event["status"], event["type"], int(event["size"]) if event["size"].isdigit() else None)
            one.close()


def explain(output: str, urls: Sequence[str] = ()) -> InputError | HostError:
    """Return the error for pip's failure, from its output; ``urls`` are the indexes that it was given."""
    if pip_failure_hides_network(output):
        url, package, why = _network_fault(output)
        return HostError(
            f"the Python index {f'at {bare_url(url)} ' if url else ''}stopped answering while pip resolved"
            f"{f' {package}' if package else ''}{f': {why}' if why else ''}",
            hint="check the network and run it again",
            about=package or None,
        )
    if "DO NOT MATCH THE HASHES" in output or "has inconsistent" in output or "MetadataInvalid" in output:
        package, url = next(iter(re.findall(r"^    (\S+?)(?:[<>=!~]=?\S+)? from (\S+)", output, re.M)), ("", ""))
        return HostError(
            f"the Python index {f'at {bare_url(url)} ' if url else ''}sent different bytes than it announced"
            f"{f' for {package}' if package else ''}",
            hint="do not trust that index; choose another mirror",
            about=package or None,
        )
    missing = re.search(
        r"satisfies the requirement ([A-Za-z0-9._-]+)==?=?([^ ]+)[^\n]*\(from versions: ([^)]*)\)", output
    )
    if missing:
        offered = [] if missing[3].strip() == "none" else [v.strip() for v in missing[3].split(",")]
        return no_such(missing[1], missing[2], offered, "wheel", urls)
    # ResolutionImpossible: the lines between the heading and the advice are the conflict.
    conflict = re.search(r"The conflict is caused by:\n(.*?)\n\n", output, re.S)
    if conflict:
        pinned = re.search(r"The user requested (\S+?)==(\S+)", conflict[1])
        absent = "no matching distributions available for your environment" in output
        if pinned and absent and "depends on" not in conflict[1]:
            # The pin and its constraint agree, and pip blames both.
            asked = ", ".join(map(bare_url, urls))
            return InputError(
                f"no Python index of this host has a wheel of {pinned[1]} {pinned[2]} for this target"
                f"{f' ({asked})' if asked else ''}",
                hint="check that pip's index-url, extra-index-url and find-links, or `indexes` in versions.yaml, reach "
                "its channel; versions such as 2.13.0+cpu are on PyTorch's own index only",
                about=pinned[1],
            )
        lines = [
            re.sub(r"^The user requested (?:\(constraint\) )?(.*)", r"\1 is required", line.strip())
            for line in conflict[1].splitlines()
            if line.strip()
        ]
        return InputError(
            "the pins are not compatible: " + "; ".join(lines),
            hint="change one pin in versions.yaml",
            about=pinned[1] if pinned else None,
        )
    python = re.search(r"ERROR: (Package .* requires a different Python[^\n]*)", output)
    if python:
        return InputError(python[1], hint="pin a version for the base's Python")
    lines = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR:")]
    return InputError("pip found no solution: " + (lines[0] if lines else "no reason given"))


def _network_fault(output: str) -> tuple[str, str, str]:
    """Return address, package and cause from pip's warnings; empty if they do not name them."""
    for line in output.splitlines():
        if "Could not fetch URL" in line and (found := re.search(r"Could not fetch URL (\S+?): (.*)", line)):
            if any(f" {status} Client Error" in line for status in ABSENT):
                continue
            return found[1], found[1].rstrip("/").rpartition("/")[2], _cause(found[2])
    found = re.search(r"host='([^']+)', port=(\d+).*?(?:[Uu]rl: |': )(/\S+)", output)
    if found:
        return f"{found[1]}:{found[2]}", found[3].rstrip("/").rpartition("/")[2], _cause(output)
    return "", "", _cause(output)


def _cause(text: str) -> str:
    status = re.search(r"\b([45]\d\d) (?:Client|Server) Error", text) or re.search(r"too many (\d{3}) error", text)
    if status:
        return f"HTTP status {status[1]}"
    return cause("pip", text)


def no_such(name: str, version: str, offered: Iterable[str], what: str, urls: Sequence[str] = ()) -> InputError:
    """Return the error for a version that none of ``urls`` has; ``what`` is a wheel or a source archive."""
    versions = list(dict.fromkeys(offered))
    if not versions:
        asked = ", ".join(map(bare_url, urls))
        return InputError(
            f"no {what} of {name} is on the Python indexes of this host{f' ({asked})' if asked else ''}",
            hint="check the name, and that pip's index-url, extra-index-url and find-links, or `indexes` in "
            "versions.yaml, reach its channel",
            about=name,
        )
    near = get_close_matches(version, versions, 1, cutoff=0.3)
    text = f"nearest is {near[0]}, latest is {versions[-1]}" if near else f"latest is {versions[-1]}"
    return InputError(f"there is no {what} of {name} {version} for this target", hint=text, about=name)
