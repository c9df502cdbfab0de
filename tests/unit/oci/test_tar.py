"""The tar writer: read back by Python's own tarfile, the same bytes whatever the order, clean paths
only.
"""

import hashlib
import io
import string
import tarfile

import pytest
from hypothesis import given, settings, strategies as st

from primus_images.errors import CheckFailed, InputError
from primus_images.oci.tar import MTIME, Entry, Kind, in_order, write_tar

NAME = st.text(st.sampled_from(string.ascii_letters + "._-é漢"), min_size=1, max_size=60).filter(
    lambda name: name not in (".", "..") and not name.startswith(".wh.")
)
PATH = st.lists(NAME, min_size=1, max_size=6).map("/".join)


@st.composite
def entry(draw: st.DrawFn) -> Entry:
    path = draw(PATH)
    kind = draw(st.sampled_from(["file", "file", "symlink", "dir"]))
    owner = draw(st.sampled_from([0, 1000, 3_000_000]))
    mode = draw(st.sampled_from([0o644, 0o755, 0o4755, 0o1777]))
    if kind == "file":
        data = draw(st.binary(max_size=2000))
        xattrs = draw(
            st.sampled_from(
                [{}, {"user.note": b"a\nb=c"}, {"security.capability": bytes(range(20))}]
            )
        )
        return Entry(
            path=path, mode=mode, uid=owner, gid=owner, size=len(data), source=data, xattrs=xattrs
        )
    if kind == "symlink":
        return Entry(path=path, kind="symlink", mode=0o777, link=draw(PATH))
    return Entry(path=path, kind="dir", mode=mode, uid=owner, gid=owner)


@st.composite
def tree(draw: st.DrawFn) -> list[Entry]:
    """Entries in which no path lies below a file or link."""
    found: dict[str, Entry] = {}
    for one in draw(st.lists(entry(), max_size=12)):
        parts = one.path.split("/")
        parents = ["/".join(parts[:i]) for i in range(1, len(parts))]
        if one.path in found or any(p in found and found[p].kind != "dir" for p in parents):
            continue
        if one.kind != "dir" and any(other.startswith(one.path + "/") for other in found):
            continue
        found[one.path] = one
    return list(found.values())


def written(entries: list[Entry]) -> bytes:
    out = io.BytesIO()
    list(write_tar(in_order(entries), out.write))
    return out.getvalue()


def opened(entries: list[Entry]) -> tarfile.TarFile:
    return tarfile.TarFile(fileobj=io.BytesIO(written(entries)))


@given(tree())
@settings(max_examples=150, deadline=None)
def test_tarfile_reads_back_what_was_written(entries: list[Entry]) -> None:
    archive = opened(entries)
    members = {m.name: m for m in archive}
    for one in entries:
        member = members[one.path]
        assert member.mtime == MTIME
        if one.kind == "file":
            stream = archive.extractfile(member)
            assert stream is not None
            assert stream.read() == one.source
            assert (member.mode, member.uid, member.gid) == (one.mode, one.uid, one.gid)
            for key, value in one.xattrs.items():
                assert (
                    member.pax_headers[f"SCHILY.xattr.{key}"].encode("utf-8", "surrogateescape")
                    == value
                )
        elif one.kind == "symlink":
            assert member.issym()
            assert member.linkname == one.link
        else:
            assert member.isdir()
            assert member.mode == one.mode


@pytest.mark.parametrize("kind", ["file", "dir"])
def test_what_no_one_else_owns_is_roots(kind: Kind) -> None:
    (member,) = opened([Entry(path="a", kind=kind)])
    assert (member.uid, member.gid, member.mode) == (0, 0, 0o644)


def test_the_bytes_of_a_layer_are_the_same_in_every_release() -> None:
    entries = [
        Entry(path="opt", kind="dir", mode=0o755),
        Entry(path="opt/a", size=5, source=b"hello", mode=0o755, uid=7, gid=8),
        Entry(path="opt/b", kind="symlink", mode=0o777, link="a"),
        Entry(path="opt/" + "long/" * 50 + "c", size=0, xattrs={"user.a": b"b"}),
    ]
    digest = hashlib.sha256(written(entries)).hexdigest()
    assert digest == "e95fa4e00cd03236cb4ac89becd0f87bec26570d6633544101c274ec214b65fd", (
        "images of the same pins would have other digests"
    )


@given(tree(), st.randoms())
@settings(max_examples=60, deadline=None)
def test_order_of_entries_does_not_matter(entries: list[Entry], random: object) -> None:
    shuffled = list(entries)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert written(shuffled) == written(entries)


@pytest.mark.parametrize("path", ["", "/etc", "a//b", "a/../b", "./a", "a/", "a\0b"])
def test_unclean_path_is_refused(path: str) -> None:
    with pytest.raises(InputError, match="cannot be in an image"):
        Entry(path=path)


def test_path_given_twice_is_refused() -> None:
    with pytest.raises(InputError, match="given twice"):
        in_order([Entry(path="a"), Entry(path="a")])


def test_file_that_shrinks_while_being_read_is_an_error() -> None:
    with pytest.raises(CheckFailed, match="changed while the build read it"):
        written([Entry(path="a", size=5, source=b"abc")])


def test_size_beyond_ustar_goes_into_a_pax_header() -> None:
    huge = Entry(path="huge", size=9 << 30)
    head: list[bytes] = []
    with pytest.raises(CheckFailed):
        list(write_tar([huge], head.append))
    assert b"size=9663676416\n" in head[0]


def test_hard_link_comes_after_its_target() -> None:
    entries = [Entry(path="a", kind="hardlink", link="z"), Entry(path="z", size=1, source=b"x")]
    assert [e.path for e in in_order(entries)] == ["z", "a"]
    assert opened(entries).getmember("a").islnk()


def header_of(entry: Entry) -> bytes:
    head: list[bytes] = []
    next(write_tar([entry], head.append))
    return head[0]


@pytest.mark.parametrize(
    ("entry", "has_pax"),
    [
        (Entry(path="f", size=(8 << 30) - 1), False),
        (Entry(path="f", size=8 << 30), True),
        (Entry(path="f", uid=0o7777777, gid=0o7777777), False),
        (Entry(path="f", uid=0o7777777 + 1), True),
        (Entry(path="f", gid=0o7777777 + 1), True),
        (Entry(path="n" * 100), False),
        (Entry(path="n" * 101), True),
        (Entry(path="p" * 155 + "/" + "n" * 100), False),
        (Entry(path="p" * 156 + "/" + "n" * 90), True),
        (Entry(path="p" * 155 + "/" + "n" * 101), True),
        (Entry(path="d" * 99, kind="dir"), False),
        (Entry(path="d" * 100, kind="dir"), True),
        (Entry(path="l", kind="symlink", link="t" * 100), False),
        (Entry(path="l", kind="symlink", link="t" * 101), True),
        (Entry(path="é"), True),
    ],
)
def test_a_pax_header_is_written_only_for_what_ustar_cannot_hold(
    entry: Entry, has_pax: bool
) -> None:
    header = header_of(entry)
    assert header.startswith(b"././@PaxHeader") is has_pax
    member = tarfile.TarFile(fileobj=io.BytesIO(header + bytes(1024))).next()
    assert member is not None
    assert (member.name, member.linkname) == (entry.path, entry.link)
    assert (member.uid, member.gid, member.size) == (entry.uid, entry.gid, entry.size)
