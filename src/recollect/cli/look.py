"""`recollect look`: the memories of a model at work on a text, as one HTML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from recollect.cli.options import DeviceOption, ModelFolderArgument, check_device

__all__ = ["look"]


def look(
    model: ModelFolderArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Text that the model reads.")],
    out: Annotated[Path, typer.Option(help="HTML file of the page.")] = Path("runs/look.html"),
    device: DeviceOption = "cpu",
) -> None:
    """Write a page that shows surprise, steps, decays, ranks and answers of a model's memories."""
    check_device(device)
    if out.suffix != ".html":
        raise ValueError(f"--out {out} must be an HTML file, such as runs/look.html")
    if os.path.isfile(text):
        raise ValueError(f"TEXT is the text itself, and {text} is a file: pass its content")
    from transformers.utils import logging

    from recollect.explanation.trace import token_label
    from recollect.lm.adoption import adopt
    from recollect.lm.loading import load_model_and_tokenizer
    from recollect.lm.model.model import RecollectForCausalLM
    from recollect.page.look import look as write_page

    logging.disable_progress_bar()
    loaded, tokenizer = load_model_and_tokenizer(model, any_decoder=True)
    loaded = loaded.to(device)
    if not isinstance(loaded, RecollectForCausalLM):
        adopt(loaded)
    ids: list[int] = tokenizer(text)["input_ids"]
    words = [token_label(tokenizer.decode([i])) for i in ids]
    typer.echo(
        write_page(loaded, ids, out, tokens=words, title=f"{model}: {type(loaded).__name__}")
    )
