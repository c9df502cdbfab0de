"""The versions that an image holds: pip's constraints file, and the variables that name it."""

import tomllib
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.plan.skeleton import (
    Prefix,
    constraints,
    environment,
    image_config,
    inline_entries,
    manifest_annotations,
    own_command,
    working_folders,
)
from project_kit import SOURCE


def resolved(**rows: tuple[bool, str | None, str]) -> Any:
    """A target: component → whether it is held, its Python package, and its version."""
    pins = {}
    components = {}
    for name, (held, package, version) in rows.items():
        pins[name] = SimpleNamespace(python_package=package, version=version)
        components[name] = SimpleNamespace(held=held)
    return SimpleNamespace(pins=pins, versions=SimpleNamespace(components=components))


def test_held_python_packages_are_listed_by_name_in_any_order_of_the_pins() -> None:
    rows = {
        "vision": (True, "Torch_Vision", "0.24"),
        "torch": (True, "torch", "2.9.0"),
        "numpy": (False, "numpy", "2.0"),
        "rccl": (True, None, "2.27"),
        "apex": (True, "apex", "1.0"),
    }
    lines = constraints(resolved(**rows)).splitlines()
    assert lines[0].startswith("# ")
    assert lines[1:] == ["apex==1.0", "torch==2.9.0", "torch-vision==0.24"]
    assert constraints(resolved(**dict(reversed(rows.items())))).splitlines() == lines


def _environment(constraints: str, python: str | None, **variables: str) -> dict[str, str]:
    target = SimpleNamespace(workdir="/workspace", entrypoint=(), command=("bash",))
    demo: Any = SimpleNamespace(
        target=target,
        environment=variables,
        all_pins={},
        choice=SimpleNamespace(preview=None),
        extras=(),
        versions=SimpleNamespace(created="2026-11-20"),
    )
    prefix = None
    if python:
        prefix = Prefix(python)
    config: Any = image_config(demo, prefix, constraints)["config"]
    return dict(row.split("=", 1) for row in config["Env"])


def test_pip_and_uv_keep_what_the_image_holds() -> None:
    variables = _environment("torch==2.9.0", "3.12")
    assert variables["PIP_CONSTRAINT"] == "/etc/primus/constraints.txt"
    assert variables["UV_CONSTRAINT"] == variables["PIP_CONSTRAINT"]
    assert "/opt/venv/bin" in variables["PATH"].split(":")


def test_the_environment_of_a_target_goes_first() -> None:
    own = {"PATH": "/mine", "PIP_CONSTRAINT": "/a", "UV_CONSTRAINT": "/b"}
    assert _environment("torch==2.9.0", "3.12", **own) == own


@pytest.mark.parametrize(("constraints", "python"), [("", "3.12"), ("torch==2.9.0", None)])
def test_without_constraints_or_python_there_is_no_constraint(
    constraints: str, python: str | None
) -> None:
    variables = _environment(constraints, python)
    assert [name for name in variables if name.endswith("_CONSTRAINT")] == []
    assert ("PATH" in variables) == (python is not None)


def test_an_image_that_holds_nothing_has_no_constraints() -> None:
    assert constraints(resolved(numpy=(False, "numpy", "2.0"))) == ""


def test_bills_of_materials_find_our_own_licence() -> None:
    files = own_command("opt/venv/lib/python3.11/site-packages/primus_images")
    (path,) = [path for path in files if path.endswith("/METADATA")]
    metadata = str(files[path]["text"])
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    assert f"License-Expression: {project['license']}" in metadata.splitlines()


@pytest.mark.parametrize(
    ("to", "paths", "folders"),
    [
        (
            "workspace/a",
            ["x/y/z", "x/b", "c"],
            ["workspace", "workspace/a", "workspace/a/x", "workspace/a/x/y"],
        ),
        ("workspace", ["c"], ["workspace"]),
        ("opt/workspace", ["x/y"], []),
        ("opt", ["x/y"], []),
    ],
)
def test_users_of_any_id_may_write_in_the_folders_of_the_workspace(
    to: str, paths: list[str], folders: list[str]
) -> None:
    found = working_folders(to, paths)
    assert list(found) == folders
    assert all(entry == {"folder": True, "mode": 0o1777} for entry in found.values())


def test_inline_data_becomes_entries_of_its_kind() -> None:
    entries = inline_entries(
        {
            "a": {"text": "\u00e9"},
            "b": {"text": "x", "mode": 0o755},
            "c": {"link": "a"},
            "d": {"folder": True, "mode": 0o1777},
        }
    )
    rows = [(entry.path, entry.kind, entry.mode, entry.size, entry.link) for entry in entries]
    assert rows == [
        ("a", "file", 0o644, 2, ""),
        ("b", "file", 0o755, 1, ""),
        ("c", "symlink", 0o777, 0, "a"),
        ("d", "dir", 0o1777, 0, ""),
    ]
    assert entries[0].source == "\u00e9".encode()


@pytest.mark.parametrize("system", [False, True])
def test_the_environment_of_python_is_laid_out_as_by_venv(system: bool) -> None:
    found = environment(Prefix("3.12"), system)
    config = f"home = /usr/bin\ninclude-system-site-packages = {str(system).lower()}\n"
    assert found["opt/venv/pyvenv.cfg"] == {"text": f"{config}version = 3.12\n"}
    links = {path: entry["link"] for path, entry in found.items() if "link" in entry}
    assert links == {
        "opt/venv/bin/python3.12": "/usr/bin/python3.12",
        "opt/venv/bin/python3": "python3.12",
        "opt/venv/bin/python": "python3",
    }
    assert Prefix("3.12").site == "opt/venv/lib/python3.12/site-packages"
    assert Prefix("3.12").interpreter == "/opt/venv/bin/python3"


def test_labels_name_pins_previews_and_extras() -> None:
    pins = {"torch": SimpleNamespace(version="2.9"), "own": SimpleNamespace(version=None)}
    demo: Any = SimpleNamespace(
        target=SimpleNamespace(workdir="/w", entrypoint=("e",), command=("c", "d")),
        environment={"B": "2", "A": "1"},
        all_pins=pins,
        choice=SimpleNamespace(preview="no GPU code"),
        extras=("rdma", "debug"),
        versions=SimpleNamespace(created="2026-11-20"),
    )
    whole: Any = image_config(demo, None, "")
    assert whole["created"] == "2026-11-20T00:00:00Z"
    config = whole["config"]
    assert config["Labels"] == {
        "io.primus.pins.torch": "2.9",
        "io.primus.pins.own": "local",
        "io.primus.preview": "no GPU code",
        "io.primus.extras": "rdma debug",
    }
    assert config["Env"] == ["A=1", "B=2"]
    assert (config["WorkingDir"], config["Entrypoint"], config["Cmd"]) == ("/w", ["e"], ["c", "d"])


@pytest.mark.parametrize("preview", ["", "no GPU code"])
def test_the_manifest_of_a_preview_says_so(preview: str) -> None:
    demo: Any = SimpleNamespace(
        name="demo",
        ref="demo-rdma",
        target=SimpleNamespace(description="A demo."),
        choice=SimpleNamespace(channel="debian", preview=preview),
        versions=SimpleNamespace(release="v26.11", created="2026-11-20"),
        extras=(),
    )
    annotations = manifest_annotations(demo)
    assert annotations["org.opencontainers.image.title"] == "primus demo"
    assert annotations["org.opencontainers.image.ref.name"] == "demo-rdma"
    assert annotations.get("io.primus.preview", "") == preview
    assert ("io.primus.preview" in annotations) == bool(preview)
