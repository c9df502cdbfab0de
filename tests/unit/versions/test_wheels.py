"""Which files of an index fit a base, and which of them is taken."""

import pytest

from primus_images.errors import InputError
from primus_images.versions import wheels
from primus_images.versions.indexes import Indexes, Offer
from primus_images.versions.lock import BaseRequest, Request

PUBLIC = "http://public/simple"
OWN = "http://own/simple"
FITTING = Offer(file="torch-2.9.0-cp311-cp311-manylinux_2_28_x86_64.whl", url="a")


def request(*indexed: str, pure: tuple[str, ...] = ()) -> Request:
    base = BaseRequest(suite="bookworm", python="3.11.2", packages=("bash",))
    return Request(
        target="cpu",
        channel="amd",
        python="3.11",
        bases={"b": base},
        wheels={"torch": "2.9.0"},
        indexes={"own": OWN},
        indexed=indexed,
        pure=pure,
    )


def offered(monkeypatch: pytest.MonkeyPatch, **offers: list[Offer]) -> Indexes:
    """The indexes ``public`` and ``own`` with these offers of every package."""
    by_place = {PUBLIC: offers.get("public", []), OWN: offers.get("own", [])}
    monkeypatch.setattr(Indexes, "offers", lambda _indexes, _name, place: by_place[place])
    return Indexes(urls=(PUBLIC,), own={"own": OWN})


@pytest.mark.parametrize(
    "offer",
    [
        Offer(file="torch-2.9.0-cp311-cp311-manylinux_2_28_aarch64.whl", url="a"),
        Offer(file="torch-2.9.0-cp312-cp312-manylinux_2_28_x86_64.whl", url="a"),
        # Bookworm has glibc 2.36.
        Offer(file="torch-2.9.0-cp311-cp311-manylinux_2_37_x86_64.whl", url="a"),
        Offer(file="torch-2.9.0-cp311-cp311-win_amd64.whl", url="a"),
        Offer(file="torchvision-2.9.0-cp311-cp311-manylinux_2_28_x86_64.whl", url="a"),
        Offer(file="torch-2.9.0.tar.gz", url="a"),
        Offer(file="torch-2.9.0-py3-none-any.whl", url="a", python=">=3.12"),
        Offer(file="torch-2.9.0-py3-none-any.whl", url="a", python="3.11 or so"),
    ],
    ids=lambda offer: f"{offer.file} {offer.python}",
)
def test_a_wheel_that_does_not_fit_the_base_is_no_offer(
    offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexes = offered(monkeypatch, public=[offer, FITTING])
    found = [row for _, _, row in wheels._available("torch", request(), indexes, "wheel")]
    assert found == [FITTING]


def test_the_channels_own_indexes_come_last_and_alone_for_what_is_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    indexes = offered(monkeypatch, public=[FITTING], own=[FITTING])
    of_any = [index for index, _, _ in wheels._available("torch", request(), indexes, "wheel")]
    assert of_any == [None, "own"]
    theirs = wheels._available("torch", request("torch"), indexes, "wheel")
    assert [index for index, _, _ in theirs] == ["own"]


def test_an_archive_of_sources_is_taken_by_its_exact_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    archives = [Offer(file=f"one-{version}.tar.gz", url="a") for version in ("1.0", "1.0.1")]
    offered(monkeypatch, public=archives)
    found = list(wheels._available("one", request(), Indexes(urls=(PUBLIC,)), "sdist"))
    assert [str(version) for _, version, _ in found] == ["1.0", "1.0.1"]


def test_the_wheel_for_the_newest_platform_that_fits_is_taken() -> None:
    package = {"name": "torch", "version": "2.9.0"}
    older = Offer(file="torch-2.9.0-cp311-cp311-manylinux_2_17_x86_64.whl", url="a")
    stable = Offer(file="torch-2.9.0-cp39-abi3-manylinux_2_28_x86_64.whl", url="a")
    everywhere = Offer(file="torch-2.9.0-py3-none-any.whl", url="a")
    foreign = Offer(file="torch-2.9.0-cp312-cp312-manylinux_2_28_x86_64.whl", url="a")
    offers = [foreign, everywhere, stable, older, FITTING]
    taken = []
    while len(offers) > 1:
        best = wheels._best(package, offers, request())
        taken.append(best)
        offers.remove(best)
    assert taken == [FITTING, older, stable, everywhere]


def test_a_pure_package_needs_a_wheel_for_every_platform() -> None:
    package = {"name": "torch", "version": "2.9.0"}
    everywhere = Offer(file="torch-2.9.0-py3-none-any.whl", url="a")
    pure = request(pure=("torch",))
    assert wheels._best(package, [FITTING, everywhere], pure) == everywhere
    with pytest.raises(InputError, match=r"torch 2\.9\.0 has no wheel for every platform"):
        wheels._best(package, [FITTING], pure)
