"""Sphinx's settings. Furo instead of rocm-docs-core, which about 90 packages build, and whose
selector repeats the text of a page for each choice, where the picker reads thousands of them from
one JSON document.
"""

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

from primus_images import __version__

project = "primus-images"
author = "primus-images"
release = version = __version__
copyright = ""  # noqa: A001
extensions = ["myst_parser", "sphinx_design", "sphinx_copybutton"]
exclude_patterns = ["files/**"]
myst_enable_extensions = ["colon_fence", "attrs_block"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = project
html_favicon = "static/favicon.svg"
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = html_show_sphinx = html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
highlight_language = "text"
copybutton_prompt_text = "$ "

_LONG = 12


def setup(app: Sphinx) -> None:
    """Mark long names in tables with the class ``long``: site.css breaks these."""

    def mark(_app: Sphinx, document: nodes.document, _page: str) -> None:
        for cell in document.findall(nodes.entry):
            for name in cell.findall(nodes.literal):
                if len(name.astext()) > _LONG:
                    name["classes"].append("long")

    app.connect("doctree-resolved", mark)
