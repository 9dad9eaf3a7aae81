"""Text with units and line breaks for readers."""

from __future__ import annotations

import re
import textwrap

__all__ = ["format_si", "hanging_indent"]


def format_si(count: float, unit: str) -> str:
    """Format a count with three digits and a prefix: powers of 1024 for bytes, of 1000 otherwise.

    Examples:
        >>> from recollect.report.formatting import format_si
        >>> format_si(1536, "B"), format_si(2.5e6, "FLOP")
        ('1.5 KiB', '2.5 MFLOP')
    """
    step, prefixes = (1024, ("", "Ki", "Mi", "Gi", "Ti")) if unit == "B" else (1000, "\0kMGTP")
    index = 0
    while abs(count) >= step and index < len(prefixes) - 1:
        count, index = count / step, index + 1
    digits = f"{count:.0f}" if index == 0 or count >= 100 else f"{count:.3g}"
    return f"{digits} {prefixes[index].strip(chr(0))}{unit}"


def hanging_indent(text: str, width: int | None, *, indent: int = 9) -> str:
    """Wrap lines that are too long, with a hanging indent, between words only.

    Equations on one line, separated by three spaces, are put on lines of their own first.

    Args:
        text: Lines that begin with a label.
        width: Width in characters; ``None`` or 0 leaves the text unchanged.
        indent: Width of the labels. It is ignored if the text is narrow.

    Examples:
        >>> from recollect.report.formatting import hanging_indent
        >>> print(hanging_indent("engine   one that runs all of it", 24))
        engine   one that runs
                   all of it
    """
    if width is None or width < 1:
        return text
    indent = indent if width > 3 * indent else 0
    lines: list[str] = []
    for line in text.splitlines():
        parts = [line] if len(line) <= width else re.split(r"(?<=[,;]) {3}", line)
        for part in (parts[0], *(" " * indent + rest for rest in parts[1:])):
            lines += textwrap.wrap(
                part,
                width,
                subsequent_indent=" " * (indent + 2),
                break_long_words=False,
                break_on_hyphens=False,
            ) or [""]
    return "\n".join(lines)
