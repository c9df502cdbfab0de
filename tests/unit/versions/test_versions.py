import pytest

from primus_images.errors import InputError
from primus_images.schema import build
from primus_images.versions.components import Versions
from primus_images.yamlfile import parse
from tables import table_of

HEAD = """\
release: v26.11
created: 2026-11-20
bases:
  bookworm: {suite: bookworm, python: 3.11.2, packages: [python3-minimal]}
"""
ONE = HEAD + "components:\n  torch:\n    name: PyTorch\n    pins:\n      - {PIN}\n"


def versions(text: str) -> Versions:
    return build(Versions, parse(text, "versions.yaml"))


def refused(text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        versions(text)
    return caught.value


def pin(text: str) -> str:
    return ONE.replace("PIN", text)


@pytest.mark.parametrize(
    "version",
    [
        "2.13.0",
        "2.13.0+cpu",
        "2.13.0+rocm7.15",
        "1.0rc1",
        "1.0.post2",
        "1.0.dev20261120",
        "2.0a1.dev3+git0123abc",
    ],
)
def test_exact_versions_are_taken(version: str) -> None:
    made = versions(pin(f"wheel: torch, version: {version}, channel: pypi"))
    assert made.components["torch"].pins[0].version == version


@pytest.mark.parametrize(
    ("owner", "channel"), [("rocm-sdk-libraries", "amd"), ("librccl1", "debian"), ("torch", "pypi")]
)
def test_what_is_inside_a_package_is_of_the_packages_channel(owner: str, channel: str) -> None:
    made = versions(pin(f"inside: {owner}, version: 2.27.7, channel: {channel}"))
    (inside,) = made.components["torch"].pins
    assert (inside.inside, inside.channel) == (owner, channel)


@pytest.mark.parametrize(
    "wrong",
    [
        "deb: librccl1, version: 2.27.7, channel: amd",
        "wheel: torch, version: 2.13.0, channel: debian",
    ],
)
def test_debian_is_the_channel_of_debs_alone(wrong: str) -> None:
    assert "channel debian is for deb pins" in refused(pin(wrong)).message


@pytest.mark.parametrize(
    "moving",
    [
        "main",
        "latest",
        ">=2.13",
        "2.*",
        "~=2.13",
        "==2.13.0",
        "0a1b2c3",
        "v2.13.0",
        "2.13.0 ",
        "nightly",
    ],
)
def test_moving_references_are_refused_with_the_reason(moving: str) -> None:
    error = refused(pin(f"wheel: torch, version: {moving!r}, channel: pypi"))
    assert error.where == "versions.yaml:9:24"
    assert "one exact version" in error.message
    assert "can mean other bytes tomorrow" in error.message


@pytest.mark.parametrize("suite", ["stable", "oldstable", "testing", "unstable", "latest"])
def test_a_moving_suite_is_refused_with_the_reason(suite: str) -> None:
    error = refused(
        pin("wheel: torch, version: 1.0, channel: pypi").replace(
            "suite: bookworm", f"suite: {suite}"
        )
    )
    assert (error.where or "").startswith("versions.yaml:4:")
    assert "will move" in error.message
    assert "codename" in error.message


def _base(text: str) -> str:
    head = HEAD.replace("suite: bookworm, python: 3.11.2, packages: [python3-minimal]", text)
    return head + "components: {}\n"


def test_a_package_may_come_from_another_suite() -> None:
    made = versions(_base("suite: sid, python: 3.14.10, packages: [rocminfo, hipcc/experimental]"))
    assert made.bases["bookworm"].packages == ("rocminfo", "hipcc/experimental")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("suite: sid, python: 3.14.10, packages: [hipcc/unstable]", "'unstable' will move"),
        ("suite: sid, python: 3.14.10, packages: [hipcc/]", "name/suite"),
        (
            "suite: sid, python: 3.14.10, packages: [hipcc, hipcc/experimental]",
            "hipcc is named twice",
        ),
    ],
)
def test_suites_that_fit_no_base_are_refused_with_the_reason(text: str, words: str) -> None:
    error = refused(_base(text))
    assert (error.where or "").startswith("versions.yaml:4:")
    assert words in error.message


@pytest.mark.parametrize(("text", "words"), table_of("versions.a_pin_says_one_thing"))
def test_a_pin_says_one_thing(text: str, words: str) -> None:
    error = refused(pin(text))
    assert words in str(error)
    assert (error.where or "").startswith("versions.yaml:")


def test_one_pin_per_channel_and_target() -> None:
    line = "- {wheel: torch, version: 1.0, channel: pypi, targets: [cpu]}"
    text = (
        pin("wheel: torch, version: 2.0, channel: pypi, targets: [cpu, h200]") + f"      {line}\n"
    )
    error = refused(text)
    assert "two pins for channel pypi, target cpu" in error.message
    assert error.where == "versions.yaml:10:9"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("follows: cuda", "no component is called 'cuda'"),
        ('needs: {1.0: "cuda>=1"}', "no component is called 'cuda'"),
        ("needs: {1.0: torch}", "is not a requirement"),
        ('needs: {one: "torch>=1"}', "Invalid version"),
        ('needs: {2.0: "torch>=3"}', "torch 2.0 needs torch>=3, and a target may have 2.0"),
    ],
)
def test_what_holds_a_component_is_named_and_holds(line: str, words: str) -> None:
    text = pin("wheel: torch, version: 2.0, channel: pypi")
    assert words in refused(text + f"    {line}\n").message
    versions(text + '    needs: {2.1: "torch>=3"}\n')


def test_the_same_component_twice() -> None:
    text = pin("wheel: torch, version: 2.0, channel: pypi")
    error = refused(text + "  torch:\n    name: again\n    pins: []\n")
    assert error.where == "versions.yaml:10:3"
    assert "duplicate key" in error.message


@pytest.mark.parametrize(
    ("day", "words"), [("2026-13-45", "not a valid date"), ("1969-01-01", "1980-01-01 or later")]
)
def test_the_date_is_one_that_archives_hold(day: str, words: str) -> None:
    error = refused(pin("wheel: a, version: 1.0, channel: pypi").replace("2026-11-20", day))
    assert words in error.message
    assert error.where == "versions.yaml:2:1"


@pytest.mark.parametrize(
    "line", ["release: 26.11", "release: latest", "created: today", "created: 2026-1-2"]
)
def test_the_head_is_exact(line: str) -> None:
    key = line.partition(":")[0]
    text = "\n".join(
        line if row.startswith(key) else row
        for row in pin("wheel: a, version: 1.0, channel: pypi").split("\n")
    )
    assert f"{key} must be" in refused(text).message


def test_names_are_plain() -> None:
    text = pin("wheel: a, version: 1.0, channel: pypi").replace("  torch:", "  Torch_x:")
    assert "'Torch_x' is not a name" in refused(text).message


GIT = "git: https://127.0.0.1/a, package: a, version: 1.0, channel: amd, build: {}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{GIT}, commit: main", "a full commit of 40 digits"),
        (f"{GIT}, commit: 0123456", "a full commit of 40 digits"),
        (GIT, "a git pin needs `commit`"),
        (
            f"wheel: a, version: 1.0, channel: amd, commit: {'0' * 40}",
            "`commit` goes with `git` only",
        ),
        (
            f"{GIT.replace('{}', '{built: [gone]}')}, commit: {'0' * 40}",
            "no component is called 'gone'",
        ),
        ("git: main, package: a, version: 1.0, channel: amd", "a URL that git fetches from"),
    ],
)
def test_a_repository_is_pinned_by_its_full_commit(text: str, words: str) -> None:
    assert words in str(refused(pin(text)))


def test_an_image_is_pinned_by_digest() -> None:
    text = pin("wheel: a, version: 1.0, channel: pypi")
    digest = "0" * 64
    for image, good in (
        ("ubuntu:24.04", False),
        ("ubuntu", False),
        (f"ubuntu@sha256:{digest}", True),
    ):
        changed = text.replace("suite: bookworm", f"image: {image}, suite: bookworm")
        if good:
            assert versions(changed).bases["bookworm"].image == image
        else:
            assert "a tag can mean other bytes tomorrow" in str(refused(changed))


def test_a_device_pin_is_of_the_targets_architecture() -> None:
    made = (
        versions(pin('wheel: "torch-device-{arch}", version: 1.0, channel: amd'))
        .components["torch"]
        .pins[0]
    )
    assert made.resolved(3, "gfx942").wheel == "torch-device-gfx942"
    assert made.resolved(3, "gfx942").place == 3
    with pytest.raises(ValueError, match="the target has none"):
        made.resolved(0, None)


def test_a_need_binds_pins_of_its_version_that_share_a_target() -> None:
    text = ONE.replace("{PIN}", "{wheel: torch, version: 2.13, channel: pypi, targets: [cpu]}")
    text += (
        "      - {wheel: torch, version: 2.14, channel: pypi, targets: [h200]}\n"
        "  torchao:\n    name: AO\n    needs: {0.3: 'torch>=2.14'}\n    pins:\n"
        "      - {wheel: torchao, version: VERSION, channel: pypi, targets: [TARGET]}\n"
    )
    for version, target, fits in (
        ("0.3", "h200", True),
        ("0.3", "cpu", False),
        ("0.2", "cpu", True),
    ):
        changed = text.replace("VERSION", version).replace("TARGET", target)
        if fits:
            versions(changed)
        else:
            error = refused(changed)
            assert "torchao 0.3 needs torch>=2.14, and a target may have 2.13" in error.message
