"""How Python indexes answer: AMD's, PyTorch's and any other."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any
from urllib.parse import quote

from source_twins import FILE, PEP, RFC, SHA, Answer, Behaviour, Twins

ROCM = "rocm-10.0.0.tar.gz"
Part = Callable[[Answer, str], None]


def page(answer: Answer, text: str, kind: str = "text/html; charset=UTF-8", **headers: str) -> None:
    answer.reply(200, text.encode(), Content_Type=kind, **headers)


def link(file: str = ROCM, where: str = "../../files/", hashed: str | None = f"sha256={SHA}", more: str = "") -> str:
    end = f"#{hashed}" if hashed else ""
    return f'<!DOCTYPE html><html><body><a href="{where}{quote(file)}{end}"{more}>{file}</a></body></html>'


def whole(answer: Answer, _: str) -> None:
    """The file, or the part of it that is asked for."""
    wanted = re.match(r"bytes=(\d+)-(\d*)", answer.headers.get("Range", ""))
    if not wanted:
        return answer.reply(200, FILE, Content_Type="application/gzip", Accept_Ranges="bytes")
    first, last = int(wanted[1]), int(wanted[2] or len(FILE) - 1)
    span = f"bytes {first}-{last}/{len(FILE)}"
    return answer.reply(206, FILE[first : last + 1], Content_Type="application/gzip", Content_Range=span)


def index(text: str | Part = "", file: Part = whole) -> Part:
    """An index with one page and one file."""

    def answer(one: Answer, rest: str) -> None:
        if rest.startswith("simple/"):
            return page(one, text or link()) if isinstance(text, str) else text(one, rest)
        return file(one, rest)

    return answer


def first(times: int, fault: Part, then: Part | None = None) -> Part:
    """A fault of a page the first ``times`` that it is asked for, and of every probe before."""

    def answer(one: Answer, rest: str) -> None:
        if one.nth() < times:
            return fault(one, rest)
        return (then or (lambda a, _: page(a, link())))(one, rest)

    return answer


def status(number: int, **headers: str) -> Part:
    return lambda one, _: one.reply(number, b"<Error/>", Content_Type="application/xml", **headers)


def moved(number: int) -> Part:
    def answer(one: Answer, rest: str) -> None:
        if rest == "simple/rocm/":
            return one.reply(number, Location="../rocm-moved/")
        return page(one, link())

    return answer


def moved_file(number: int, host: str = "") -> Part:
    def answer(one: Answer, rest: str) -> None:
        if rest.startswith("files/"):
            place = f"http://{host}:{one.twins.port}" if host else ""
            return one.reply(number, Location=f"{place}/{one.name}/store/{ROCM}?X-Amz-Signature=abc")
        return whole(one, rest)

    return answer


def circle(one: Answer, rest: str) -> None:
    one.reply(302, Location=f"/{one.name}/simple/{'b' if rest.endswith('a/') else 'a'}/")


def cut(after: int, ranges: bool = True, times: int = 1, resumed: int = 206) -> Part:
    """The file ends early ``times`` times; ``resumed`` is how a request for the rest is answered."""

    def answer(one: Answer, rest: str) -> None:
        if one.command == "HEAD":
            return whole(one, rest)
        asked = one.headers.get("Range", "")
        if asked and resumed == 416 and one.nth("range") == 0:
            return one.reply(416, Content_Range=f"bytes */{len(FILE)}")
        if asked and ranges and resumed == 206:
            return whole(one, rest)
        if one.nth("cut") < times:
            one.reply(200, FILE[:after], Content_Length=str(len(FILE)), Content_Type="application/gzip")
            one.close_connection = True
            return None
        return one.reply(200, FILE, Content_Type="application/gzip")

    return answer


def chunked(one: Answer, _: str) -> None:
    one.reply(200, Transfer_Encoding="chunked", Content_Type="application/octet-stream")
    if one.command != "HEAD":
        for start in range(0, len(FILE), 60_000):
            block = FILE[start : start + 60_000]
            one.wfile.write(f"{len(block):x}\r\n".encode() + block + b"\r\n")
        one.wfile.write(b"0\r\n\r\n")


def no_head(number: int) -> Part:
    return lambda one, rest: one.reply(number) if one.command == "HEAD" else whole(one, rest)


def stops(one: Answer, _: str) -> None:
    """Headers, some bytes, then nothing."""
    if one.command == "HEAD":
        return one.reply(200, Content_Length=str(len(FILE)), Content_Type="application/gzip")
    one.reply(200, FILE[:1000], Content_Length=str(len(FILE)), Content_Type="application/gzip")
    one.wfile.flush()
    return one.hang()


def hangs(one: Answer, _: str) -> None:
    one.hang()


def resets(one: Answer, _: str) -> None:
    one.reset()


def pep691(text: str) -> Part:
    return lambda one, _: page(one, text, "application/vnd.pypi.simple.v1+json")


def files(hashes: dict[str, str] | None = None, **more: object) -> str:
    row = {"filename": ROCM, "url": f"../../files/{ROCM}", "hashes": {"sha256": SHA} if hashes is None else hashes}
    return json.dumps({"meta": {"api-version": "1.1"}, "name": "rocm", "files": [row | more]})


def gzipped(one: Answer, _: str) -> None:
    one.reply(200, gzip.compress(link().encode()), Content_Type="text/html", Content_Encoding="gzip")


def called_gzip(one: Answer, _: str) -> None:
    one.reply(200, FILE, Content_Type="application/x-gzip", Content_Encoding="x-gzip")


def to_http(one: Answer, _: str) -> None:
    one.reply(302, Location=f"http://127.0.0.1:{one.twins.port}/{one.name}/simple/rocm/")


LOGIN = '<html><body><form action="/login"><input name="user"><input type="password"></form></body></html>'
AMD = "https://github.com/ROCm/rocm-cli/issues/{}"
PIP = "https://github.com/pypa/pip/issues/{}"
TORCH = "https://github.com/pytorch/pytorch/issues/{}"
plus = "torch-2.12.0+rocm10.0.0.tar.gz"
SHA512 = hashlib.sha512(FILE).hexdigest()


def no_auth_elsewhere(here: Twins, _: Any) -> bool:
    """The login goes to the index alone, not to the host that it redirects to."""
    seen = here.seen["redirect-with-login"]
    stored = [headers for _, rest, headers in seen if rest.startswith("store/")]
    own = [headers for _, rest, headers in seen if rest.startswith("simple/")]
    return (
        bool(stored and own)
        and all("Authorization" in h for h in own)
        and not any("Authorization" in h for h in stored)
    )


def resumed_by_range(here: Twins, name: str) -> bool:
    return any(headers.get("Range", "").startswith("bytes=90000-") for _, _, headers in here.seen[name])


INDEXES = (
    Behaviour(name="page-403", source=AMD.format(194), answer=index(status(403)), says="no source archive of rocm"),
    Behaviour(
        name="page-404",
        source="https://github.com/ROCm/rocm-cli/pull/111",
        answer=index(status(404)),
        says="no source archive of rocm",
    ),
    Behaviour(name="page-410", source=f"{RFC}#status.410", answer=index(status(410)), says="no source archive of rocm"),
    Behaviour(name="page-301", source=f"{RFC}#status.301", answer=index(moved(301))),
    Behaviour(name="page-302", source=f"{RFC}#status.302", answer=index(moved(302))),
    Behaviour(name="page-307", source=f"{RFC}#status.307", answer=index(moved(307))),
    Behaviour(name="page-308", source=f"{RFC}#status.308", answer=index(moved(308))),
    Behaviour(
        name="file-302-signed",
        source="https://docs.aws.amazon.com/AmazonS3/latest/userguide/ShareObjectPreSignedURL.html",
        answer=index(file=moved_file(302)),
    ),
    Behaviour(
        name="redirect-with-login",
        source=f"{RFC}#field.authorization",
        answer=index(file=moved_file(302, "localhost")),
        check=no_auth_elsewhere,
    ),
    Behaviour(name="page-401", source=f"{RFC}#status.401", answer=index(status(401)), says="refused the request"),
    Behaviour(
        name="429-soon",
        source=PIP.format(11006),
        answer=index(first(2, status(429, Retry_After="1"))),
        warns="HTTP status 429; retrying in 1 s",
    ),
    Behaviour(
        name="429-date",
        source=f"{RFC}#field.retry-after",
        answer=index(first(2, lambda one, _: one.reply(429, Retry_After=formatdate(time.time() + 1, usegmt=True)))),
        warns="HTTP status 429",
    ),
    Behaviour(
        name="429-much-later",
        source=f"{RFC}#field.retry-after",
        answer=index(status(429, Retry_After="3600")),
        says="HTTP status 429, asked to come back in 3600 s",
    ),
    Behaviour(
        name="500-passes",
        source=f"{RFC}#status.500",
        answer=index(first(2, status(500))),
        warns="HTTP status 500; retrying",
    ),
    Behaviour(name="502-stays", source=f"{RFC}#status.502", answer=index(status(502)), says="HTTP status 502"),
    Behaviour(
        name="503-passes",
        source=f"{RFC}#status.503",
        answer=index(first(2, status(503, Retry_After="0"))),
        warns="HTTP status 503",
    ),
    Behaviour(name="504-stays", source=f"{RFC}#status.504", answer=index(status(504)), says="HTTP status 504"),
    Behaviour(name="html", source=PEP.format("0503"), answer=index()),
    Behaviour(name="json", source=PEP.format("0691"), answer=index(pep691(files(size=len(FILE))))),
    Behaviour(
        name="json-broken",
        source=PEP.format("0691"),
        answer=index(pep691('{"files": [')),
        says="JSON that is no list of files",
    ),
    Behaviour(
        name="json-other",
        source=PEP.format("0691"),
        answer=index(pep691('{"message": "quota"}')),
        says="JSON that is no list of files",
    ),
    Behaviour(
        name="plus-encoded",
        source=TORCH.format(153469),
        answer=index(link(plus)),
        package="torch",
        version="2.12.0+rocm10.0.0",
    ),
    Behaviour(
        name="plus-as-it-is",
        source=TORCH.format(145501),
        answer=index(link(plus).replace("%2B", "+")),
        package="torch",
        version="2.12.0+rocm10.0.0",
    ),
    Behaviour(
        name="relative", source="https://github.com/ROCm/TheRock/issues/1741", answer=index(link(where="../../files/"))
    ),
    Behaviour(
        name="from-the-root",
        source=TORCH.format(153469),
        answer=index(lambda one, _: page(one, link(where=f"/{one.name}/files/"))),
    ),
    Behaviour(
        name="another-host",
        source=TORCH.format(181056),
        answer=index(lambda one, _: page(one, link(where=f"http://localhost:{one.twins.port}/{one.name}/files/"))),
    ),
    Behaviour(
        name="base-href",
        source=PIP.format(2478),
        answer=index(lambda one, _: page(one, f'<base href="/{one.name}/">{link(where="files/")}')),
    ),
    Behaviour(name="no-hashes", source=TORCH.format(164347), answer=index(link(hashed=None))),
    Behaviour(name="sha512-alone", source=PEP.format("0503"), answer=index(link(hashed=f"sha512={SHA512}"))),
    Behaviour(name="json-sha512-alone", source=PEP.format("0691"), answer=index(pep691(files({"sha512": SHA512})))),
    Behaviour(name="yanked", source=PEP.format("0592"), answer=index(link(more=' data-yanked="withdrawn"'))),
    Behaviour(
        name="for-another-python",
        source=PEP.format("0503"),
        answer=index(link(more=' data-requires-python="&gt;=3.13"')),
        says=r"needs Python >=3\.13",
    ),
    Behaviour(name="upper-case", source=PEP.format("0625"), answer=index(link("ROCm-10.0.0.tar.gz"))),
    Behaviour(
        name="other-version",
        source="https://github.com/ROCm/TheRock/issues/4746",
        answer=index(link("rocm-9.0.0.tar.gz")),
        says="there is no source archive of rocm 10.0.0",
    ),
    Behaviour(
        name="cut-resumed",
        source=PIP.format(11153),
        answer=index(link(hashed=None), cut(90_000)),
        warns="continuing from there",
        check=lambda here, _: resumed_by_range(here, "cut-resumed"),
    ),
    Behaviour(
        name="range-ignored",
        source=f"{RFC}#field.range",
        answer=index(link(hashed=None), cut(90_000, ranges=False, resumed=200)),
        warns="ended early",
    ),
    Behaviour(
        name="range-416",
        source=f"{RFC}#status.416",
        answer=index(link(hashed=None), cut(90_000, resumed=416)),
        warns="ended early",
    ),
    Behaviour(
        name="always-cut",
        source=PIP.format(11153),
        answer=index(link(hashed=None), cut(90_000, ranges=False, times=99, resumed=200)),
        says="cannot be read: it ended early",
    ),
    Behaviour(
        name="size-differs",
        source="https://peps.python.org/pep-0700/",
        answer=index(pep691(files(size=7))),
        says="the index states 7 bytes for rocm-10.0.0.tar.gz",
    ),
    Behaviour(name="login-page", source=PIP.format(6754), answer=index(LOGIN), says="web page with a form"),
    Behaviour(
        name="login-for-the-file",
        source=PIP.format(6754),
        answer=index(file=lambda one, _: page(one, LOGIN)),
        says="it sends a web page",
    ),
    Behaviour(
        name="type-wrong",
        source=PIP.format(6754),
        answer=index(lambda one, _: page(one, link(), "application/octet-stream")),
        says="application/octet-stream, which pip does not read",
    ),
    Behaviour(
        name="type-missing",
        source="https://github.com/pypi/warehouse/issues/20082",
        answer=index(lambda one, _: one.reply(200, link().encode())),
        says="no Content-Type, which pip does not read",
    ),
    Behaviour(name="gzip-page", source=f"{RFC}#field.content-encoding", answer=index(gzipped)),
    Behaviour(
        name="gzip-said-of-an-archive",
        source="https://github.com/psf/requests/issues/3849",
        answer=index(link(hashed=None), called_gzip),
    ),
    Behaviour(name="chunked", source="https://www.rfc-editor.org/rfc/rfc9112#section-7.1", answer=index(file=chunked)),
    Behaviour(name="head-405", source=f"{RFC}#status.405", answer=index(file=no_head(405))),
    Behaviour(
        name="head-403",
        source="https://docs.aws.amazon.com/AmazonS3/latest/userguide/ShareObjectPreSignedURL.html",
        answer=index(file=no_head(403)),
    ),
    Behaviour(
        name="file-404",
        source="https://github.com/ROCm/TheRock/issues/1741",
        answer=index(file=status(404)),
        says="the index lists rocm 10.0.0, but the file .* is not there: HTTP status 404",
    ),
    Behaviour(
        name="file-403",
        source=TORCH.format(109102),
        answer=index(file=status(403)),
        says="the index lists rocm 10.0.0, but the file .* is not there: HTTP status 403",
    ),
    Behaviour(name="redirect-circle", source=f"{RFC}#status.3xx", answer=circle, says="it redirects in a circle"),
    Behaviour(
        name="redirect-to-http",
        source=f"{RFC}#section-17.8",
        answer=index(to_http),
        says="it redirects from https to http",
    ),
    Behaviour(
        name="certificate",
        source="https://pip.pypa.io/en/stable/topics/https-certificates/",
        answer=index(),
        says="its certificate is not trusted",
    ),
    Behaviour(
        name="no-tls",
        source="https://pip.pypa.io/en/stable/topics/https-certificates/",
        answer=index(),
        says="it speaks no TLS",
    ),
    Behaviour(name="reset", source=PIP.format(11153), answer=index(resets), says="the connection was reset"),
    Behaviour(
        name="reset-once",
        source=PIP.format(11153),
        answer=index(file=lambda one, rest: resets(one, rest) if one.nth() < 1 else whole(one, rest)),
    ),
    Behaviour(
        name="refused",
        source="https://www.rfc-editor.org/rfc/rfc9293#section-3.10.7.1",
        answer=index(),
        says="connection refused",
    ),
    Behaviour(
        name="name-unknown",
        source="https://www.rfc-editor.org/rfc/rfc6761#section-6.4",
        answer=index(),
        says="its host name cannot be resolved",
    ),
    Behaviour(
        name="silent",
        source="https://github.com/ROCm/legacy-rocm-build/issues/1153",
        answer=index(hangs),
        says="no answer in time",
    ),
    Behaviour(
        name="silent-after-a-part",
        source="https://github.com/ROCm/legacy-rocm-build/issues/1153",
        answer=index(link(hashed=None), stops),
        says="cannot be read: no answer in time",
        warns="has sent nothing",
    ),
)
