"""The workload service of ``run_k8s_pretrain.sh``, against a server on the loopback interface."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from primus_images.cli.main import main
from primus_images.compat.workloads import query
from primus_images.errors import InputError

ROOT = Path(__file__).resolve().parents[3]
COMMANDS: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "tests/fixtures/old_commands.yaml").read_text()
)
CREATE = ("create", "--exp", "llama2-7b", "--image", "registry.example.com/primus:v26.11-mi300x")


@dataclass
class Service:
    """What a server of the public definition has been asked, and the workloads it keeps."""

    url: str = ""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    users: set[str] = field(default_factory=set)
    workloads: dict[str, Any] = field(default_factory=dict)

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append((f"{method} {path}", body))
        if path == "/api/v1/nodes":
            return 200, {"items": [{"nodeId": "node-1"}]}
        if path == "/api/v1/workloads" and method == "POST":
            self.workloads["abc123"] = body
            return 200, {"workloadId": "abc123"}
        if path == "/api/v1/workloads":
            return 200, {"items": list(self.workloads)}
        name = path.rpartition("/")[2]
        if name not in self.workloads:
            return 404, {"errorMessage": f"workload {name} not found"}
        if method == "DELETE":
            del self.workloads[name]
            return 200, None
        return 200, {"workloadId": name, "phase": "Running"}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    known = Service()

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            known.users.add(self.headers["userId"])
            status, answer = known.answer(self.command, self.path, body)
            text = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_DELETE = _do

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    known.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield known
    server.shutdown()
    server.server_close()


def ask(service: Service, *words: str) -> int:
    return main(["compat", "run_k8s_pretrain.sh", "--url", service.url, *words])


def test_a_workload_is_created_shown_listed_and_deleted(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(service, *CREATE, "--replica", "2", "--hf_token", "hf_secret", "--lr", "1e-4") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"workloadId": "abc123"}
    assert "hf_secret" not in shown.out + shown.err
    body = service.workloads["abc123"]
    assert body["resource"]["replica"] == 2
    assert body["resource"]["gpu"] == "8"
    assert body["env"] == {
        "EXP": "llama2-7b",
        "BACKEND": "megatron",
        "GPUS_PER_NODE": "8",
        "HF_TOKEN": "hf_secret",
    }
    assert body["entryPoint"].endswith("exec bash ./examples/run_pretrain.sh --lr 1e-4")
    assert body["workspace"] == "primus-safe-pretrain"
    for words, answer in (
        (("get", "--workload-id", "abc123"), {"workloadId": "abc123", "phase": "Running"}),
        (("list",), {"items": ["abc123"]}),
        (("nodes",), {"items": [{"nodeId": "node-1"}]}),
        (("delete", "--workload-id", "abc123"), {}),
    ):
        assert ask(service, *words) == 0
        assert json.loads(capsys.readouterr().out) == answer
    assert service.workloads == {}
    (user,) = service.users
    assert len(user) == 32


@pytest.mark.parametrize(
    "entry", [entry for entry in COMMANDS if "asks" in entry], ids=lambda entry: entry["asks"]
)
def test_every_command_of_the_document_asks_the_service(
    entry: dict[str, Any], service: Service
) -> None:
    words = entry["command"].replace("\\\n", " ").replace("http://api.example.com", service.url)
    service.workloads["abc123"] = {}
    assert main(["compat", *words.split()[1:]]) == 0
    (request,) = service.asked
    assert request[0] == entry["asks"]
    if "create" in words:
        assert request[1]["image"] == "docker.io/custom/image:latest"
        assert request[1]["workspace"] == "team-dev"
        assert request[1]["env"]["DATA_PATH"] == "/mnt/data/train"
        assert request[1]["resource"]["gpu"] == "4"


def test_a_dry_run_asks_nothing_and_shows_no_token(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert ask(service, *CREATE, "--nodelist", "a,b", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"POST {service.url}/api/v1/workloads\n")
    assert '"kubernetes.io/hostname": "a,b"' in shown
    assert "hf_secret" not in shown
    assert service.asked == []


def test_what_the_service_says_is_told(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(service, "get", "--workload-id", "../x y") == 1
    assert "HTTP 404" in capsys.readouterr().err
    assert service.asked[0][0] == "GET /api/v1/workloads/..%2Fx%20y"


def test_a_service_that_does_not_answer_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compat", "run_k8s_pretrain.sh", "--url", "http://127.0.0.1:9", "list"]
    assert main(words) == 3
    assert "127.0.0.1:9 does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--url", "api.example.com", "list"), "is not the address of a service"),
        (("--url", "http://h", "get"), "--workload-id is missing"),
        (("--url", "http://h", "create", "--image", "x"), "--exp is missing"),
        (("--url", "http://h", "create", "--exp", "x"), "--image is missing"),
        (("--url", "http://h", *CREATE, "--gpu", "0"), "at least 1"),
        (("--url", "http://h", "stop"), "invalid choice: 'stop'"),
        (("--url", "http://h", "list", "--all"), "list has no option '--all'"),
        (("list",), "--url"),
    ],
)
def test_wrong_words_are_refused(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        query(words, {})
    assert sentence in str(caught.value)


@pytest.mark.parametrize("address", ["ftp://host", "https://", "host", "//host", "http:///x"])
def test_an_address_that_is_of_no_service_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="is not the address of a service"):
        query(["list", "--url", address], {})
