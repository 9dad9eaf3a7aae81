"""Reference of the command line, as Markdown: usage, arguments and options of every command.

All text comes from the application, so the page has the words of `recollect COMMAND --help`.
"""

from __future__ import annotations

import re
from typing import Any

import typer

from recollect.cli.app import build

__all__ = ["PAGE", "render_commands"]

PAGE = "reference/commands.md"
"""Path of the page in the site."""

_SHARED = ("--import", "--help")
"""Options of every command, listed once."""

_REMARK = re.compile(r"\s*\[((?:[^\[\]]|\[\w+\])*)\]$")
"""Default, range or `required`, in brackets at the end of a help text."""


def render_commands() -> str:
    """Return the page."""
    group: Any = typer.main.get_command(build())
    context = group.make_context("recollect", [], resilient_parsing=True)
    lines = [
        "# Command line",
        "",
        "Arguments and options of every command, as `recollect COMMAND --help` prints them.",
        "[Commands](../commands.md) describes exit statuses, output and folders.",
        "",
        *_options_table([p for p in group.params if p.name != "help"], context, "option"),
        "Every command takes these options:",
        "",
    ]
    first = next(iter(group.commands.values()))
    shared = [param for param in first.get_params(context) if param.opts[0] in _SHARED]
    lines += _options_table(shared, context, "option")
    for name, command in group.commands.items():
        lines += _command_section(name, command, context)
    return "\n".join(lines)


def _command_section(name: str, command: Any, context: Any) -> list[str]:
    params = [p for p in command.get_params(context) if not p.hidden and p.opts[0] not in _SHARED]
    arguments = [p for p in params if p.param_type_name == "argument"]
    options = [p for p in params if p.param_type_name == "option"]
    names = [_record(argument, context)[0].partition(" ")[0] for argument in arguments]
    usage = " ".join(["recollect", name, *names, "[OPTIONS]"])
    return [
        f"## recollect {name}",
        "",
        *_escape(command.help).splitlines(),
        "",
        *("```text", usage, "```", ""),
        *_options_table(arguments, context, "argument"),
        *_options_table(options, context, "option"),
    ]


def _options_table(params: list[Any], context: Any, heading: str) -> list[str]:
    """Return a table of parameters and an empty line; nothing without parameters."""
    if not params:
        return []
    lines = [f"| {heading} | meaning | default, range |", "|---|---|---|"]
    for param in params:
        name, text = _record(param, context)
        remarks: list[str] = []
        while remark := _REMARK.search(text):
            remarks.insert(0, remark[1].removeprefix("default: "))
            text = text[: remark.start()]
        remarks_text = "; ".join(remarks).replace("<=", " ≤ ").replace(">=", " ≥ ")
        lines.append(f"| `{name}` | {_escape(text)} | {_escape(remarks_text)} |")
    return [*lines, ""]


def _record(param: Any, context: Any) -> tuple[str, str]:
    """Return the names of a parameter with its value, and its help text."""
    name, text = (" ".join(part.split()) for part in param.get_help_record(context))
    return name.replace(" range>", ">"), text


def _escape(text: str) -> str:
    return re.sub(r"([*_|<\[\]])", r"\\\1", text)
