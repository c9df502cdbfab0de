"""The versions that an image holds: pip's constraints file, and the variables that name it."""

import tomllib
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.plan.skeleton import Prefix, constraints, image_config, own_command
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
    environment = _environment("torch==2.9.0", "3.12")
    assert environment["PIP_CONSTRAINT"] == "/etc/primus/constraints.txt"
    assert environment["UV_CONSTRAINT"] == environment["PIP_CONSTRAINT"]
    assert "/opt/venv/bin" in environment["PATH"].split(":")


def test_the_environment_of_a_target_goes_first() -> None:
    own = {"PATH": "/mine", "PIP_CONSTRAINT": "/a", "UV_CONSTRAINT": "/b"}
    assert _environment("torch==2.9.0", "3.12", **own) == own


@pytest.mark.parametrize(("constraints", "python"), [("", "3.12"), ("torch==2.9.0", None)])
def test_without_constraints_or_python_there_is_no_constraint(
    constraints: str, python: str | None
) -> None:
    environment = _environment(constraints, python)
    assert [name for name in environment if name.endswith("_CONSTRAINT")] == []
    assert ("PATH" in environment) == (python is not None)


def test_an_image_that_holds_nothing_has_no_constraints() -> None:
    assert constraints(resolved(numpy=(False, "numpy", "2.0"))) == ""


def test_bills_of_materials_find_our_own_licence() -> None:
    files = own_command("opt/venv/lib/python3.11/site-packages/primus_images")
    (path,) = [path for path in files if path.endswith("/METADATA")]
    metadata = str(files[path]["text"])
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    assert f"License-Expression: {project['license']}" in metadata.splitlines()
