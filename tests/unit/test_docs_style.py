"""The pages that people write: short sentences, few lines, and facts that the code confirms."""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from docs.site.__main__ import add_version
from docs.site.glossary import PAGE, words
from packaging.version import Version

from kube_kit import PACKAGES
from primus_images.cli.verb import VERBS, parser_of
from primus_images.launch import kubernetes, slurm
from primus_images.recipes.load import entries
from primus_images.recipes.schema import backends
from primus_images.training.run.failure import Failure
from primus_images.yamlfile import read_values

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/primus_images"
MOST_WORDS = 30
MOST_LINES = 2600
WRITTEN = [
    page
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
    if not page.read_text(encoding="utf-8").startswith("<!-- Generated")
]
# Pages beside the code. That of older commands quotes sentences of the code's tables.
BESIDE_CODE = [page for page in sorted(SOURCE.rglob("README.md")) if page.parent.name != "compat"]
# What the site's readers asked for the meaning of.
HOUSE_WORDS = {
    *("attempt", "extra", "golden curve", "judge", "level", "record", "self-test", "statement"),
    *("suite", "tight", "turbo", "witness"),
}
# Options in prose of Docker, apptainer, Slurm, kubectl, hf, madengine, rocm-smi, pytest and nox's
# sessions.
OF_OTHERS = {
    *("--privileged", "--group-add", "--read-only", "--ulimit", "--rm", "--gpus-per-node"),
    *("--qos", "--exclude", "--container-env", "--from-file", "--local-dir", "--tags"),
    *("--additional-context", "--showbus", "--slow", "--links", "--versions"),
    *("--regenerate-golden", "--bind", "--nv", "--rocm"),
}


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page in Markdown. Code is one word, and a link is its text."""
    text = re.sub(r"^ *```.*?^ *```$|^:::.*?$|<!--.*?-->", "\n", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", "Code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) |#|\|)", text):
        for cell in block.split("|"):
            plain = re.sub(r"^\s*(?:-|\d+\.|#+|>) ", "", " ".join(cell.split()))
            yield from re.split(r"(?<=[.!?])[\"')*]*\s+", plain)


def length(sentence: str) -> int:
    return sum(1 for word in sentence.split() if re.search(r"\w", word))


@pytest.mark.parametrize(
    "page", [*WRITTEN, *BESIDE_CODE], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_no_sentence_is_long(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [one for one in sentences(text) if length(one) > MOST_WORDS] == []


def test_a_long_sentence_is_counted_in_text_in_tables_and_in_lists() -> None:
    long = "Word " * MOST_WORDS + "`code is one` word."
    for text in (long, f"| a | {long} |", f"- Short. {long}", f"Is it? {long}"):
        assert max(map(length, sentences(text))) == MOST_WORDS + 2


def test_the_pages_are_few_lines() -> None:
    lines = 0
    for page in WRITTEN:
        if page.name == "CONTRIBUTING.md":  # for those who change the code
            continue
        text = page.read_text(encoding="utf-8")
        made = re.sub(r"^<!-- (?!command)[a-z]+ -->\n.*?^<!-- end -->", "", text, flags=re.M | re.S)
        lines += len(made.splitlines())
    assert lines <= MOST_LINES


def test_the_glossary_has_every_word_of_the_house_once() -> None:
    listed = [word.text for word in words(ROOT / f"docs/{PAGE}.md")]
    assert len(listed) == len(set(listed))
    assert set(listed) >= HOUSE_WORDS


def program_text() -> str:
    """What the program can print: its sources, with the parts of each sentence joined."""
    texts = []
    for path in sorted(SOURCE.rglob("*")):
        if path.suffix in (".py", ".yaml"):
            texts.append(path.read_text(encoding="utf-8"))
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))
    return " ".join(joined.split())


def test_every_sentence_of_troubleshooting_is_one_that_the_program_prints() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    printed = program_text()
    cells = re.findall(r"^\| (`[^|]*) \|", page, re.M)
    assert len(cells) > 15
    for text in [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]:
        # Lines of libraries, which the program knows by these patterns.
        failure = Failure(text=text)
        if text.startswith("/dev") or failure.derived or str(failure) != text:
            continue
        for part in re.split(r"…|\d+ \(SIG\w+\)", text):
            assert part.strip() in printed, f"no sentence of the program: {text}"


def read_by_the_code() -> set[str]:
    """The environment variables that the code asks for by a literal name."""
    pattern = re.compile(
        r'(?:environ|environment|variables|env)(?:\.get\(|\[|\.setdefault\()"([A-Z][A-Z_]+)"'
    )
    texts = [path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")]
    return {name for text in texts for name in pattern.findall(text)}


def test_every_environment_variable_that_the_code_reads_is_described() -> None:
    table = yaml.safe_load((ROOT / "docs/environment.yaml").read_text(encoding="utf-8"))
    described = {name for part in table["sections"] for name in part["rows"]}
    internal = set(table["internal"])
    assert read_by_the_code() - described - internal == set()
    assert described & internal == set()
    text = program_text()
    for name in described - set(table["of libraries"]):
        assert re.search(rf"\b{name}\b", text), f"the code does not know {name}"


@pytest.mark.parametrize(
    ("page", "version"),
    [
        ("slurm.md", f"Slurm {slurm.LEAST_VERSION[0]}.{slurm.LEAST_VERSION[1]:02} or newer"),
        (
            "kubernetes.md",
            f"Kubernetes {kubernetes.LEAST_VERSION[0]}.{kubernetes.LEAST_VERSION[1]} or newer",
        ),
    ],
)
def test_a_page_names_the_version_that_the_program_requires(page: str, version: str) -> None:
    assert version in (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_the_backends_whose_fp8_is_not_judged_are_named() -> None:
    page = (ROOT / "docs/validation.md").read_text(encoding="utf-8")
    (named,) = re.findall(r"FP8 by rows, FP8 with (.*)\);", page)
    trained = {entry.backend for entry in entries() if "fp8" in entry.precisions}
    unjudged = {name for name in trained if "fp8" not in backends()[name].judged}
    assert set(re.findall(r"`(\w+)`", named)) == unjudged


def test_pods_of_one_rank_follow_each_other_from_the_version_on_the_page() -> None:
    # Where a Job has a policy of failures, and the server knows replacements: from 1.29 on.
    job = (SOURCE / "launch/job.yaml").read_text(encoding="utf-8")
    page = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    assert "podFailurePolicy:" in job
    said = "From Kubernetes 1.29 on, two pods of one rank never" in page
    assert said == (kubernetes.LEAST_VERSION < (1, 29))


def test_trackers_write_to_the_folders_that_the_page_names() -> None:
    page = " ".join((ROOT / "docs/metrics.md").read_text(encoding="utf-8").split())
    assert "to the folder of that name in the run" in page
    code = (SOURCE / "training/backends/loop/trackers.py").read_text(encoding="utf-8")
    names = re.findall(r"--log (\w+)", page)
    assert set(names) >= {"tensorboard", "wandb", "mlflow"}
    assert 'output / "tensorboard"' in code


def test_a_tracker_that_not_all_backends_have_names_those_that_lack_it() -> None:
    lacking = {name for name, one in backends().items() if "mlflow" not in one.keys}
    for page in WRITTEN:
        for part in re.split(r"\n\n|\n(?=\|)", page.read_text(encoding="utf-8")):
            if "--log" in part and "mlflow" in part:
                assert all(f"not with {name}" in part for name in lacking), f"{page.name}: {part}"


def test_releases_are_in_the_order_that_the_page_says() -> None:
    page = (ROOT / "docs/releases.md").read_text(encoding="utf-8")
    assert "the newest first" in page
    first_table = page.partition("## Components")[0]
    tags = re.findall(r"^\| \S+:(?:maxtext-)?v([\d.]+)", first_table, re.M)
    versions = [Version(tag) for tag in tags]
    assert len(versions) > 20
    assert versions == sorted(versions, reverse=True)


def test_every_page_with_an_instinct_preview_says_where_it_computes() -> None:
    for page in WRITTEN:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"primus:v[\d.]+-mi\d+x(?!-preview)", text), f"{page.name}: no build"
        if re.search(r"rocm/primus:v[\d.]+-mi\d+x-preview", text) and page.name != "README.md":
            named = "compute on the CPU" in text or "CPU" in text.partition("-preview")[0]
            assert named, f"{page.name} does not say that previews compute on the CPU"


def test_pages_name_the_image_as_the_pins_do() -> None:
    pins = yaml.safe_load((ROOT / "versions.yaml").read_text(encoding="utf-8"))
    tag = re.escape(pins["release"])
    named = {}
    for page in WRITTEN:
        text = page.read_text(encoding="utf-8")
        names = re.findall(rf"(?<![\w/.])([\w.:#/-]+):{tag}(?=[-\s`])", text)
        named[page.name] = [name for name in names if "oci:" not in name and name != "HOST/PATH"]
    assert sum(map(len, named.values())) > 20
    for page_name, names in named.items():
        other = [name for name in names if not name.endswith(pins["image"]["name"])]
        assert other == [], page_name
    assert "`image.name`" in (ROOT / "README.md").read_text(encoding="utf-8")


def options(parser: argparse.ArgumentParser) -> set[str]:
    known: set[str] = set()
    for action in parser._actions:
        known.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                known |= options(below)
    return known


def test_every_option_in_prose_exists() -> None:
    known = set(OF_OTHERS)
    for verb in VERBS:
        known |= options(parser_of(verb))
    for page in WRITTEN:
        text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.M | re.S)
        typed = {
            option
            for code in re.findall(r"`([^`]+)`", text)
            for option in re.findall(r"(?<![\w-])(--[a-z][\w-]+)", code)
        }
        assert typed <= known, page.name


def test_a_site_holds_several_releases_the_newest_first(tmp_path: Path) -> None:
    html = tmp_path / "html"
    html.mkdir()
    for release in ("v26.9", "v26.10", "v26.11", "v26.11"):
        (html / "index.html").write_text(release, encoding="utf-8")
        add_version(html, tmp_path / "site", release)
    index = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    links = re.findall(r'href="([^"]+)"', index)
    assert links == ["v26.11/index.html", "v26.10/index.html", "v26.9/index.html"]
    for link in links:
        assert (tmp_path / "site" / link).read_text(encoding="utf-8") == link.partition("/")[0]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_an_option_is_typed_with_two_hyphens(page: Path) -> None:
    assert re.findall(r"(?<!\w)[–—][a-z][\w-]+", page.read_text(encoding="utf-8")) == []


def test_every_function_of_the_architecture_exists() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    dotted = re.findall(r"`([a-z_]+(?:[.][a-z_]+)+)`", text)
    names = [name for name in dotted if not name.endswith((".py", ".yaml", ".toml"))]
    assert len(names) > 20
    for name in names:
        place = SOURCE / name.replace(".", "/")
        module = place.parent.with_suffix(".py")
        is_defined = module.is_file() and f"def {place.name}(" in module.read_text("utf-8")
        assert place.is_dir() or place.with_suffix(".py").is_file() or is_defined, name


def test_every_path_that_contributors_read_exists() -> None:
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "docs/architecture.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    paths = {
        word
        for word in re.findall(r"`([\w.-]+/[\w./-]+)`", text)
        if not re.search(r"^(\.venv|out|SITE)/|OWNER", word)
    }
    assert len(paths) > 30
    places = (ROOT, SOURCE)
    assert {path for path in paths if not any((place / path).exists() for place in places)} == set()


def test_contributors_read_every_package_that_slow_tests_need() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for package in (*PACKAGES.values(), "slurm-wlm", "munge"):
        assert f"`{package}`" in page


def test_the_images_without_rdma_libraries_are_named() -> None:
    page = " ".join((ROOT / "docs/using.md").read_text(encoding="utf-8").split())
    lacking = set()
    for lock in sorted((ROOT / "images/locks").glob("*/*.json")):
        if '"ibverbs-providers"' not in lock.read_text(encoding="utf-8"):
            lacking.add(lock.stem)
    named = set(re.findall(r"`(\w+)` needs? the extra `rdma`", page))
    assert named == lacking - {"cpu"}  # for tests on one machine


def test_requirements_name_the_versions_of_the_machines_that_built() -> None:
    file = ROOT / "benchmarks/results/two-machines.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    page = (ROOT / "docs/support.md").read_text(encoding="utf-8")
    tested = dict(re.findall(r"^\| (Python|podman)[^|]*\|[^|]*\| ([^|]*) \|", page, re.M))
    built = {row["machine"] for row in data["rows"] if row.get("digest")}
    assert len(built) > 3
    for name in built:
        machine = data["machines"][name]
        assert machine["python"].rpartition(".")[0] in tested["Python"], name
        for version in re.findall(r"podman ([\d.]*\d)", machine["system"]):
            assert version in tested["podman"], name


def test_the_minutes_of_a_proof_are_those_of_its_steps() -> None:
    file = SOURCE / "release/prove/steps.yaml"
    steps = yaml.safe_load(file.read_text(encoding="utf-8"))["steps"]
    minutes = {step["name"]: step["minutes"] for step in steps if "name" in step}
    page = (ROOT / "docs/prove.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| ([^|]+) \| [^|]+ \| ([\d.]+) \|$", page, re.M))
    groups = {
        "machine": ["machine"],
        "lock, build, gates": ["lock", "build", "gates"],
        "driver": ["driver"],
        "self-tests": ["self-tests"],
        "first step": ["first-step", "first-step-again"],
        "suite": ["suite"],
        "speed, tuned": ["speed", "tuned"],
        "burn-in": ["burn-in"],
    }
    assert set(shown) - set(groups) == {"first model"}
    for row, names in groups.items():
        assert float(shown[row]) == sum(minutes[name] for name in names), row


def test_the_gaps_that_the_reference_allows_are_those_of_its_limits() -> None:
    file = SOURCE / "training/judge/limits.yaml"
    least = read_values(file).data["least"]
    page = " ".join((ROOT / "docs/validation.md").read_text(encoding="utf-8").split())
    (loss, gradients) = re.findall(r"by (\S+) in the loss and (\S+) in gradients", page)[0]
    assert (float(loss), float(gradients)) == (float(least["loss"]), float(least["gradient"]))
