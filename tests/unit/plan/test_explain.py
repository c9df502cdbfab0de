"""Plan and explain: their text, word for word, and what they name."""

import json
import re
from pathlib import Path

import pytest

from project_kit import Kit, make_project

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_project(tmp_path / "project")


def check(name: str, text: str, regenerate: bool) -> None:
    path = GOLDEN / name
    if regenerate:
        path.write_text(text)
    assert text == path.read_text(), f"run pytest --regenerate-golden if {name} should say this now"


@pytest.fixture
def regenerate(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--regenerate-golden"))


def test_plan_text(kit: Kit, regenerate: bool) -> None:
    first = kit.primus("plan", "demo").out
    kit.build()
    kit.write("parts/beta/blob", b"new")
    check("plan.txt", first + "\n" + kit.primus("plan", "demo", "other").out, regenerate)


def test_explain_text(kit: Kit, regenerate: bool) -> None:
    never = kit.primus("explain", "demo")
    kit.build()
    same = kit.primus("explain", "demo")
    kit.edit("versions.yaml", "/opt/alpha", "/opt/first")
    kit.edit("versions.yaml", "2026-11-20", "2026-11-21")
    kit.edit("images/demo.yaml", "red", "blue")
    kit.write("parts/beta/blob", b"new")
    kit.write("recipes/two.yaml", "b: 2\n")
    (kit.root / "recipes/one.yaml").unlink()
    changed = kit.primus("explain", "demo")
    kit.edit("images/demo.yaml", "[alpha, beta, recipes]", "[alpha, recipes]")
    dropped = kit.primus("explain", "demo")
    assert [never.code, same.code, changed.code, dropped.code] == [1, 0, 1, 1]
    parts = {
        "never built": never,
        "nothing changed": same,
        "inputs changed": changed,
        "component left out": dropped,
    }
    check("explain.txt", "".join(f"# {name}\n{r.out}\n" for name, r in parts.items()), regenerate)


def test_explain_json(kit: Kit) -> None:
    kit.build()
    kit.write("parts/beta/blob", b"new")
    (change,) = json.loads(kit.primus("explain", "demo", "--json").out)["demo"]
    assert change["action"] == "beta"
    assert change["input"] == "parts/beta/blob"
    assert re.fullmatch(r"file [0-9a-f]{64}", change["old"])


def test_at_most_two_reasons_stand_beside_a_layer(kit: Kit) -> None:
    kit.build()
    names = ("one", "two", "three")
    for number, name in enumerate(names, 1):
        kit.write(f"parts/beta/{name}", name)
        text = " ".join(kit.primus("plan", "demo").out.split())
        assert text.count("nothing → file") == min(number, 2)
        assert ("more changes" in text) == (number > 2)
    assert "and 1 more changes: primus explain" in text


def test_a_component_that_is_added_is_the_only_change(kit: Kit) -> None:
    kit.edit("images/demo.yaml", "[alpha, beta, recipes]", "[alpha, recipes]")
    kit.build()
    kit.edit("images/demo.yaml", "[alpha, recipes]", "[alpha, beta, recipes]")
    changes = json.loads(kit.primus("explain", "demo", "--json").out)["demo"]
    of_layers = [change for change in changes if change["action"] != "image"]
    assert [(change["action"], change["input"]) for change in of_layers] == [("beta", "layer")]
    assert of_layers[0]["old"] is None and "tree:" in of_layers[0]["new"]
    assert of_layers[0]["where"].startswith("versions.yaml:")
