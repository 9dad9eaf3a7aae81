"""HTML from templates: a page is one file with its style and scripts, and needs no other host.

The scripts sort tables and show values of curves. Without them, the page has the same content.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from recollect.report.notebook import text_to_html

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["SCRIPTS", "picture", "read_static", "render_page", "render_section"]

SCRIPTS = ("tables.js", "curves.js")
"""Scripts of a page, in the order in which they run."""


@cache
def read_static(name: str) -> str:
    """Return the text of a file in ``static/``, such as ``"report.css"``."""
    return (resources.files("recollect.report") / "static" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("recollect.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    environment.filters["inline_code"] = lambda text: Markup(text_to_html(text))
    return environment


def render_section(name: str, *args: Any) -> str:
    """Call a macro of ``templates/sections.html.j2``; it escapes every text."""
    macro = getattr(_environment().get_template("sections.html.j2").module, name)
    return str(macro(*args)).strip()


def render_page(title: str, body: str, *, kind: str = "") -> str:
    """Return a page with a plain title and an HTML body; its kind is one word."""
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            body=body,
            kind=kind,
            style=read_static("report.css"),
            scripts=map(read_static, SCRIPTS),
        )
    )


def picture(alt: str, wide: str, narrow: str = "") -> str:
    """Return a drawing as HTML, with another drawing for narrow screens."""
    return render_section("picture", alt, wide, narrow)
