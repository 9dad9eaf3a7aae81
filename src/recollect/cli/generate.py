"""`recollect generate`: text from a saved model, printed token by token."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recollect.cli.console import exit_interrupted, print_json, print_stderr, wait_readable
from recollect.cli.options import (
    DeviceOption,
    JsonOption,
    ModelFolderArgument,
    NewTokensOption,
    check_device,
    positive,
)

if TYPE_CHECKING:
    import torch


__all__ = ["generate", "generate_tokens", "prompt_tokens"]

STDIN_HINT_SECONDS = 1.0
"""Seconds without input after which a message explains that the standard input is read."""


def generate(
    model: ModelFolderArgument,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Text to continue; - reads the standard input. [default: the standard input if "
            "it is not a terminal]"
        ),
    ] = None,
    tokens: NewTokensOption = 200,
    temperature: Annotated[
        float,
        typer.Option(
            min=0, max=1000, help="Temperature of sampling; 0 takes the most likely token."
        ),
    ] = 0.8,
    top_p: Annotated[
        float | None,
        typer.Option(
            callback=positive(1),
            help="Sample from the most likely tokens whose probabilities add up to this.",
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample from this number of most likely tokens.")
    ] = None,
    beams: Annotated[int, typer.Option(min=1, help="Number of beams of the search.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    device: DeviceOption = "cpu",
    save_state: Annotated[
        Path | None, typer.Option(help="File in which to save the state after the prompt.")
    ] = None,
    from_state: Annotated[
        Path | None, typer.Option(help="File of --save-state to continue from, before the prompt.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt with a saved model, and print the size of its cache."""
    check_device(device)
    _check_state_file(save_state)
    import torch
    from transformers.utils import logging

    from recollect.lm.loading import load_model_and_tokenizer
    from recollect.lm.model.cache import cache_of
    from recollect.lm.model.model import RecollectForCausalLM

    logging.disable_progress_bar()
    prompt = _read_prompt(prompt)
    loaded, tokenizer = load_model_and_tokenizer(model)
    loaded.to(device)  # type: ignore[arg-type]
    inputs = _inputs(loaded, tokenizer, prompt, from_state, save_state)
    if isinstance(loaded, RecollectForCausalLM):
        inputs["generator"] = torch.Generator().manual_seed(seed)
    else:  # the method of transformers samples from the global generator
        torch.manual_seed(seed)
    kwargs: dict[str, Any] = {"max_new_tokens": tokens, "num_beams": beams, "do_sample": False}
    if temperature > 0 and beams == 1:
        kwargs |= {"do_sample": True, "temperature": temperature}
        kwargs |= {"top_p": 1.0 if top_p is None else top_p, "top_k": top_k or 0}
    stream = not as_json and beams == 1
    if stream and prompt:
        typer.echo(prompt, nl=False)
    start = time.perf_counter()
    output = generate_tokens(loaded, tokenizer, stream=stream, **inputs, **kwargs)
    seconds = time.perf_counter() - start
    new_tokens = output.sequences[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(new_tokens, skip_special_tokens=True)
    cache = _cache_facts(loaded, cache_of(output))
    speed = len(new_tokens) / seconds
    if as_json:
        result = {"prompt": prompt, "text": text, "tokens": len(new_tokens)}
        print_json({**result, "tokens_per_second": speed, **cache, "seed": seed})
        return
    if not stream:
        typer.echo(prompt + text)
    typer.echo(_describe_cache(cache), err=True)
    typer.echo(f"{len(new_tokens)} tokens, {speed:.1f} per second", err=True)


def _read_prompt(prompt: str | None) -> str:
    """Return the prompt of the option or of the standard input, without the newline of ``echo``."""
    if prompt not in (None, "-"):
        return prompt
    if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        return ""
    if not wait_readable(sys.stdin, STDIN_HINT_SECONDS):
        print_stderr('reading the prompt from the standard input (--prompt "" is none)')
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("the prompt on the standard input is not UTF-8 text: convert it") from None
    return text.removesuffix("\n").removesuffix("\r")


def _inputs(
    model: Any, tokenizer: Any, prompt: str, from_state: Path | None, save_state: Path | None
) -> dict[str, Any]:
    """Return the arguments of ``model.generate`` that contain the prompt.

    A recollect model has read all but the last token then. A decoder whose layers were replaced
    reads the prompt during generation, with its own kind of cache.
    """
    from recollect.lm.model.model import RecollectForCausalLM
    from recollect.lm.prompt import CachedPrompt

    is_recollect = isinstance(model, RecollectForCausalLM)
    if not is_recollect and (from_state is not None or save_state is not None):
        raise ValueError(
            f"--{'save' if from_state is None else 'from'}-state is for models of recollect alone: "
            "the cache of a decoder whose layers were replaced is that decoder's, so leave it out"
        )
    ids = prompt_tokens(model, tokenizer, prompt, add_special_tokens=from_state is None)
    if not is_recollect:
        return {"input_ids": ids}
    if from_state is None:
        cached = CachedPrompt.prefill(model, ids)
    else:
        cached = CachedPrompt.load(from_state, model)
        if (batch_size := cached.input_ids.shape[0]) != 1:
            raise ValueError(f"{from_state} holds {batch_size} texts, and one is continued")
        cached = cached.extend(model, ids) if ids.shape[1] else cached
    if save_state is not None:
        cached.save(save_state, model)
    return cached.generate_kwargs()


def _check_state_file(path: Path | None) -> None:
    """Refuse to replace a folder or a file of another kind by a state."""
    if path is None or not os.path.lexists(path):
        return
    from recollect.lm.prompt import is_prompt_file

    if not is_prompt_file(path):
        raise ValueError(
            f"--save-state {path} exists and is not the file of a state: name another file"
        )


def generate_tokens(model: Any, tokenizer: Any, *, stream: bool, **kwargs: Any) -> Any:
    """Return the output of ``model.generate``, and optionally print the text token by token."""
    from transformers import TextStreamer

    kwargs |= _special_tokens(model, tokenizer)
    if stream:
        kwargs["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        return model.generate(**kwargs, return_dict_in_generate=True)
    except KeyboardInterrupt:
        typer.echo("")
        exit_interrupted()


def _special_tokens(model: Any, tokenizer: Any) -> dict[str, int | None]:
    """Return the tokens that end and pad a text, as arguments of generation."""
    ids: dict[str, int | None] = {}
    for name in ("eos_token_id", "pad_token_id"):
        index = getattr(tokenizer, name)
        ids[name] = index if index is not None and index < model.config.vocab_size else None
    ids["pad_token_id"] = ids["pad_token_id"] or ids["eos_token_id"] or 0
    return ids


def prompt_tokens(
    model: Any, tokenizer: Any, prompt: str, *, add_special_tokens: bool
) -> torch.Tensor:
    """Return the token ids of a prompt, ``[1, T]``; with special tokens, T is at least 1."""
    import torch

    if not prompt.isprintable() and any("\ud800" <= c <= "\udfff" for c in prompt):
        raise ValueError("--prompt is not UTF-8 text: give it in the terminal's encoding")
    ids = tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]
    if add_special_tokens and not ids:
        # In training, a text begins after the end of another text.
        first = tokenizer.bos_token_id
        first = tokenizer.eos_token_id if first is None else first
        if first is None or first >= model.config.vocab_size:
            raise ValueError("give --prompt: this tokenizer has no token that begins a text")
        ids = [first]
    return torch.tensor([ids], dtype=torch.long, device=model.device)


def _cache_facts(model: Any, cache: Any) -> dict[str, Any]:
    """Return bytes per sequence and length of a cache, and whether it grows with the text."""
    from recollect.lm.model.cache import StateLayer, has_growing_state
    from recollect.lm.replacement.swap import SwappedAttention

    size = 0
    for layer in cache.layers:
        if isinstance(layer, StateLayer):
            size += 0 if layer.state is None else layer.state.nbytes // layer.batch_size
        else:
            size += (layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[0]
    if (growing := getattr(model, "has_growing_cache", None)) is None:
        swapped = [x.layer for x in model.modules() if isinstance(x, SwappedAttention)]
        growing = len(swapped) < len(cache.layers) or any(map(has_growing_state, swapped))
    columns = cache.get_seq_length()
    return {"cache_bytes_per_sequence": size, "cache_grows": growing, "cache_columns": columns}


def _describe_cache(facts: dict[str, Any]) -> str:
    from recollect.report.formatting import format_si

    size = format_si(facts["cache_bytes_per_sequence"], "B")
    if facts["cache_grows"]:
        length = facts["cache_columns"]
        return f"cache: {size} per sequence after {length} tokens, growing with the text"
    return f"cache: {size} per sequence, however long the text"
