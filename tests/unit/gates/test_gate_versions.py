"""The gates of versions, budget and litter: what counts, what is said, and how severe it is."""

from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.gates.contents import Kind, Stated, Trace
from primus_images.gates.examined import Finding, LayerFacts
from primus_images.gates.rules import budget, litter, versions


def messages(kind: Kind, version: str, pinned: str) -> list[str]:
    layer = ("torch", [Stated(kind, "a", version, "p/a")])
    pins = {"a": pinned}
    wheels = pins if kind == "wheel" else {}
    debs = pins if kind == "deb" else {}
    report = versions.versions_inside([layer], wheels=wheels, debs=debs, components=pins)
    return [finding.message for finding in report.findings]


@pytest.mark.parametrize(
    ("kind", "stated", "pinned", "is_same"),
    [
        ("wheel", "1.0", "1.0.0", True),
        ("wheel", "1.0.post1", "1.0-1", True),
        ("wheel", "1.0+rocm", "1.0", False),
        ("wheel", "not a version", "not a version", True),
        ("wheel", "not a version", "1.0", False),
        ("deb", "1.0", "1.0", True),
        ("deb", "1.0", "1.0.0", False),
        ("header", "1.2", "1.2.3", True),
        ("header", "1.2.3", "1.2.3-4+b1~c", True),
        ("library", "1.2.3", "1.2", False),
        ("library", "1.2", "1.20", False),
    ],
)
def test_each_kind_of_version_is_compared_as_its_makers_write_it(
    kind: Kind, stated: str, pinned: str, is_same: bool
) -> None:
    place = "versions.yaml" if kind in ("header", "library") else "the lock"
    sentence = f"a is {stated} in the image, {pinned} in {place}"
    assert messages(kind, stated, pinned) == ([] if is_same else [sentence])


def test_a_vendored_package_is_not_compared_and_a_difference_has_its_place() -> None:
    stated = [Stated("vendored", "a", "9", "p/v"), Stated("deb", "b", "2", "p/b")]
    report = versions.versions_inside([("l", stated)], wheels={}, debs={"b": "1"})
    message = "b is 2 in the image, 1 in the lock"
    assert report.findings == [Finding("error", message, "l", "p/b")]


@pytest.mark.parametrize(
    ("stated", "summary"),
    [
        ([], "no versions stated"),
        ([("wheel", "a")], "1 wheel"),
        ([("wheel", "a"), ("wheel", "a"), ("deb", "b"), ("deb", "c")], "1 wheel, 2 debs"),
        ([("header", "a"), ("header", "b"), ("library", "c")], "2 headers, 1 library"),
        ([("library", "b"), ("library", "c")], "2 libraries"),
    ],
)
def test_the_summary_counts_names_of_each_kind(stated: list[Any], summary: str) -> None:
    layer = ("l", [Stated(kind, name, "1", "p") for kind, name in stated])
    assert versions.versions_inside([layer], wheels={}, debs={}).summary == summary


def examined(*layers: Any, **fields: Any) -> Any:
    """An image with these layers: name, kind, size, and its facts."""
    rows = []
    facts = {}
    for name, kind, size, layer_facts in layers:
        action = SimpleNamespace(name=name, kind=kind, needs=fields.get("needs", ()))
        rows.append((action, SimpleNamespace(blob=SimpleNamespace(size=size))))
        facts[name] = layer_facts
    resolved = SimpleNamespace(
        budget_gb=fields.get("budget_gb"),
        choice=SimpleNamespace(channel="amd"),
        target=SimpleNamespace(budgets_gb=fields.get("budgets_gb", {})),
        place=lambda *key: " ".join(key),
    )
    plan = SimpleNamespace(layers=[action for action, _ in rows], resolved=resolved)
    sizes = [size for _, _, size, _ in layers]
    image = SimpleNamespace(
        plan=plan, rows=rows, size=sum(sizes), config=fields.get("config", b"{}")
    )
    return SimpleNamespace(image=image, facts=facts, workspace=None)


SIZES = [200, 700, 100, 600, 300, 500, 400]
LAYERS = [(f"l{size}", "wheels", size * 10**6, LayerFacts()) for size in SIZES]


@pytest.mark.parametrize(
    ("budget_gb", "summary", "passed"),
    [
        (None, "2.8 GB compressed", True),
        (2.8, "2.8 GB compressed of 2.8 GB", True),
        (2.799999999, "2.8 GB compressed of 2.8 GB", False),
        (2.0, "2.8 GB compressed of 2.0 GB", False),
    ],
)
def test_an_image_may_be_as_large_as_its_budget(
    budget_gb: float | None, summary: str, passed: bool
) -> None:
    report = budget.judge(examined(*LAYERS, budget_gb=budget_gb))
    assert (report.summary, report.passed) == (summary, passed)


@pytest.mark.parametrize(
    ("budgets", "place"),
    [
        ({}, "budget_gb"),
        ({"pypi": 1}, "budget_gb"),
        ({"amd": 2}, "budgets_gb amd"),
    ],
)
def test_a_budget_that_is_exceeded_names_its_place_and_the_five_largest_layers(
    budgets: dict[str, float], place: str
) -> None:
    report = budget.judge(examined(*LAYERS, budget_gb=2.0, budgets_gb=budgets))
    (finding,) = report.findings
    assert (finding.severity, finding.path) == ("error", place)
    names = [row.split()[0] for row in finding.message.partition(": ")[2].split(", ")]
    assert names == ["l700", "l600", "l500", "l400", "l300"]


PUBLISHED = " (as its package is published)"


@pytest.mark.parametrize(
    ("kind", "needs", "rule", "path", "seen", "severity"),
    [
        ("wheels", (), "secret", "a", "a private key", "warning"),
        ("wheels", (), "build path", "a", "/home/x", None),
        ("wheels", (), "cache", "a", "pip's cache", "error"),
        ("wheels", ("build",), "secret", "a", "a private key", "error"),
        ("wheels", ("build",), "build path", "a", "/tmp/x", "error"),
        ("wheels", ("build",), "build path", "a", "/home/author/x", None),
        ("wheels", ("build",), "build path", "a", "/home/me/x", "error"),
        ("debs", (), "secret", "usr/lib/a", "a private key", "warning"),
        ("debs", (), "secret", "etc/a", "a private key", "error"),
        ("debs", (), "build path", "usr/lib/a", "/home/x", "error"),
        ("image", (), "secret", "a", "a private key", "warning"),
        ("kernels", (), "build path", "a", "/tmp/x", None),
        ("files", (), "secret", "a", "a private key", "error"),
        ("image", (), "credentials", "root/.netrc", "a login", "error"),
    ],
)
def test_litter_is_an_error_where_this_project_made_the_file(
    kind: str,
    needs: tuple[str, ...],
    rule: Any,
    path: str,
    seen: str,
    severity: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(litter, "machine_paths", lambda workspace: [b"/home/me"])
    facts = LayerFacts(traces=[Trace(rule, path, seen)])
    report = litter.judge(examined(("l", kind, 1, facts), needs=needs))
    if severity is None:
        assert report.findings == []
        return
    message = f"{rule}: {seen}{PUBLISHED if severity == 'warning' else ''}"
    assert report.findings == [Finding(severity, message, "l", path)]


def test_a_secret_in_the_settings_of_the_image_is_one_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(litter, "machine_paths", lambda workspace: [])
    monkeypatch.setattr(litter, "secrets_in", lambda data: ["a key"] * data.count(b"k"))
    assert litter.judge(examined(config=b"{}")).findings == []
    (finding,) = litter.judge(examined(config=b"kk")).findings
    message = "secret: a key in the image's settings"
    assert finding == Finding("error", message, path="config")
