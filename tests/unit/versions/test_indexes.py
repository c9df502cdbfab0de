from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from primus.versions.indexes import Indexes, parse_config
from primus.versions.pages import Link, parse_page
from primus.versions.traffic import bare_url

SHA = "cd" * 32


def test_config_variables_win_over_install_over_global() -> None:
    listing = (
        "global.index-url='http://global/simple'\nglobal.extra-index-url='\\nhttp://a/simple\\nhttp://b/simple'\n"
        "install.index-url='http://install/simple'\n:env:.find-links='/one /two'\ndownload.index-url='http://no'\nrubbish\n"
    )
    settings = parse_config(listing)
    assert settings["index-url"] == "http://install/simple"
    assert parse_config(listing + ":env:.index-url='http://env/simple'\n")["index-url"] == "http://env/simple"
    indexes = Indexes.from_settings(settings, "http://default/")
    assert indexes.index_urls == ("http://install/simple", "http://a/simple", "http://b/simple")
    assert indexes.find_links == ("/one", "/two")


def test_no_index_leaves_find_links_only() -> None:
    indexes = Indexes.from_settings({"no-index": "true", "find-links": "/wheels"}, "http://default/")
    assert indexes.index_urls == ()
    assert indexes.places("torch") == ("/wheels",)


def test_local_places_are_asked_before_remote_ones() -> None:
    settings = {"index-url": "http://a/simple", "extra-index-url": "file:///b/simple", "find-links": "/c"}
    assert [p[0] for p in Indexes.from_settings(settings, "").places("x")] == ["/", "f", "h"]


def test_credentials_leave_the_url_and_every_text() -> None:
    indexes = Indexes.from_settings({"index-url": "https://me:p%40ss@host:8443/simple"}, "")
    assert indexes.index_urls == ("https://host:8443/simple",)
    assert indexes.credentials == {"host:8443": ("me", "p@ss")}
    assert "ss" not in repr(indexes).replace("class", "").replace("pass", "")


def test_both_page_forms_give_the_same_links() -> None:
    html = f'<a href="../../f/a%2Bb-1.whl#sha256={SHA}">a</a><a href="/g/c.whl">c</a>'
    json = (
        f'{{"files": [{{"filename": "a+b-1.whl", "url": "../../f/a%2Bb-1.whl", "hashes": {{"sha256": "{SHA}"}}}},'
        '{"filename": "c.whl", "url": "/g/c.whl", "hashes": {}}]}'
    )
    expected = (
        Link(file="a+b-1.whl", url="http://h/f/a%2Bb-1.whl", sha256=SHA),
        Link(file="c.whl", url="http://h/g/c.whl"),
    )
    assert parse_page(html, "text/html", "http://h/simple/a/") == expected
    assert parse_page(json, "application/vnd.pypi.simple.v1+json", "http://h/simple/a/") == expected


def test_base_href_moves_the_links() -> None:
    (link,) = parse_page('<base href="http://cdn/x/"><a href="a-1.whl">', "text/html", "http://h/simple/a/")
    assert link.url == "http://cdn/x/a-1.whl"


def test_folder_offers_its_files(tmp_path: Path) -> None:
    (tmp_path / "a+b-1.whl").touch()
    indexes = Indexes.from_settings({"find-links": str(tmp_path), "no-index": "1"}, "")
    (link,) = indexes.offers(indexes.session(), str(tmp_path))
    assert link.file == "a+b-1.whl"
    assert link.url.startswith("file://")


@given(st.from_regex(r"[a-z]{1,9}", fullmatch=True), st.from_regex(r"[A-Za-z0-9]{3,9}SECRET", fullmatch=True))
def test_a_bare_url_drops_every_secret(user: str, secret: str) -> None:
    shown = bare_url(f"https://{user}:{secret}@host/path/file.whl?token={secret}#sig={secret}")
    assert shown == "https://host/path/file.whl"
