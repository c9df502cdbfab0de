"""pip's constraints file: the versions that an image holds."""

from types import SimpleNamespace
from typing import Any

from primus_images.plan.skeleton import constraints


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


def test_an_image_that_holds_nothing_has_no_constraints() -> None:
    assert constraints(resolved(numpy=(False, "numpy", "2.0"))) == ""
