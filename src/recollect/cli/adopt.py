"""`recollect adopt`: compute the recurrent layers of a published model with recollect."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from recollect.cli.console import exit_interrupted, print_json
from recollect.cli.options import (
    DeviceOption,
    JsonOption,
    ModelFolderArgument,
    NewTokensOption,
    check_device,
)

__all__ = ["adopt"]


def adopt(
    model: ModelFolderArgument,
    prompt: Annotated[str | None, typer.Option(help="Text to continue, greedily.")] = None,
    tokens: NewTokensOption = 200,
    engine: Annotated[str, typer.Option(help="Engine of all layers.")] = "auto",
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """List the recurrent layers of a published model that recollect computes, and generate text."""
    check_device(device)
    from transformers.utils import logging

    from recollect.lm.adoption import adopt as adopt_layers
    from recollect.lm.loading import load_saved_model, load_saved_tokenizer

    logging.disable_progress_bar()
    loaded = load_saved_model(model, others=True).to(device)
    report = adopt_layers(loaded, engine=engine)
    if not report.adopted:
        reasons = {f"{x.layer_class} is unchanged ({x.reason})" for x in report.unchanged}
        raise ValueError(
            f"{type(loaded).__name__} has no layer that recollect computes: "
            + ("; ".join(sorted(reasons)) or "none of its layers is recurrent")
        )
    if not as_json:
        typer.echo(str(report))
    text = None
    if prompt is not None:
        text = _continue(loaded, load_saved_tokenizer(model, loaded), prompt, tokens, not as_json)
    if as_json:
        layers = [
            {**asdict(layer), "recipe": None if layer.recipe is None else layer.recipe.to_dict()}
            for layer in report.layers
        ]
        name = type(loaded).__name__
        print_json({"model": name, "layers": layers, "prompt": prompt, "text": text})


def _continue(model: Any, tokenizer: Any, prompt: str, tokens: int, stream: bool) -> str:
    """Return the greedy continuation of a prompt, and optionally print it token by token."""
    from transformers import TextStreamer

    from recollect.cli.generate import prompt_tokens, special_tokens

    ids = prompt_tokens(model, tokenizer, prompt, add_special_tokens=True)
    streamer = None
    if stream:
        typer.echo(f"\n{prompt}", nl=False)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        output = model.generate(
            ids,
            max_new_tokens=tokens,
            do_sample=False,
            streamer=streamer,
            **special_tokens(model, tokenizer),
        )
    except KeyboardInterrupt:
        typer.echo("")
        exit_interrupted()
    text: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return text
