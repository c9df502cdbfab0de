"""The search for culprits in simulated worlds, and the verb on a small repository with a judge of
our own.
"""

import json
import sys
from pathlib import Path
from random import Random

import pytest

import gits
from primus_images.oci.store import Store
from primus_images.plan.project import Workspace
from primus_images.release.triage import Hypothesis, Search, Verdict, bound, hypotheses
from project_kit import Kit, make_project


def search(
    truth: Hypothesis, changes: int, wrong: float, seed: int, conflicts: int = 0
) -> tuple[Verdict, int, int]:
    """The verdict in a world, the number of answers, and that of points without a judgement."""
    random = Random(seed)
    pairs = [random.sample(range(changes), 2) for _ in range(conflicts)]
    state = Search(changes, wrong=wrong, seed=seed)
    while (point := state.next()) is not None:
        unbuildable = any(new in point and old not in point for new, old in pairs)
        bad = (
            point.issuperset(truth.changes)
            if truth.together
            else not point.isdisjoint(truth.changes)
        )
        state.tell(point, None if unbuildable else bad != (random.random() < wrong))
        assert len(state.answers) < 400
    skipped = sum(bad is None for _, bad in state.answers)
    return state.verdict(), len(state.answers) - skipped, skipped


def test_two_culprits_of_100_are_found_by_a_judge_that_is_wrong_in_a_tenth() -> None:
    assert bound(100, 0.1) == pytest.approx(25.02, abs=0.01)  # log2(10,002) ÷ 0.531 bits
    right, answers = 0, []
    for seed in range(25):
        truth = Hypothesis(
            tuple(sorted(Random(f"world {seed}").sample(range(100), 2))), together=bool(seed % 2)
        )
        verdict, count, _ = search(truth, 100, 0.1, seed)
        right += verdict.hypothesis == truth
        answers.append(count)
    assert right >= 24
    assert sum(answers) / len(answers) <= 1.5 * bound(100, 0.1)


@pytest.mark.parametrize("changes", [1, 2, 5])
def test_a_judge_that_is_never_wrong_finds_every_kind_of_culprit(changes: int) -> None:
    for seed, truth in enumerate(hypotheses(changes)):
        verdict, answers, _ = search(truth, changes, 0.0, seed)
        assert (verdict.hypothesis, verdict.probability) == (truth, 1.0)
        assert answers <= 2 * bound(changes, 0.0) + 1


def test_points_that_cannot_be_built_are_avoided() -> None:
    for seed in range(5):
        truth = Hypothesis(
            tuple(sorted(Random(seed).sample(range(30), 2))), together=bool(seed % 2)
        )
        verdict, _, skipped = search(truth, 30, 0.0, seed, conflicts=5)
        assert truth in (verdict.hypothesis, *verdict.rivals) and skipped < 80


def test_what_no_point_tells_apart_is_named_and_contradictions_are_unlikely() -> None:
    state = Search(2, wrong=0.0)
    for point, bad in (({0}, None), ({1}, None), (set(), False), ({0, 1}, True)):
        state.tell(frozenset(point), bad)
    assert state.next() is None and len(state.verdict().rivals) == 3
    three = Search(9)
    for _ in range(40):
        for point in ({1}, {2}, {3}):
            three.tell(frozenset(point), True)
        three.tell(frozenset({4}), False)
    assert three.verdict().fit < 0.001


PINS = ("alpha", "beta", "gamma")
ORACLE = """
import os, pathlib, sys
pins = pathlib.Path("versions.yaml").read_text()
with open(sys.argv[1], "a") as log: log.write("asked\\n")
if len(open(sys.argv[1]).readlines()) == int(sys.argv[2]): os._exit(130)
sys.exit(pins.count("/new/gamma") and pins.count("/new/beta"))
"""


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    """Three components of a local folder each, which move in the second commit."""
    kit = make_project(tmp_path / "project")
    rows = "".join(
        f"  {n}:\n    name: N\n    pins:\n      - "
        f"{{path: parts/SIDE/{n}, to: /opt/{n}, channel: local}}\n"
        for n in PINS
    )
    head = "release: v26.11\ncreated: 2026-11-20\nbases: {}\ncomponents:\n"
    for side in ("old", "new"):
        for name in PINS:
            kit.write(f"parts/{side}/{name}/file", side)
    (kit.root / "images/other.yaml").unlink()
    kit.edit("images/demo.yaml", "[alpha, beta, recipes]", f"[{', '.join(PINS)}]")
    kit.write(".gitignore", ".primus\n")
    kit.write("oracle.py", ORACLE)
    for side, release in (("old", "v26.11"), ("new", "v26.12")):
        text = (head + rows).replace("SIDE", side).replace("v26.11", release)
        gits.commit(kit.root, {"versions.yaml": text})
    return kit


def test_the_verb_finds_two_that_act_together_and_goes_on_after_an_interruption(
    kit: Kit, tmp_path: Path
) -> None:
    words = ["triage", "v26.11-demo", "v26.12-demo", "--wrong", "0", "--json"]
    dry = json.loads(kit.primus(*words, "--dry-run").out)
    assert (dry["changes"], dry["answers"]) == ([*PINS], [])
    oracle = ["--", sys.executable, str(kit.root / "oracle.py"), str(tmp_path / "log")]
    stopped = kit.primus(*words, *oracle, "2")
    assert stopped.code == 3 and "the oracle ended with 130" in stopped.err
    # The same question: the argument is the same, and the second call has been counted.
    result = kit.primus(*words, *oracle, "2")
    assert result.code == 0, result.err
    verdict = json.loads(result.out)
    assert (verdict["culprits"], verdict["together"], verdict["sure"]) == (
        ["beta", "gamma"],
        True,
        True,
    )
    assert len((tmp_path / "log").read_text().splitlines()) == len(verdict["answers"]) + 1
    assert not (kit.root / "versions.yaml").read_text().startswith("{")
    assert "v26.12-demo" not in json.dumps(
        json.loads((kit.root / ".primus/store/index.json").read_text())
    )


BOTH = ("HEAD~1", "HEAD", "--wrong", "0")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["v26.11", "v26.12"], 2, "the oracle is missing"),
        (["v26.10", "v26.12", "--", "true"], 2, "called 'v26.10'"),
        (["HEAD", "HEAD", "--", "true"], 2, "do not differ in a pin"),
        ([*BOTH, "--", "/no/such"], 2, "/no/such"),
        ([*BOTH, "--locks", "--", "true"], 2, "needs the same pins"),
        (["HEAD", "HEAD", "--locks", "--", "true"], 2, "do not differ in a package of the locks"),
        ([*BOTH, "--wrong", "0.5", "--", "true"], 2, "below 0.4"),
        ([*BOTH, "--", "sh", "-c", "exit 125"], 1, "no point can be judged"),
    ],
)
def test_bad_questions_and_no_culprit(
    words: list[str], code: int, message: str, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primus_images.release.triage._PATIENCE", 3)
    result = kit.primus("triage", *words)
    assert result.code == code and message in result.err, result.err


def test_a_checkout_unpacks_where_its_project_does(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert Workspace(Store(tmp_path), tmp_path / "link").unpacked == tmp_path / "real/unpacked"
