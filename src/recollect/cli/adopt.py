"""`recollect adopt`: a published model whose recurrent layers recollect computes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from recollect.cli.console import INTERRUPTED, check_device, print_json

__all__ = ["adopt"]


def adopt(
    model: Annotated[str, typer.Argument(help="Folder of a saved model, or a name on the hub.")],
    prompt: Annotated[
        str | None, typer.Option(help="Generate a continuation of this text, token by token.")
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", "--max-new-tokens", help="Largest number of new tokens.")
    ] = 200,
    engine: Annotated[str, typer.Option(help="Engine of all layers.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """List the recurrent layers of a published model that recollect computes, and generate text."""
    if tokens < 1:
        raise ValueError(f"--tokens must be at least 1, not {tokens}")
    check_device(device)
    from transformers.utils import logging

    from recollect.lm.adoption import adopt as adopt_layers
    from recollect.lm.loading import load_saved_model, load_saved_tokenizer

    logging.disable_progress_bar()
    loaded = load_saved_model(model, others=True).to(device)
    report = adopt_layers(loaded, engine=engine)
    if not report.adopted:
        reasons = {f"{one.layer_class} is unchanged ({one.reason})" for one in report.unchanged}
        raise ValueError(
            f"{type(loaded).__name__} has no layer that recollect computes: "
            + ("; ".join(sorted(reasons)) or "none of its layers is recurrent")
        )
    if not as_json:
        typer.echo(str(report))
    text = None
    if prompt is not None:
        text = _continuation(loaded, load_saved_tokenizer(model, loaded), prompt, tokens, as_json)
    if as_json:
        layers = [
            {**asdict(one), "recipe": None if one.recipe is None else one.recipe.to_dict()}
            for one in report.layers
        ]
        name = type(loaded).__name__
        print_json({"model": name, "layers": layers, "prompt": prompt, "text": text})


def _continuation(model: Any, tokenizer: Any, prompt: str, tokens: int, silent: bool) -> str:
    """Return the greedy continuation of a prompt; print it while it grows, unless silent."""
    from transformers import TextStreamer

    from recollect.cli.generate import prompt_tokens, special_tokens

    ids = prompt_tokens(model, tokenizer, prompt, add_special_tokens=True)
    streamer = None
    if not silent:
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
        raise typer.Exit(INTERRUPTED) from None
    text: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return text
