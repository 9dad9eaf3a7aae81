"""The model card, ``README.md`` of a saved model: how to load it, its sizes and its recipes."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from recollect.recipe.recipe import Recipe
from recollect.report.files import read_regular, write_atomic
from recollect.report.notebook import get_equations

__all__ = ["CARD", "carry_over", "write_card"]

CARD = "README.md"

_MARK = "<!-- Written by recollect, and again by each save until it is edited: "
_INSTALL = 'pip install "recollect-layers[lm]"'


def write_card(
    folder: Path, model: Any, *, load_lines: Sequence[str], recipes: Mapping[str, Recipe]
) -> None:
    """Write the card of a saved model, unless the folder has a ``README.md`` of its user.

    ``load_lines`` are lines of Python that load the model; ``recipes`` are by names of layers.
    """
    if not (folder / CARD).exists() or _generated(folder / CARD):
        write_atomic(folder / CARD, _signed(_text(model, load_lines, recipes)))


def carry_over(replaced: Path, folder: Path) -> None:
    """Copy the ``README.md`` of a user from an old folder of a model to the new folder."""
    if (replaced / CARD).is_file() and not _generated(replaced / CARD):
        shutil.copy2(replaced / CARD, folder / CARD)


def _text(model: Any, load_lines: Sequence[str], recipes: Mapping[str, Recipe]) -> str:
    config = model.config
    can_generate = model.can_generate()
    data = ModelCardData(
        library_name="recollect",
        pipeline_tag="text-generation" if can_generate else None,
        tags=["recollect"],
    )
    lines = [
        *("---", data.to_yaml(), "---", "", f"# {type(model).__name__}", ""),
        f"A {'language ' if can_generate else ''}model of recollect, whose sequence layers are "
        "associative memories.",
        *("", "## Loading", ""),
        'In this folder, or with its path or its name on the hub in place of `"."`:',
        *("", "```python", *load_lines, "```", "", f"recollect is installed by `{_INSTALL}`."),
    ]
    if getattr(config, "auto_map", None):
        lines += [
            "Where it is installed, transformers loads the model without an import of recollect:",
            *("", "```python", "from transformers import AutoModelForCausalLM", ""),
            'model = AutoModelForCausalLM.from_pretrained(".", trust_remote_code=True)',
            "```",
        ]
    sizes = {
        "parameters": f"{model.num_parameters():,}",
        "type of numbers": str(model.dtype).removeprefix("torch."),
        "layers": f"{config.num_hidden_layers:,}",
        "hidden size": f"{config.hidden_size:,}",
        "vocabulary": f"{config.vocab_size:,} tokens",
    }
    lines += ["", "## Sizes", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in sizes.items()]
    lines += ["", "## Recipes", ""]
    for name, recipe in recipes.items():
        lines += [f"`{name}`:", "", "```text", recipe.brief]
        for label, rows in get_equations(recipe):
            lines += [f"{label if not i else '':<9}{row}" for i, row in enumerate(rows)]
        lines += ["```", ""]
    return "\n".join(lines) + "\n"


def _signed(text: str) -> str:
    """Return the text with a checksum, which detects a later edit."""
    return f"{text}{_MARK}{hashlib.sha256(text.encode()).hexdigest()} -->\n"


def _generated(path: Path) -> bool:
    """Whether a card was not edited after `write_card`."""
    try:
        text = read_regular(path)
    except (OSError, UnicodeDecodeError):
        return False
    return text == _signed(text[: max(text.rfind(_MARK), 0)])
