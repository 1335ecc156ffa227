"""Sphinx's settings for the site. `build.py` runs it; the pages themselves are plain Markdown."""

from __future__ import annotations

import html
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive

import fenced

project = "fenced"
release = version = fenced.__version__
root_doc = "index"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
templates_path: list[str] = []
exclude_patterns: list[str] = []

# Pages are read as a forge reads them: the same anchors, and no syntax that a forge does not know.
myst_heading_anchors = 4
myst_enable_extensions = ["tasklist"]
myst_fence_as_directive = {"mermaid"}
suppress_warnings = ["misc.highlighting_failure"]

# Docstrings put code between single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 76
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = f"fenced {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["diagrams.js"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_favicon = "static/favicon.svg"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_theme_options: dict[str, Any] = {
    "light_css_variables": {"color-brand-primary": "#1f5fbf", "color-brand-content": "#1f5fbf"},
    "dark_css_variables": {"color-brand-primary": "#7fb2ff", "color-brand-content": "#7fb2ff"},
}


class Mermaid(Directive):
    """A diagram. `diagrams.js` draws it in the browser; where that fails, its text stays readable."""

    has_content: ClassVar[bool] = True

    def run(self) -> list[nodes.Node]:
        text = html.escape("\n".join(self.content))
        return [nodes.raw("", f'<pre class="mermaid">{text}</pre>\n', format="html")]


def hide_constructor(app: Any, what: str, name: str, *rest: Any) -> tuple[str, None] | None:
    """Programs get leases from a client and never make one."""
    return ("", None) if what == "class" and name.endswith("Lease") else None


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("mermaid", Mermaid)
    app.connect("autodoc-process-signature", hide_constructor)
    return {"parallel_read_safe": True}
