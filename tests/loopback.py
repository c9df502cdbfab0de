"""A Python index and a Debian archive on 127.0.0.1, with faults on demand; and tiny wheels and debs
to fill them.
"""

import base64
import hashlib
import http.server
import ssl
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote, urlsplit


@dataclass
class Faults:
    """Per path (as requested, unquoted): what goes wrong. ``cut`` ends the body after N bytes, once
    per entry.
    """

    cut: dict[str, list[int]] = field(default_factory=dict)
    status: dict[str, list[int]] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    stall: set[str] = field(default_factory=set)
    no_length: set[str] = field(default_factory=set)
    no_range: bool = False
    login: tuple[str, str] | None = None


@dataclass
class Server:
    root: Path
    port: int
    faults: Faults
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def asked(self, end: str, method: str = "GET") -> list[str | None]:
        """The Range headers of the requests whose path ends so."""
        return [r for m, p, r in self.log if m == method and p.endswith(end)]


@contextmanager
def serve(root: Path, *, hashes: bool = True, certificate: Path | None = None) -> Iterator[Server]:
    """Serve ``root`` as files, and ``root``/files/* as a simple index under /simple/NAME/."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            server.log.append((self.command, path, self.headers.get("Range")))
            faults = server.faults
            if faults.login:
                want = "Basic " + base64.b64encode(":".join(faults.login).encode()).decode()
                if self.headers.get("Authorization") != want:
                    return self._short(401, {"WWW-Authenticate": 'Basic realm="test"'})
            if body and faults.status.get(path):
                status = faults.status[path].pop(0)
                return self._short(status, {"Retry-After": "3600"} if status == 503 else {})
            if path.startswith("/simple/"):
                return self._page(path.split("/")[2], body)
            file = server.root / path.lstrip("/")
            if not file.is_file():
                return self._short(404, {})
            data = file.read_bytes()
            if path in faults.wrong:
                data = bytes(len(data))
            return self._send(path, data, body)

        def _short(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _page(self, name: str, body: bool) -> None:
            files = [
                f for f in sorted((server.root / "files").iterdir()) if _project(f.name) == name
            ]
            if not files:
                self._short(404, {})
                return
            digests = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
            tails = {f.name: f"#sha256={digests[f.name]}" if hashes else "" for f in files}
            text = "".join(
                f'<a href="../../files/{quote(f.name)}{tails[f.name]}">{f.name}</a>\n'
                for f in files
            )
            data = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def _send(self, path: str, data: bytes, body: bool) -> None:
            faults, start = server.faults, 0
            ranged = self.headers.get("Range", "")
            if ranged.startswith("bytes=") and not faults.no_range:
                start = int(ranged[6:].split("-")[0])
                if start >= len(data):
                    self._short(416, {})
                    return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            if path in faults.no_length:
                self.send_header("Connection", "close")
                self.close_connection = True
            else:
                self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            if not body:
                return
            cuts = faults.cut.get(path, [])
            end = cuts.pop(0) if cuts else len(data)
            self.wfile.write(data[start:end])
            self.wfile.flush()
            if path in faults.stall:
                done.wait(60)
            if end < len(data):
                self.close_connection = True

    class Quiet(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: object) -> None:
            pass

    done = threading.Event()
    httpd = Quiet(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        httpd.socket = context.wrap_socket(httpd.socket, server_side=True)
    scheme = "https" if certificate else "http"
    server = Server(root=root, port=httpd.server_address[1], faults=Faults(), scheme=scheme)
    thread = threading.Thread(
        target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        done.set()
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def make_certificate(path: Path) -> Path:
    """A self-signed certificate for 127.0.0.1 and its key, in one file."""
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "3650",
        "-subj",
        "/CN=test",
    ]
    command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    command += [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        f"{path}.key",
        "-out",
        str(path),
    ]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.key").read_text())
    return path


def body_in_chunks(stream: BinaryIO) -> bytes:
    """Return the body that a client sends in chunks, whose sizes come before them."""
    body = b""
    while size := int(stream.readline(), 16):
        body += stream.read(size)
        stream.readline()
    stream.readline()
    return body


def _project(file: str) -> str:
    return file.removesuffix(".tar.gz").split("-")[0].replace("_", "-").lower()


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    needs: tuple[str, ...] = (),
    tag: str = "py3-none-any",
    padding: int = 0,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """A real wheel that pip resolves and installs; ``files`` are in it beside its module."""
    folder.mkdir(parents=True, exist_ok=True)
    under = name.replace("-", "_")
    info = f"{under}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {need}\n" for need in needs
    )
    files = {
        **(files or {}),
        f"{under}.py": f"__version__ = {version!r}\n".encode(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
        ).encode(),
    }
    if padding:
        files[f"{under}.bin"] = hashlib.shake_256(name.encode()).digest(padding)
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD")).encode()
    path = folder / f"{under}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in files.items():
            archive.writestr(zipfile.ZipInfo(file, (2020, 1, 1, 0, 0, 0)), data)
    return path


def make_deb(
    pool: Path,
    name: str,
    version: str,
    *,
    needs: str = "",
    essential: bool = False,
    padding: int = 0,
) -> Path:
    """A real, nearly empty deb."""
    tree = pool.parent / "trees" / f"{name}_{version.replace(':', '%')}"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr/share/doc" / name).mkdir(parents=True)
    (tree / "usr/share/doc" / name / "data").write_bytes(
        hashlib.shake_256(name.encode()).digest(padding or 10)
    )
    control = (
        f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: Test "
        "<test@example.invalid>\n"
    )
    control += f"Depends: {needs}\n" if needs else ""
    control += "Essential: yes\n" if essential else ""
    (tree / "DEBIAN/control").write_text(control + "Description: test\n", encoding="utf-8")
    pool.mkdir(parents=True, exist_ok=True)
    path = pool / f"{name}_{version.rpartition(':')[2]}_amd64.deb"
    command = ["dpkg-deb", "--root-owner-group", "-Znone", "-b", str(tree), str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def index_debs(
    root: Path,
    suite: str,
    keep: Callable[[str], bool] = lambda file: True,
    valid_until: str | None = None,
) -> None:
    """Write dists/SUITE for the debs under ``root``/pool whose file name ``keep`` accepts."""
    stanzas = []
    for deb in sorted((root / "pool").rglob("*.deb")):
        if not keep(deb.name):
            continue
        control = subprocess.run(
            ["dpkg-deb", "-f", str(deb)], check=True, capture_output=True, text=True
        ).stdout
        data = deb.read_bytes()
        stanzas.append(
            control.rstrip()
            + f"\nFilename: {deb.relative_to(root).as_posix()}\nSize: {len(data)}\n"
            + f"SHA256: {hashlib.sha256(data).hexdigest()}\n"
        )
    dist = root / "dists" / suite
    binary = dist / "main/binary-amd64"
    binary.mkdir(parents=True, exist_ok=True)
    (binary / "Packages").write_text("\n".join(stanzas), encoding="utf-8")
    packages = (binary / "Packages").read_bytes()
    release = (
        f"Origin: Debian\nSuite: {suite}\nCodename: {suite}\nArchitectures: amd64\nComponents: "
        "main\n"
        "Date: Wed, 01 Jan 2020 00:00:00 UTC\n"
        + (f"Valid-Until: {valid_until}\n" if valid_until else "")
        + "SHA256:\n"
        f" {hashlib.sha256(packages).hexdigest()} {len(packages)} main/binary-amd64/Packages\n"
    )
    (dist / "Release").write_text(release, encoding="utf-8")
