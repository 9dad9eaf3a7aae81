"""`recollect adopt`: compute the recurrent layers of a published model with recollect."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from recollect.cli.console import print_json
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

    from recollect.cli.generate import generate_tokens, prompt_tokens
    from recollect.lm.adoption import adopt as adopt_layers
    from recollect.lm.loading import load_saved_model, load_saved_tokenizer
    from recollect.lm.model.model import RecollectForCausalLM

    logging.disable_progress_bar()
    loaded = load_saved_model(model, any_decoder=True).to(device)
    if isinstance(loaded, RecollectForCausalLM):
        raise ValueError(f"{model} is a model of recollect: use recollect generate {model}")
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
        tokenizer = load_saved_tokenizer(model, loaded)
        ids = prompt_tokens(loaded, tokenizer, prompt, add_special_tokens=True)
        if not as_json:
            typer.echo(f"\n{prompt}", nl=False)
        options = {"max_new_tokens": tokens, "do_sample": False}
        output = generate_tokens(loaded, tokenizer, stream=not as_json, input_ids=ids, **options)
        text = tokenizer.decode(output.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    if as_json:
        layers = [
            {**asdict(layer), "recipe": None if layer.recipe is None else layer.recipe.to_dict()}
            for layer in report.layers
        ]
        name = type(loaded).__name__
        print_json({"model": name, "layers": layers, "prompt": prompt, "text": text})
