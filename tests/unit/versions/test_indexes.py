"""pip's configuration as uv's settings, and uv's failures as sentences."""

import contextlib
import hashlib
import http.server
import io
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given, strategies as st

from loopback import serve
from primus_images.errors import HostError, InputError
from primus_images.versions.indexes import Indexes, Offer, _files, offers_in, parse_config
from primus_images.versions.lock import BaseRequest, Request
from primus_images.versions.traffic import bare_url
from primus_images.versions.wheels import NoSolutionError, _best, _tags, failure
from tables import table_of

LISTING = (
    "global.index-url='http://global/simple'\nglobal.extra-index-url='\\nhttp://a/simple\\nhttp://b/simple'\n"
    "install.index-url='http://install/simple'\n:env:.find-links='/one "
    "/two'\ndownload.index-url='http://no'\nrubbish\n"
)


def test_config_variables_win_over_install_over_global() -> None:
    settings = parse_config(LISTING)
    assert settings["index-url"] == "http://install/simple"
    assert (
        parse_config(LISTING + ":env:.index-url='http://env/simple'\n")["index-url"]
        == "http://env/simple"
    )
    indexes = Indexes.from_settings(settings)
    assert indexes.urls == ("http://install/simple", "http://a/simple", "http://b/simple")
    assert indexes.listed("find-links") == ("/one", "/two")


def test_a_module_of_the_current_folder_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a checkout of somebody else, whose images a machine builds."""
    for name in ("pip", "json", "logging"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')\n")
    monkeypatch.chdir(tmp_path)
    Indexes.of_host({})
    assert not (tmp_path / "ran").exists()


def test_uv_searches_in_pips_order_and_takes_403_for_an_absent_package() -> None:
    settings = tomllib.loads(Indexes.from_settings(parse_config(LISTING)).uv_settings(Path("/w")))
    assert [index["url"] for index in settings["index"]] == [
        "http://install/simple",
        "http://a/simple",
        "http://b/simple",
    ]
    assert [index.get("default", False) for index in settings["index"]] == [False, False, True], (
        "uv's default is last"
    )
    assert all(index["ignore-error-codes"] == [403] for index in settings["index"])
    assert settings["find-links"] == ["/one", "/two", "/w"]


def test_no_index_leaves_find_links_only() -> None:
    indexes = Indexes.from_settings({"no-index": "true", "find-links": "/wheels"})
    assert indexes.shown == ("/wheels",)
    assert tomllib.loads(indexes.uv_settings(Path("/w")))["no-index"]


def test_other_settings_of_pip_are_uvs_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UV_INDEX", "http://elsewhere/simple")
    settings = {
        "cert": "/ca.pem",
        "client-cert": "/me.pem",
        "proxy": "http://p:8080",
        "trusted-host": "a b:80",
    }
    indexes = Indexes.from_settings(settings)
    environment = indexes.uv_environment()
    assert "UV_INDEX" not in environment, "uv's own configuration on this host does not count"
    assert environment.items() >= {"SSL_CERT_FILE": "/ca.pem", "SSL_CLIENT_CERT": "/me.pem"}.items()
    assert environment["HTTPS_PROXY"] == environment["http_proxy"] == "http://p:8080"
    written = tomllib.loads(indexes.uv_settings(Path("/w")))
    assert written["allow-insecure-host"] == ["a", "b:80"]


def test_the_login_of_an_address_is_that_of_its_host() -> None:
    indexes = Indexes.from_settings({"index-url": "https://me:p%40ss@host/simple"})
    assert indexes._login("host") == ("me", "p@ss")
    assert indexes._login("other") is None
    assert Indexes.from_settings({"index-url": "https://me@host/simple"})._login("host") == (
        "me",
        "",
    )


def test_credentials_are_in_no_text() -> None:
    indexes = Indexes.from_settings(
        {"index-url": "https://me:p%40ss@host:8443/simple", "proxy": "http://u:p%40ss@p"}
    )
    assert indexes.shown == ("https://host:8443/simple",)
    assert "p%40ss" not in repr(indexes)


@given(
    st.from_regex(r"[a-z]{1,9}", fullmatch=True),
    st.from_regex(r"[A-Za-z0-9]{3,9}SECRET", fullmatch=True),
)
def test_a_bare_url_drops_every_secret(user: str, secret: str) -> None:
    shown = bare_url(f"https://{user}:{secret}@host/path/file.whl?token={secret}#sig={secret}")
    assert shown == "https://host/path/file.whl"


def test_a_page_is_html_or_json_with_relative_links() -> None:
    sha256, base = "a" * 64, "https://h/simple/a/"
    html = (
        "<a data-yanked='' data-requires-python='&gt;=3' "
        f"href='../../a%2B1.whl#sha256={sha256}'>a</a>"
    )
    first, second = offers_in(_files(html + "<a href=b>b</a>"), base)
    assert first == Offer(
        file="a+1.whl", url="https://h/a%2B1.whl", sha256=sha256, python=">=3", yanked=True
    )
    assert second == Offer(file="b", url="https://h/simple/a/b")
    row = {"filename": "b", "url": "b", "hashes": {}, "requires-python": None}
    assert offers_in([row], base) == [second]


def empty_answer(status: int) -> requests.Response:
    answer = requests.Response()
    answer.status_code = status
    answer.raw = io.BytesIO()
    return answer


@pytest.mark.parametrize("status", [403, 404])
def test_an_index_without_the_package_offers_nothing(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index in an object store answers 403 for what is not there."""
    monkeypatch.setattr(Indexes, "get", lambda _self, _url: empty_answer(status))
    assert Indexes(urls=("http://a/simple",)).offers("torch", "http://a/simple") == []


def test_an_index_that_fails_is_not_one_without_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Indexes, "get", lambda _self, _url: empty_answer(500))
    with pytest.raises(HostError, match=r"http://a/simple/torch/ does not answer: .*500"):
        Indexes(urls=("http://a/simple",)).offers("torch", "http://a/simple")


@pytest.mark.parametrize(
    "page",
    [
        b"[" * 200_000,
        b"[]",
        b"null",
        b'{"files": 1}',
        b'{"files": [{"filename": "a"}]}',
        b"\xff",
        b'{"files": [',
        b'{"files": [{"filename": "a", "url": 5, "hashes": {}}]}',
        b'{"files": [{"filename": "a", "url": "a", "hashes": []}]}',
        b'{"files": [{"filename": "a", "url": "a", "hashes": {}, "size": "many"}]}',
        b'{"files": [{"filename": "a", "url": "a", "hashes": {}, "size": -1}]}',
        b'{"files": [{"filename": "a", "url": "a", "hashes": {"sha256": 5}}]}',
        b'{"files": [{"filename": "a", "url": "a", "hashes": {"sha256": "5"}}]}',
        b" " * ((64 << 20) + 1),
    ],
    ids=lambda page: repr(page[:60]),
)
def test_an_odd_page_is_a_sentence_that_names_the_index(page: bytes) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(page)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}/simple"
        with pytest.raises(
            HostError, match=f"the Python index at {place}/numpy/ does not answer: ."
        ):
            Indexes(urls=(place,)).offers("numpy", place)
        server.shutdown()


WHEEL = b"bytes of a wheel"
SHA256 = hashlib.sha256(WHEEL).hexdigest()


@pytest.mark.parametrize(
    ("stated", "methods"),
    [
        ({"size": 5, "sha256": "a" * 64}, []),
        ({"sha256": "a" * 64}, ["HEAD"]),
        ({"size": 5}, ["GET"]),
        ({}, ["GET"]),
    ],
    ids=["both", "sha256", "size", "nothing"],
)
def test_a_file_is_read_only_if_its_index_does_not_state_its_hash(
    tmp_path: Path, stated: dict[str, Any], methods: list[str]
) -> None:
    (tmp_path / "a.whl").write_bytes(WHEEL)
    with serve(tmp_path) as server:
        offer = Offer(file="a.whl", url=f"{server.url}/a.whl", **stated)
        file = Indexes(urls=()).locked("wheel", "a", "1", offer)
        assert [method for method, _, _ in server.log] == methods
    whole = {"size": len(WHEEL), "sha256": SHA256}
    read = "GET" in methods
    assert file.sha256 == (SHA256 if read else stated["sha256"])
    assert file.size == (whole if methods else stated)["size"]


def test_a_file_whose_length_no_answer_states_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(WHEEL)
    with serve(tmp_path) as server:
        server.faults.no_length.add("/a.whl")
        offer = Offer(file="a.whl", url=f"{server.url}/a.whl", sha256="a" * 64)
        file = Indexes(urls=()).locked("wheel", "a", "1", offer)
    assert (file.size, file.sha256) == (len(WHEEL), SHA256)


def test_a_listed_file_that_is_not_there_is_named_with_its_package(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        offer = Offer(file="a.whl", url=f"{server.url}/a.whl")
        with pytest.raises(HostError) as caught:
            Indexes(urls=()).locked("wheel", "a", "1", offer)
        start = f"the index lists a 1, but the file at {server.url}/a.whl is not there: HTTP"
    assert caught.value.message.startswith(start)
    assert caught.value.about == "a"


def _request(suite: str = "bookworm", **more: object) -> Request:
    base = BaseRequest(suite=suite, python="3.11.2", packages=())
    return Request(target="t", channel="pypi", python="3.11", bases={"b": base}, **more)  # type: ignore[arg-type]


def test_tags_stop_at_the_glibc_of_the_suite() -> None:
    ranks = _tags(_request())
    tags = [str(tag) for tag in sorted(ranks, key=ranks.__getitem__)]
    assert tags[0] == "cp311-cp311-manylinux_2_36_x86_64"
    assert {"cp37-abi3-manylinux1_x86_64", "py3-none-manylinux2014_x86_64", "py3-none-any"} <= set(
        tags
    )
    assert "cp311-cp311-manylinux_2_37_x86_64" not in tags
    assert "cp311-cp311-manylinux_2_37_x86_64" in map(str, _tags(_request("trixie")))
    with pytest.raises(InputError, match="no glibc version is known for suite 'jammy'"):
        _tags(_request("jammy"))


def test_the_best_wheel_is_the_most_specific_one() -> None:
    names = [
        "a-1-py3-none-any.whl",
        "a-1-cp37-abi3-manylinux_2_28_x86_64.whl",
        "a-1-cp311-cp311-linux_x86_64.whl",
    ]
    package, wheels = (
        {"name": "a", "version": "1"},
        [Offer(file=name, url=f"http://h/{name}") for name in names],
    )
    assert _best(package, wheels, _request()).file == names[2]
    assert _best(package, wheels, _request(pure=("a",))).file == names[0]


FAILURES = table_of("indexes.what_uv_writes")


def test_a_network_failure_names_index_package_and_uvs_cause() -> None:
    error = failure(FAILURES["connect"], Indexes(urls=()))
    assert isinstance(error, HostError)
    assert error.about == "torch"
    assert error.message == (
        "the Python index at http://127.0.0.1:9/simple/torch/ does not answer: Connection "
        "refused (os error 111)"
    )
    error = failure(
        FAILURES["connect"], Indexes(urls=(), own={"own": "http://me:SECRET@127.0.0.1:9/simple/"})
    )
    assert str(error).startswith(
        "the index own (http://127.0.0.1:9/simple/) does not answer: Connection refused"
    )
    assert "use another channel (--channel)" in str(error.hint)


def test_pins_that_nothing_fulfills_are_a_sentence_in_uvs_words() -> None:
    indexes = Indexes(urls=("http://h/simple",))
    conflict, absent = (failure(FAILURES[name], indexes) for name in ("conflict", "no_version"))
    assert isinstance(conflict, NoSolutionError)
    assert isinstance(absent, NoSolutionError)
    start = "the pins do not fit the Python indexes of this host (http://h/simple): all versions of"
    assert conflict.message.startswith(start)
    assert "you require small==1.1" in conflict.message
    assert absent.about == "small"
    assert absent.message.endswith("there is no version of small==1.2 and you require small==1.2")


@given(st.one_of(st.text(), st.text().map("error: {}".format)))
def test_every_failure_is_one_line(text: str) -> None:
    assert "\n" not in failure(text, Indexes(urls=())).message
