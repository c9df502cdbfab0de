"""Sphinx's settings. Furo instead of rocm-docs-core, which about 90 packages build, and whose
selector repeats the text of a page for each choice, where the picker reads thousands of them from
one JSON document.
"""

import os
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from docs.site import glossary
from primus_images.cli.version import release_of
from primus_images.system.host import CHECKOUT, commit_of
from primus_images.yamlfile import read_values

project = "primus-images"
author = "primus-images"
release = version = release_of(CHECKOUT)
copyright = ""  # noqa: A001
extensions = ["myst_parser", "sphinx_design", "sphinx_copybutton"]
exclude_patterns = ["files/**"]
myst_enable_extensions = ["colon_fence", "attrs_block"]
myst_heading_anchors = 4
# Options in prose are typed with two hyphens.
smartquotes = False
html_theme = "furo"
html_title = f"{project} {release}"
# The address of the site, which only the page for missing pages needs.
html_baseurl = os.environ.get("DOCS_URL", "")
html_favicon = "static/favicon.svg"
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_show_copyright = html_show_sphinx = html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
html_context = {
    "search_words": read_values(Path(__file__).with_name("keywords.yaml")).data,
    "commit": commit_of(CHECKOUT),
    "date": commit_of(CHECKOUT, "%cs"),
    "source": os.environ.get("DOCS_SOURCE", ""),
}
highlight_language = "text"
copybutton_prompt_text = "$ "

_LONG = 12
_GLOSSARY = CHECKOUT / "docs/glossary.md"


def setup(app: Sphinx) -> None:
    """Mark long names in tables with the class ``long``, which site.css breaks; link words to the
    glossary; let the page for missing pages find the others.
    """
    words = glossary.words(_GLOSSARY)

    def mark(_app: Sphinx, document: nodes.document, _page: str) -> None:
        for cell in document.findall(nodes.entry):
            for name in cell.findall(nodes.literal):
                if len(name.astext()) > _LONG:
                    name["classes"].append("long")

    def explain(_app: Sphinx, document: nodes.document, page: str) -> None:
        address = app.builder.get_relative_uri(page, glossary.PAGE)
        glossary.link(document, glossary.words_of(page, words), address)

    def base(
        _app: Sphinx, page: str, _template: str, context: dict[str, Any], _document: object
    ) -> None:
        if page == "404" and html_baseurl:
            context["metatags"] = f'<base href="{html_baseurl}">{context["metatags"]}'

    app.connect("doctree-resolved", mark)
    app.connect("doctree-resolved", explain)
    app.connect("html-page-context", base)
