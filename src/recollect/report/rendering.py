"""Templates and static files of the pages."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from recollect.report.notebook import prose

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["read_static", "render_section"]


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
    )
    environment.filters["inline_code"] = lambda text: Markup(prose(text))
    return environment


def render_section(name: str, *args: Any) -> str:
    """Call a macro of ``templates/sections.html.j2``; it escapes every text."""
    macro = getattr(_environment().get_template("sections.html.j2").module, name)
    return str(macro(*args)).strip() + "\n"
