"""The documents beside a published image: bill of materials, provenance, artifact manifests."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from spdx_tools.spdx.parser.jsonlikedict.json_like_dict_parser import JsonLikeDictParser
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from primus_images.cli.host import sbom as of_sbom
from primus_images.cli.main import main
from primus_images.errors import InputError
from primus_images.gates.contents import Kind, Stated
from primus_images.gates.examined import LayerFacts
from primus_images.oci.store import digest_of
from primus_images.recipes.digest import digest_of_recipe
from primus_images.release import publish
from primus_images.release.artifact import Document, artifact, listed
from primus_images.release.bills import IMAGE, contents, cyclonedx, listing, purl, spdx
from primus_images.release.documents import SPDX, documents, provenance as provenance_of
from primus_images.release.git import Checkout
from primus_images.release.licences import Licences, licence_in, licences, listed_name
from primus_images.release.policy import (
    Policy,
    forbidden_in,
    licence_line,
    load as load_policy,
    unknown_licences,
)
from primus_images.release.records import records_of
from primus_images.release.reference import on_this_machine
from primus_images.training.judge.record import RecordedImage
from primus_images.versions.lock import Lock, LockedFile, load
from records import recipe, record
from tables import text_of

ROOT = Path(__file__).parents[3]
LOCKS = [ROOT / f"images/locks/{name}.json" for name in ("pypi/cpu", "pypi/h200", "debian/mi355x")]
DIGEST = "sha256:" + "a" * 64
BASES = {"pypi": "bookworm", "debian": "rocm-preview"}


def read(path: Path) -> Lock:
    lock = load(path, path.name)
    assert lock
    return lock


def image(lock: Lock, **local: str) -> Any:
    """An image with what the documents read of it. ``local`` are components and their paths."""
    resolved = SimpleNamespace(
        lock=lock,
        ref="v26.11-x",
        name="x",
        roots=[BASES[lock.channel]],
        system="debian-12" if BASES[lock.channel] == "bookworm" else "ubuntu-24.04",
        versions=SimpleNamespace(release="v26.11", supported_until="2027-05-20"),
        choice=SimpleNamespace(channel=lock.channel, preview=None),
        gpu=None,
        target=SimpleNamespace(recipes=()),
        trained_with={},
        pins={name: SimpleNamespace(path=path) for name, path in local.items()},
    )
    layers = [SimpleNamespace(name="python", key="k1")]
    plan = SimpleNamespace(
        resolved=resolved, config={"created": "2026-11-20T00:00:00Z"}, layers=layers
    )
    return SimpleNamespace(plan=plan, digest=DIGEST)


COPYRIGHT = text_of("copyright")
WHEELS: dict[str, tuple[list[tuple[str, str]], str]] = {
    "expression": (
        [("License-Expression", "MIT OR Apache-2.0"), ("License", "GPL")],
        "MIT OR Apache-2.0",
    ),
    "field": (
        [("License", "Apache 2.0"), ("Classifier", "License :: OSI Approved :: BSD License")],
        "Apache-2.0",
    ),
    "trove": (
        [("Classifier", "License :: OSI Approved :: Apache Software License")],
        "Apache-2.0",
    ),
    "unclear field": (
        [
            ("License", "see LICENSE"),
            ("Classifier", "License :: OSI Approved"),
            ("Classifier", "License :: OSI Approved :: MIT License"),
        ],
        "MIT",
    ),
    "two": (
        [
            ("Classifier", "License :: OSI Approved :: MIT License"),
            ("Classifier", "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"),
        ],
        "MIT AND GPL-3.0-only",
    ),
    "small letters": ([("License-Expression", "mit or apache-2.0")], "MIT OR Apache-2.0"),
    "no expression": ([("License-Expression", "my own")], "LicenseRef-my-own-"),
    "words": ([("License", "BSD")], "BSD-3-Clause"),
    "combined": ([("License", "MPL-2.0 AND MIT")], "MPL-2.0 AND MIT"),
    "classifier": (
        [("License", "UNKNOWN"), ("Classifier", "License :: OSI Approved :: MIT License")],
        "MIT",
    ),
    "ambiguous": ([("License", "BSD")], "LicenseRef-BSD-49d9777d"),
    "proprietary": (
        [("Classifier", "License :: Other/Proprietary License")],
        "LicenseRef-Other-Proprietary-License",
    ),
    "gnu": ([("License", "LGPL-3.0-or-later")], "LGPL-3.0-or-later"),
    "silent": ([], ""),
}
# Many names of one licence, and names that are of none.
NAMES = {
    "The Apache License, Version 2.0": "Apache-2.0",
    "Apache License v2.0": "Apache-2.0",
    "Apache2": "Apache-2.0",
    "Apache License 2.0 (Apache-2.0)": "Apache-2.0",
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "http://www.apache.org/licenses/LICENSE-2.0": "Apache-2.0",
    "https://opensource.org/licenses/MIT": "MIT",
    "https://opensource.org/license/bsd-3-clause/": "BSD-3-Clause",
    "MIT/Apache-2.0": "MIT AND Apache-2.0",
    "MIT/X11": "MIT",
    "BSD 3-Clause License": "BSD-3-Clause",
    "GNU General Public License v3 or later (GPLv3+)": "GPL-3.0-or-later",
    "GPL v2 (or later)": "GPL-2.0-or-later",
    "Apache License (some files)": "",
    "MIT/other": "",
    "Apache License 3.0": "",
    "BSD License": "",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_licence_has_many_names_and_none_is_guessed(name: str) -> None:
    assert listed_name(name) == NAMES[name]


DEBS = {
    "machine": (
        COPYRIGHT,
        "((GPL-2.0-or-later OR Artistic-1.0) AND MIT) AND LGPL-2.1-or-later AND LicenseRef-mine-",
    ),
    "prose": ("Anybody may do anything.", "LicenseRef-copyright-"),
    "linked": (
        "machine",
        "((GPL-2.0-or-later OR Artistic-1.0) AND MIT) AND LGPL-2.1-or-later AND LicenseRef-mine-",
    ),
    "bare": ("", ""),
}


def stated(kind: Kind, name: str, licence: list[tuple[str, str]] = []) -> Stated:  # noqa: B006
    return Stated(kind=kind, name=name, version="1", path="x", licence=tuple(licence))


FACTS = LayerFacts(
    stated=(
        *(stated("wheel", name, rows) for name, (rows, _) in WHEELS.items()),
        *(stated("deb", n) for n in DEBS),
    ),
    copyrights={
        **{name: text for name, (text, _) in DEBS.items() if text},
        "wheel words": (
            "Redistribution and use in source and binary forms, with or\nwithout modification, are "
            "permitted … to endorse or promote products derived from this software"
        ),
    },
)


def test_licences_are_those_that_packages_declare_and_never_guessed() -> None:
    found = licences({"layer": FACTS})
    for name, (_, expression) in WHEELS.items():
        assert found.declared.get(f"wheel {name}", "").startswith(expression)
    for name, (_, expression) in DEBS.items():
        assert found.declared.get(f"deb {name}", "").startswith(expression)
    assert {"wheel silent", "deb bare"}.isdisjoint(found.declared)
    assert " Do what\n you like." in found.texts.values()
    assert all(text in found.declared["deb machine"] for text in found.texts if "mine" in text)


def declared(lock: Lock) -> Licences:
    """Licences for two packages of the lock."""
    found = licences({"layer": FACTS})
    names = [f"{'deb' if file.kind == 'deb' else 'wheel'} {file.name}" for file in lock.files[:2]]
    expressions = (found.declared["deb machine"], found.declared["wheel ambiguous"])
    return Licences(declared=dict(zip(names, expressions, strict=True)), texts=found.texts)


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("GPL-2+", "GPL-2.0-or-later"),
        ("GPL-3", "GPL-3.0-only"),
        ("LGPL-2.1+", "LGPL-2.1-or-later"),
        ("AGPL v3", "AGPL-3.0-only"),
        ("GFDL-1.3", "GFDL-1.3-only"),
        ("GFDL-2", "GFDL-2-only"),
        ("  MIT\nand more", "MIT"),
        ("GPL-3+ with Bison exception", "GPL-3.0-or-later WITH Bison-exception-2.2"),
        ("GPL-2+-with-Libtool-exception", "GPL-2.0-or-later WITH Libtool-exception"),
        ("GPL-2 with Linux-syscall-note exception", "GPL-2.0-only WITH Linux-syscall-note"),
        ("GPL-3+ with odd exception", "GPL-3.0-or-later"),
        ("BSD-3-clause-JANET", "BSD-3-Clause"),
        ("BSD-4-clause-KTH", "BSD-4-Clause"),
        ("MIT-OpenVision", "MIT"),
        ("", ""),
    ],
)
def test_short_names_become_spdx_names(name: str, expression: str) -> None:
    assert Licences().named(name, name) == expression


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_the_bill_of_every_lock_is_valid_spdx(path: Path) -> None:
    lock = read(path)
    source = Checkout("c" * 40, ["README.md"])
    inside = contents(image(lock, recipes="recipes"), source, declared(lock))
    document = spdx(inside)
    parsed = JsonLikeDictParser().parse(json.loads(json.dumps(document)))
    assert [m.validation_message for m in validate_full_spdx_document(parsed)] == []
    assert (
        JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(cyclonedx(inside))) is None
    )
    assert len(document["packages"]) == len(lock.files) + 3
    assert len({package["SPDXID"] for package in document["packages"]}) == len(document["packages"])
    *_, local, system = document["packages"]
    assert local["versionInfo"] == "c" * 40 + "+edited"
    assert system["primaryPackagePurpose"] == "OPERATING_SYSTEM"


def test_the_list_of_licences_is_read_once_for_all_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock = read(LOCKS[0])
    inside = contents(image(lock, recipes="recipes"), Checkout(None, []), declared(lock))
    spdx(inside)  # it and the library read the list here

    def refuse() -> None:
        pytest.fail("SPDX's list is read again")

    monkeypatch.setattr("license_expression.get_spdx_licensing", refuse)
    declarations = {package["licenseDeclared"] for package in spdx(inside)["packages"]}
    assert declarations - {"NOASSERTION"}


STATED = (
    Stated("wheel", "setuptools", "1", "x", requires=("packaging >= 24; python_version < '4'",)),
    Stated("wheel", "packaging", "1", "x", requires=("nothing",)),
    Stated("deb", "libc6", "2", "x", requires=("libgcc-s1",)),
    Stated("vendored", "more-itertools", "10.8", "x", (), (("License", "MIT"),), "setuptools"),
    Stated("vendored", "wheel", "0.46", "x", source="setuptools"),
    Stated("vendored", "wheel", "0.46", "y", source="setuptools"),
    Stated("vendored", "lost", "1", "x", source="nobody"),
)


def test_the_bill_has_the_system_what_is_brought_along_and_what_depends_on_what() -> None:
    names = ("setuptools", "packaging", "libc6", "libgcc-s1")
    files = []
    for name in names:
        is_deb = name.startswith("lib")
        files.append(
            LockedFile(
                kind="deb" if is_deb else "wheel",
                name=name,
                version="1",
                file=f"{name}_1_amd64.deb" if is_deb else f"{name}-1.whl",
                size=1,
                sha256="0" * 64,
                base="bookworm" if is_deb else None,
            )
        )
    lock = Lock(target="x", channel="pypi", pins={}, files=tuple(files))
    licensed = licences({"layer": LayerFacts(stated=list(STATED))})
    inside = contents(image(lock), Checkout(None, []), licensed, STATED)
    ids = {part.name: part.identifier for part in inside.parts}
    assert set(inside.needs) == {
        (ids["setuptools"], ids["packaging"]),
        (ids["libc6"], ids["libgcc-s1"]),
    }
    bill = spdx(inside)
    rows = set()
    for relation in bill["relationships"]:
        rows.add(
            tuple(
                relation[key] for key in ("spdxElementId", "relationshipType", "relatedSpdxElement")
            )
        )
    assert (ids["setuptools"], "CONTAINS", ids["more-itertools"]) in rows
    assert (IMAGE, "CONTAINS", ids["lost"]) in rows
    assert (IMAGE, "CONTAINS", "SPDXRef-system") in rows
    assert (ids["libc6"], "DEPENDS_ON", ids["libgcc-s1"]) in rows
    by_name = {package["name"]: package for package in bill["packages"]}
    assert by_name["more-itertools"]["licenseDeclared"] == "MIT"
    (reference,) = by_name["libc6"]["externalRefs"]
    assert reference["referenceLocator"] == "pkg:deb/debian/libc6@1?arch=amd64&distro=debian-12"
    document = cyclonedx(inside)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(document)) is None
    kinds = {row["name"]: row["type"] for row in document["components"]}
    assert kinds["debian"] == "operating-system"
    below = {row["ref"]: row.get("dependsOn", []) for row in document["dependencies"]}
    assert ids["more-itertools"] in below[ids["setuptools"]]


def bill_of(*declared: str) -> dict[str, Any]:
    packages = []
    for number, licence in enumerate(declared):
        row = {"name": f"p{number}", "versionInfo": "1", "licenseDeclared": licence}
        packages.append({**row, "externalRefs": []})
    return {"packages": [{"name": "primus", "licenseDeclared": "NOASSERTION"}, *packages]}


@pytest.mark.parametrize(
    ("licence", "unknown"),
    [
        ("MIT", False),
        ("NOASSERTION", True),
        ("LicenseRef-BSD-49d9777d", True),
        ("LicenseRef-public-domain-49d9777d", False),
        ("GPL-2.0-only AND LicenseRef-x-49d9777d", False),
        ("LicenseRef-x-1 OR LicenseRef-y-2", True),
        ("LicenseRef-PD-debian-1", False),
        ("LicenseRef-pdfium-1", True),
        ("", True),
    ],
)
def test_unknown_licences_are_counted(licence: str, unknown: bool) -> None:
    names, _, total = unknown_licences(bill_of(licence, "MIT"))
    assert (names, total) == (["p0"] if unknown else [], 2)


@pytest.mark.parametrize(("most", "refused"), [(None, False), (2, False), (1, True), (0, True)])
def test_a_policy_can_refuse_what_it_cannot_judge(most: int | None, refused: bool) -> None:
    data = json.dumps(bill_of("NOASSERTION", "LicenseRef-BSD-1", "MIT")).encode()
    documents = [Document(media_type=SPDX, name="sbom.spdx.json", data=data)]
    reasons = forbidden_in(documents, Policy(unknown_licences=most))
    assert bool(reasons) is refused
    if refused:
        assert "the licences of 2 packages are unknown" in reasons[0]
    assert licence_line(documents) == "licences: 2 of 3 unknown (p0, p1)"


@pytest.mark.parametrize("licence", ["MIT AND LicenseRef-BSD-1", "MIT OR LicenseRef-x-2"])
def test_what_is_known_in_part_is_unknown_to_a_policy(licence: str) -> None:
    data = json.dumps(bill_of(licence, "MIT", "NOASSERTION")).encode()
    documents = [Document(media_type=SPDX, name="sbom.spdx.json", data=data)]
    line = "licences: 1 of 3 unknown (p2); 1 known in part (p0)"
    assert licence_line(documents) == line
    assert forbidden_in(documents, Policy(unknown_licences=2)) == []
    assert forbidden_in(documents, Policy(unknown_licences=1)) == [
        "the licences of 2 packages are unknown, 1 of them in part, more than 1: p2, p0"
    ]


@pytest.mark.parametrize(
    "policy",
    [Policy(refused_licences=("MIT",)), Policy(unknown_licences=9), Policy(osv="none.json")],
)
def test_a_policy_about_packages_needs_a_bill_of_materials(policy: Policy) -> None:
    (reason,) = forbidden_in([], policy)
    assert reason == "it has no bill of materials, so licences and vulnerabilities are unknown"
    assert forbidden_in([], Policy()) == []


@pytest.mark.parametrize(
    ("name", "spdx"),
    [
        (
            "GPL-3.0",
            "GPL-3.0-only, and that of the same or a later version GPL-3.0-or-later",
        ),
        ("GPLv3+", "GPL-3.0-or-later"),
        ("Apache2", "Apache-2.0"),
    ],
)
def test_a_policy_hears_the_name_that_spdx_has_now(tmp_path: Path, name: str, spdx: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(f"refused_licences: [{name}]\n")
    with pytest.raises(InputError) as refused:
        load_policy(path)
    assert refused.value.message == f"SPDX's list has no licence {name!r}; its name is {spdx}"


@pytest.mark.parametrize(
    ("words", "licence"),
    [
        ("Apache License\n  Version 2.0, January 2004", "Apache-2.0"),
        ("Permission is hereby granted, free of charge, to any person obtaining a copy", "MIT"),
        (
            "Redistribution and use in source and binary forms, with or without modif…",
            "BSD-2-Clause",
        ),
        ("Do what you like.", ""),
        ("", ""),
    ],
)
def test_the_words_of_a_licence_are_known(words: str, licence: str) -> None:
    assert licence_in(words) == licence


def test_what_only_a_build_needed_is_not_said_to_be_inside() -> None:
    lock = read(ROOT / "images/locks/pypi/h200.json")
    inside = contents(image(lock), Checkout(None, []), Licences())
    document = spdx(inside)
    names = {package["SPDXID"]: package for package in document["packages"]}
    kinds: dict[str, set[str]] = {}
    for relation in document["relationships"]:
        if relation["relationshipType"] == "DESCRIBES":
            continue
        tool = relation["relationshipType"] == "BUILD_TOOL_OF"
        package = names[relation["spdxElementId" if tool else "relatedSpdxElement"]]
        if package["SPDXID"] != "SPDXRef-system":
            kinds.setdefault(relation["relationshipType"], set()).add(package["packageFileName"])
    assert kinds["CONTAINS"] == {
        f.file for f in lock.files if f.base == "bookworm" or (f.kind == "wheel" and f.base is None)
    }
    assert kinds["GENERATED_FROM"] == {"transformer_engine_torch-2.20.2.tar.gz"}
    assert any(name.startswith("g++") for name in kinds["BUILD_TOOL_OF"])
    scopes: dict[str, set[str]] = {}
    components = cyclonedx(inside)
    for component in components["components"]:
        scopes.setdefault(component["scope"], set()).add(component["bom-ref"])
    tools = {part.identifier for part in inside.parts if part.relation == "BUILD_TOOL_OF"}
    assert scopes["excluded"] == tools
    image_of, *_ = [row for row in components["dependencies"] if row["ref"] == IMAGE]
    contained = {part.identifier for part in inside.parts if part.relation == "CONTAINS"}
    assert set(image_of["dependsOn"]) == contained
    lines = listing(inside).splitlines()
    assert len(lines) == len(lock.files)
    assert [line.split()[1:] for line in lines if line.startswith("transformer-engine-torch ")] == [
        ["2.20.2", "built", "from", "licence", "not", "declared"]
    ]


@pytest.mark.parametrize(
    ("kind", "name", "version", "file", "url"),
    [
        ("wheel", "torch", "2.13.0+cpu", "t.whl", "pkg:pypi/torch@2.13.0%2Bcpu?file_name=t.whl"),
        ("deb", "g++", "4:12-1", "g_amd64.deb", "pkg:deb/debian/g%2B%2B@4:12-1?arch=amd64"),
        ("deb", "tzdata", "2026a", "tzdata_all.deb", "pkg:deb/debian/tzdata@2026a?arch=all"),
        ("layer", "ubuntu-01", "sha256:x", "f.tar.gz", "pkg:oci/ubuntu-01@sha256:f0"),
        ("git", "aiter", "0.1", "aiter.tar", "pkg:generic/aiter@0.1?checksum=sha256:f0"),
    ],
)
def test_package_urls(kind: str, name: str, version: str, file: str, url: str) -> None:
    locked = LockedFile(kind=kind, name=name, version=version, file=file, size=1, sha256="f0")  # type: ignore[arg-type]
    assert purl(locked) == url


@pytest.mark.parametrize(("edited", "commit"), [([], "c" * 40), (["README.md"], None)])
def test_the_documents_of_an_image_are_named_with_their_hashes(
    edited: list[str], commit: str | None
) -> None:
    made = image(read(LOCKS[0]))
    made.plan.resolved.lock_path = LOCKS[0]
    facts: dict[str, LayerFacts] = {}
    outcome: Any = SimpleNamespace(as_json=lambda: {"passed": True})
    papers = documents(made, outcome, facts, Checkout("c" * 40, edited))
    names = ["gates.json", "lock.json", "sbom.spdx.json", "sbom.cdx.json", "provenance.json"]
    assert [paper.name for paper in papers] == names
    assert papers[0].data == b'{"passed":true}'
    assert papers[1].data == LOCKS[0].read_bytes()
    predicate = json.loads(papers[-1].data)["predicate"]
    products = {
        row["name"]: f"sha256:{row['digest']['sha256']}"
        for row in predicate["runDetails"]["byproducts"]
    }
    assert products == {paper.name: digest_of(paper.data) for paper in papers[:-1]}
    sources = [
        row["digest"]["gitCommit"]
        for row in predicate["buildDefinition"]["resolvedDependencies"]
        if row.get("name") == "source"
    ]
    assert sources == ([commit] if commit else [])
    made.plan.resolved.lock = None
    papers = documents(made, outcome, facts, Checkout("c" * 40, edited))
    assert [paper.name for paper in papers] == ["gates.json", "provenance.json"]


def test_a_bill_is_printed_as_a_list_or_in_a_standard_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = contents(image(read(LOCKS[0])), Checkout(None, []), Licences())
    monkeypatch.setattr(of_sbom, "contents_of_target", lambda _: inside)
    assert main(["sbom", "cpu"]) == 0
    assert capsys.readouterr().out == listing(inside) + "\n"
    assert main(["sbom", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == spdx(inside)
    assert main(["sbom", "cpu", "--cyclonedx"]) == 0
    assert json.loads(capsys.readouterr().out) == cyclonedx(inside)


def test_provenance_names_the_commit_every_file_and_every_key() -> None:
    lock = read(ROOT / "images/locks/pypi/cpu.json")
    provenance = provenance_of(
        image(lock), "c" * 40, [Document(media_type="x", name="lock.json", data=b"a")]
    )
    assert provenance["subject"] == [{"name": "v26.11-x", "digest": {"sha256": "a" * 64}}]
    definition, details = (
        provenance["predicate"]["buildDefinition"],
        provenance["predicate"]["runDetails"],
    )
    assert details["byproducts"] == [
        {"name": "lock.json", "digest": {"sha256": digest_of(b"a")[7:]}}
    ]
    assert definition["internalParameters"] == {"layers": {"python": "k1"}}
    source, *files = definition["resolvedDependencies"]
    assert source["digest"] == {"gitCommit": "c" * 40}
    assert [entry["digest"]["sha256"] for entry in files] == [file.sha256 for file in lock.files]


def test_an_artifact_names_its_subject_and_the_list_names_it_once() -> None:
    subject = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": DIGEST,
        "size": 3,
        "more": "x",
    }
    one, two = (
        artifact(Document(media_type="application/json", name=name, data=name.encode()), subject)
        for name in "ab"
    )
    assert json.loads(one)["subject"] == {
        key: subject[key] for key in ("mediaType", "digest", "size")
    }
    entries = json.loads(listed([], [one]))["manifests"]
    index = json.loads(listed(entries, [two, one]))
    assert [m["digest"] for m in index["manifests"]] == [digest_of(two), digest_of(one)]
    assert {m["artifactType"] for m in index["manifests"]} == {"application/json"}


@pytest.mark.parametrize(
    ("repository", "here"),
    [
        ("localhost:5000/a", True),
        ("127.0.0.1:5/a", True),
        ("localhost.example.com/a", False),
        ("127.example.com/a", False),
        ("docker.io/a/b", False),
    ],
)
def test_only_registries_of_this_machine_are_asked_without_tls(repository: str, here: bool) -> None:
    assert on_this_machine(repository) is here


@pytest.mark.parametrize(
    "damage", [os.mkfifo, lambda path: path.write_text("["), lambda path: path.write_text("[]")]
)
def test_what_is_no_record_of_a_validation_is_a_sentence(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    (tmp_path / "one").mkdir()
    damage(tmp_path / "one/record.json")
    with pytest.raises(
        InputError,
        match=r"record.json(:1:2)?: (this is not a regular file|not JSON|not a validation)",
    ):
        records_of(tmp_path, "sha256:1")


def test_only_validations_of_this_image_are_published(tmp_path: Path) -> None:
    described = recipe(
        settings={
            "name": "one",
            "backend": "megatron",
            "mode": "pretrain",
            "precision": "fp32",
            "gpu": "cpu",
        }
    )
    described = replace(described, sha256=digest_of_recipe(described.settings, described.assets))
    for name, content in (("a", "sha256:1"), ("b", "sha256:2")):
        made = record(recipe=described, image=RecordedImage(content=content))
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(json.dumps(made.as_json()))
    (document,) = publish._validations(tmp_path, "sha256:2")
    assert document.name == "validation-one-megatron-pretrain-fp32-4-runs.json"
    assert json.loads(document.data)["image"]["content"] == "sha256:2"
    other = record(recipe=replace(described, sha256="0" * 64))
    (tmp_path / "a/record.json").write_text(json.dumps(other.as_json()))
    with pytest.raises(InputError, match="its settings are not those of recipe"):
        publish._validations(tmp_path, "sha256:2")


@pytest.mark.parametrize(
    ("name", "licence"),
    [
        ("https://www.apache.org/licenses/LICENSE-2.0", "Apache-2.0"),
        ("http://apache.org/licenses/LICENSE-2.0.txt", "Apache-2.0"),
        ("https://opensource.org/licenses/MIT", "MIT"),
        ("https://example.org/licenses/MIT", ""),
        ("Apache License 2.0 (Apache-2.0)", "Apache-2.0"),
        ("Mozilla Public License 2.0 (MPL 2.0)", "MPL-2.0"),
        ("MIT/Apache-2.0", "MIT AND Apache-2.0"),
        ("BSD/MIT", ""),
        ("MIT and BSD", ""),
        ("MIT or Apache 2.0", "MIT AND Apache-2.0"),
        ("MIT, ISC", "MIT AND ISC"),
        ("MIT-old-style", "MIT"),
        ("GPL-2", "GPL-2.0-only"),
        ("GPL-3+", "GPL-3.0-or-later"),
        ("LGPL-2.1+", "LGPL-2.1-or-later"),
        ("GFDL-1.3", "GFDL-1.3-only"),
        ("odd", ""),
    ],
)
def test_a_page_an_abbreviation_or_two_names_have_their_licence(name: str, licence: str) -> None:
    assert listed_name(name) == licence
