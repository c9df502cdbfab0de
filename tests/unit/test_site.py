"""The site: it builds without a warning, every page is small, and the picker's commands are
accepted.
"""

import html
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus, unquote

import jinja2
import pytest
import snowballstemmer
import yaml
from docs.site.glossary import words, words_of
from docs.site.rocm import rocm_data
from sphinx.search.en import SearchEnglish

from browser import CHROMIUM, Browser
from primus_images.cli.main import main
from primus_images.cli.verb import VERBS
from primus_images.cli.version import release_of
from primus_images.compat.commands import requested
from primus_images.recipes.resolve import resolve
from primus_images.recipes.schema import backends
from primus_images.recipes.setting import Choices
from proof_kit import finished_run

ROOT = Path(__file__).parents[2]
QUESTIONS = ROOT / "tests/fixtures/questions.yaml"
PAGE_BYTES = 500_000
# The kinds of pages, and a report of runs.
KINDS = (
    "index.html",
    "picker.html",
    "search.html",
    "running.html",
    "environment.html",
    "validation.html",
    "reference/commands.html",
    "models.html",
    "gpus.html",
    "releases.html",
    "measured/suite-2xh200-gpu.html",
    "report.html",
)
SCRIPT = (ROOT / "tests/fixtures/readable.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "docs.site", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.fixture(scope="module")
def window(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (Debian and Ubuntu call the package chromium)")
    with Browser(
        site / "picker.html", tmp_path_factory.mktemp("profile"), width=390, phone=True
    ) as browser:
        yield browser


@pytest.fixture
def browser(site: Path, window: Browser) -> Iterator[Browser]:
    window.show(390, phone=True)
    window.open(site / "picker.html")
    yield window
    assert not [
        e for e in window.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")
    ]


def test_every_page_is_listed_has_a_markdown_and_is_small(site: Path) -> None:
    pages = [
        path for path in site.rglob("*.html") if path.name not in ("genindex.html", "search.html")
    ]
    listed = set(re.findall(r"\]\((\S+)\)", (site / "llms.txt").read_text()))
    assert listed == {str(page.relative_to(site).with_suffix(".md")) for page in pages}
    assert all((site / name).is_file() for name in listed)
    for name in listed:
        prose = re.sub(
            r"^ *```.*?^ *```$", "", (site / name).read_text(), flags=re.MULTILINE | re.DOTALL
        )
        links = re.findall(r"\]\((?!\w+:)([^)\s#]+)", prose)
        assert not [link for link in links if not ((site / name).parent / link).exists()], name
    for page in (*pages, site / "genindex.html", site / "search.html"):
        text = page.read_text()
        linked = set(re.findall(r'<a [^>]*href="([^"#?:]+)["#?]', text))
        assert not [link for link in linked if not (page.parent / unquote(link)).exists()], page
        loaded = re.findall(
            r'<(?:link rel="stylesheet"[^>]* href|script[^>]* src|img[^>]* src)="([^"?]+)', text
        )
        assert not [url for url in loaded if ":" in url], "nothing comes from elsewhere"
        size = len(text.encode()) + sum((page.parent / url).stat().st_size for url in loaded)
        assert size <= PAGE_BYTES, f"{page.name}: {size:,}"


def test_every_verb_and_every_figure_of_the_old_document_is_on_the_site(site: Path) -> None:
    commands = (site / "reference/commands.md").read_text()
    assert {verb for verb in VERBS if f"### primus {verb}\n" not in commands} == set()
    (beside, _) = (site / "performance.md").read_text().split("## All measurements")
    assert len(re.findall(r"^\| `", beside, re.MULTILINE)) == 15


def combinations(data: dict[str, Any]) -> list[dict[str, str]]:
    """30 choices, spread over all ways, GPUs, precisions and machines."""
    every = [
        {"model": way["model"], "mode": way["mode"], "backend": way["backend"]}
        | dict(zip(("precision", "gpu", "machines"), key.split(), strict=True))
        for way in data["ways"]
        for key, run in way["runs"].items()
        if not isinstance(run, str)
    ]
    return random.Random(0).sample(every, 30)


def test_thirty_choices_give_commands_that_are_accepted(
    site: Path,
    browser: Browser,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    data = json.loads((site / "picker.json").read_text())
    chosen = combinations(data)
    too_large = {
        "model": "deepseek-v3",
        "mode": "pretrain",
        "backend": "megatron",
        "precision": "fp8",
        "gpu": "mi300x",
    }
    chosen.append(too_large | {"machines": "4"})
    shutil.copytree(ROOT / "recipes/assets/tokenizer", tmp_path / "weights")
    shutil.copytree(
        ROOT / "recipes/assets", tmp_path / "data", ignore=shutil.ignore_patterns("tokenizer")
    )
    # The weights have no tensors, which would be of full size.
    monkeypatch.setattr("primus_images.training.backends.finetune.backend.check", lambda *_: None)
    assert {one["mode"] for one in chosen} == {"pretrain", "full", "lora"}
    assert {one["gpu"] for one in chosen} == {
        key.split()[1] for way in data["ways"] for key in way["runs"]
    }
    for one in chosen:
        address = "#" + "&".join(f"{key}={value}" for key, value in one.items())
        texts = browser.js(
            f"new Promise((done) => "
            f"{{ location.hash = {address!r}; requestAnimationFrame(() => setTimeout(() => {{"
            " const copied = []; navigator.clipboard.writeText = async (text) => copied.push(text);"
            " document.querySelectorAll('.pick-copy').forEach((button) => button.click()); "
            "done(copied); })); })"
        )
        assert browser.js("document.getElementById('pick-model').value") == one["model"]
        page = browser.js("document.getElementById('picked').innerText")
        assert ("Locking channel amd" in page) == (one["gpu"] != "h200" and bool(texts))
        if "does not fit" in page:
            assert texts == []
            continue
        assert page.startswith("The image is a preview") == (one["gpu"] != "h200")
        assert len(texts) == (3 if one["machines"] == "1" else 2)
        assert all(
            ("weights=" in text and "corpus=" in text) == (one["mode"] != "pretrain")
            for text in texts
        )
        choices = Choices(**{key: one[key] for key in ("backend", "mode", "precision", "gpu")})
        repository = resolve(one["model"], (), choices).get("model.hf_repo", str).replace("/", "--")
        shutil.copy(ROOT / f"recipes/published/{repository}.json", tmp_path / "weights/config.json")
        for text in texts:
            words = shlex.split(re.sub(r"(?<!\w)/(?=weights|data)", f"{tmp_path}/", text))
            at = words.index("primus")
            image = next(word for word in words if word.startswith("rocm/primus:"))
            assert image.removesuffix("-preview").endswith(f"-{one['gpu']}")
            if words[0] == "docker":
                assert ("/dev/kfd" in words) == one["gpu"].startswith("mi")
                assert {"--shm-size", "-v"} < set(words)
            assert main([*words[at + 1 :], "--dry-run"]) == 0, capsys.readouterr().err
        assert browser.js("document.documentElement.scrollWidth") == 390
    assert page.startswith("1356.1 of 192 GiB per GPU: does not fit; 16 × 8 GPUs suffice")


def test_the_address_says_what_is_chosen_by_keyboard(browser: Browser) -> None:
    browser.js("document.getElementById('pick-gpu').focus()")
    browser.ask(
        "Input.dispatchKeyEvent",
        type="keyDown",
        key="ArrowDown",
        code="ArrowDown",
        windowsVirtualKeyCode=40,
    )
    browser.js("document.getElementById('pick-gpu').dispatchEvent(new Event('change'))")
    chosen = browser.js("document.getElementById('pick-gpu').value")
    assert browser.js("new URLSearchParams(location.hash.slice(1)).get('gpu')") == chosen


def test_the_search_reads_a_site_on_a_disk_and_shows_how_to_pages_first(
    site: Path, browser: Browser
) -> None:
    browser.open(site / "search.html", "?q=resume+checkpoint")
    titles: list[str] = []
    while len(titles) < 4:
        titles = browser.js(
            "[...document.querySelectorAll('#search-results a')].map((link) => link.innerText)"
        )
    assert titles[0] == "Training on your own data and weights" and "Changelog" not in titles[:4]


@pytest.mark.parametrize(
    ("query", "title"),
    [
        ("license", "License"),
        ("glossary", "Glossary"),
        ("faq", "FAQ: frequently asked questions"),
        ("air gap", "FAQ: frequently asked questions"),
        ("segfault", "When training fails"),
        ("OOM", "Running an image"),
        # Titles of issues of other tools: no page has all of their words.
        ("torch.cuda.is_available() returns False in docker", "When training fails"),
        ("Rootless podman using --device not working as expected", "Using primus"),
        ("load hugging face weights for pretraining", "Training on your own data and weights"),
        ("ibv_reg_mr failed cannot allocate memory", "Running an image"),
        ("GPU core dump", "When training fails"),
        ("HIP error invalid device function", "FAQ: frequently asked questions"),
        ("HSDP data_parallel_replicate_degree", "Training on your own data and weights"),
    ],
)
def test_a_search_finds_a_page_by_the_words_of_readers(
    query: str, title: str, site: Path, browser: Browser
) -> None:
    browser.open(site / "search.html", f"?q={quote_plus(query)}")
    summary = ""
    while not summary.startswith("Search finished"):
        summary = browser.js(
            "document.querySelector('#search-results .search-summary')?.innerText ?? ''"
        )
    titles = browser.js(
        "[...document.querySelectorAll('#search-results a')].map((link) => link.innerText)"
    )
    assert title in titles[:6]


def test_every_page_names_the_release_and_links_words_to_the_glossary(site: Path) -> None:
    release = release_of(ROOT)
    every = words(ROOT / "docs/glossary.md")
    for name in ("validation", "using", "slurm", "release"):
        text = (site / f"{name}.html").read_text()
        assert re.search(rf'class="made-from">\s+primus-images {re.escape(release)}', text)
        linked = re.findall(r'<a class="term[^>]*>([^<]+)</a>', text)
        assert len(linked) == len(set(linked))
        prose = re.sub(r"<(code|pre|h\d|a|title)\b.*?</\1>", "", text, flags=re.S)
        plain = re.sub(r"<[^>]+>", "", prose.partition("<article")[2].partition("<footer")[0])
        for word in words_of(name, every):
            used = re.search(rf"(?<![\w-]){word.text}s?(?![\w-])", plain)
            assert not used or word.text in linked, f"{name}: {word.text}"
    assert "This page does not exist" in (site / "404.html").read_text()


def searched(site: Path, query: str) -> set[str]:
    """The pages that have all words of a query, as the search of the site finds them."""
    text = (site / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").rstrip(";\n").removesuffix(")"))
    stem = snowballstemmer.stemmer("english").stemWord
    pages = set(range(len(index["docnames"])))
    for word in re.findall(r"\w+", query.lower()):
        if word in SearchEnglish.stopwords:
            continue
        having: set[int] = set()
        for table in (index["terms"], index["titleterms"]):
            for name in {word, stem(word)} & table.keys():
                entry = table[name]
                having.update(entry if isinstance(entry, list) else [entry])
        pages &= having
    return {index["docnames"][page] for page in pages}


def plain_text(site: Path, page: str) -> str:
    text = (site / f"{page}.html").read_text().partition("<article")[2].partition("</article")[0]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", text)).split())


@pytest.mark.parametrize(
    "row", yaml.safe_load(QUESTIONS.read_text(encoding="utf-8")), ids=lambda row: row["question"]
)
def test_a_question_that_users_asked_is_answered_by_one_search(
    row: dict[str, str], site: Path
) -> None:
    assert row["page"] in searched(site, row["search"]), row["search"]
    assert row["answer"] in plain_text(site, row["page"]), row["page"]


@pytest.mark.parametrize("page", KINDS)
def test_a_page_is_readable_on_every_screen_on_paper_and_by_keyboard(
    page: str, site: Path, browser: Browser, tmp_path: Path
) -> None:
    if page == "report.html":
        runs = [
            str(finished_run(tmp_path / name, passed=name == "good"))
            for name in ("good", "bad_" * 30)
        ]
        assert main(["report", *runs, "--out", str(tmp_path)]) == 0
        site = tmp_path
    browser.open(site / page)
    browser.js(SCRIPT)
    shown = (
        (1280, "screen", "light"),
        (1280, "screen", "dark"),
        (390, "screen", "dark"),
        (718, "print", "dark"),
    )
    for width, media, scheme in shown:
        browser.show(width, media, scheme, phone=width == 390)
        assert browser.js("unreadable()") == [], (width, media, scheme)
    browser.show(1280)
    assert browser.js("outline()") == []
    missed, ended = set(browser.js("reachable()")), False
    while not ended:
        for kind in ("keyDown", "keyUp"):
            browser.ask(
                "Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9
            )
        focused, visible, ended = browser.js("focused()")
        assert visible or ended, f"its focus is not visible: {focused}"
        missed.discard(focused)
    assert missed == set()


def test_pages_of_rocm_find_every_variable_in_the_data() -> None:
    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(
        "{{ data.docker.pull_tag }} {{ data.dockers[0].pull_tag }}"
        "{% for name, version in data.docker.components.items() %}{{ name }} {{ version }}{% "
        "endfor %}"
        "{% for group in data.model_groups %}{{ group.group }} {{ group.tag }}{% for model in "
        "group.models %}"
        "{{ model.model }} {{ model.mad_tag }} {{ model.precision }} {{ model.config_name }}"
        "{% for gpu, tags in model.train_tags.items() %}{% for tag in tags %}"
        "{{ gpu }} {{ tag.split('/')[1].split('_')[0] }}{% endfor %}{% endfor %}{% endfor %}{% "
        "endfor %}"
    )
    files = rocm_data(ROOT)
    assert len(files) == len(backends())
    for file in files.values():
        text = template.render(data=json.loads(file))
        assert text.count("rocm/primus:") == 2
        for tag in re.findall(r'"(primus_train/.+)"', file):
            request, parts = (
                requested("madengine", ["run", "--tags", tag], {}),
                re.split("[_-]", tag.lower()),
            )
            assert parts[1:3] == [f"train/{request.choices.backend}", request.gpu_of_path]
            assert request.choices.precision == parts[-2]
    assert (
        len(
            re.findall(
                "primus_train/megatron_MI355X_", files["primus-megatron-benchmark-models.json"]
            )
        )
        > 20
    )
