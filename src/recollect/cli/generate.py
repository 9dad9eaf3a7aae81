"""`recollect generate`: text streamed from a saved model."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recollect.cli.console import INTERRUPTED, check_device, ready, said

if TYPE_CHECKING:
    import torch

    from recollect.lm.model.model import RecollectForCausalLM
    from recollect.lm.prompt import CachedPrompt

__all__ = ["generate", "prompt_tokens", "special_tokens"]

PATIENCE = 1.0
"""Seconds of silence after which whoever waits is told that the standard input is read."""


def generate(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder of a saved model or of a run, or a hub name.")
    ],
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Text to go on from; - is the standard input, which is read without this option "
            "too where it is no terminal."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", "--max-new-tokens", help="New tokens at most.")
    ] = 200,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 takes the likeliest.")] = 0.8,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest that make up this share.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from so many of the likeliest.")] = None,
    beams: Annotated[int, typer.Option(help="Beam search over so many; 1 is none.")] = 1,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    save_state: Annotated[
        Path | None, typer.Option(help="Also save what was read of the prompt.")
    ] = None,
    from_state: Annotated[
        Path | None, typer.Option(help="Resume from what --save-state wrote, then the prompt.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write on from a prompt with a saved model, and say how large its cache is."""
    _check(tokens, temperature, top_p, top_k, beams)
    check_device(device)
    import torch
    from transformers import TextStreamer
    from transformers.utils import logging

    from recollect.lm.loading import load_saved
    from recollect.lm.model.cache import cache_of
    from recollect.lm.model.model import RecollectForCausalLM

    logging.disable_progress_bar()
    prompt = _prompt(prompt)
    model, tokenizer = load_saved(checkpoint)
    model.to(device)  # type: ignore[arg-type]
    inputs = _inputs(model, tokenizer, prompt, from_state, save_state)
    if isinstance(model, RecollectForCausalLM):
        inputs["generator"] = torch.Generator().manual_seed(seed)
    else:  # transformers' own method, which draws from the process's
        torch.manual_seed(seed)
    how: dict[str, Any] = {"max_new_tokens": tokens, "num_beams": beams, "do_sample": False}
    if temperature > 0 and beams == 1:
        how |= {"do_sample": True, "temperature": temperature}
        how |= {"top_p": 1.0 if top_p is None else top_p, "top_k": top_k or 0}
    how |= special_tokens(model, tokenizer)
    streamer = None
    if not as_json and beams == 1:
        if prompt:
            typer.echo(prompt, nl=False)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[arg-type]
    start = time.perf_counter()
    try:
        made = model.generate(**inputs, **how, streamer=streamer, return_dict_in_generate=True)
    except KeyboardInterrupt:
        typer.echo("")
        raise typer.Exit(INTERRUPTED) from None
    seconds = time.perf_counter() - start
    new = made.sequences[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    size = _cache_size(model, cache_of(made))
    facts = {
        "prompt": prompt,
        "text": text,
        "tokens": len(new),
        "tokens_per_second": len(new) / seconds,
        "cache_bytes_per_sequence": size.bytes,
        "cache_grows": size.grows,
        "cache_columns": size.columns,
        "seed": seed,
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    if streamer is None:
        typer.echo(prompt + text)
    typer.echo(str(size), err=True)
    typer.echo(f"{len(new)} tokens, {len(new) / seconds:.1f} per second", err=True)


def _check(
    tokens: int, temperature: float, top_p: float | None, top_k: int | None, beams: int
) -> None:
    for name, fits, wanted, value in (
        ("tokens", tokens >= 1, "at least 1", tokens),
        ("temperature", 0 <= temperature < 1e3, "0 or above", temperature),
        ("top-p", top_p is None or 0 < top_p <= 1, "above 0 and at most 1", top_p),
        ("top-k", top_k is None or top_k >= 1, "at least 1", top_k),
        ("beams", beams >= 1, "at least 1", beams),
    ):
        if not fits:
            raise ValueError(f"--{name} must be {wanted}, not {value}")


def _prompt(given: str | None) -> str:
    """The prompt: as it was given, or what the standard input holds where it is no terminal.

    A line's end that ``echo`` puts behind it is no part of it.
    """
    if given not in (None, "-"):
        return given
    if sys.stdin is None or (given is None and sys.stdin.isatty()):
        return ""
    if not ready(sys.stdin, PATIENCE):
        said('reading the prompt from the standard input (--prompt "" is none)')
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("the prompt on the standard input is no UTF-8 text: convert it") from None
    return text.removesuffix("\n").removesuffix("\r")


def _inputs(
    model: Any, tokenizer: Any, prompt: str, saved: Path | None, save: Path | None
) -> dict[str, Any]:
    """What generation begins with: the prompt read but for its last token, or the prompt alone.

    A decoder whose layers were replaced reads it as it generates, with a cache of its own kind.
    """
    from recollect.lm.model.model import RecollectForCausalLM

    ours = isinstance(model, RecollectForCausalLM)
    if not ours and (saved is not None or save is not None):
        raise ValueError(
            f"--{'save' if saved is None else 'from'}-state is for models of recollect alone: the "
            "cache of a decoder whose layers were replaced is that decoder's, so leave it out"
        )
    more = prompt_tokens(model, tokenizer, prompt, add_special_tokens=saved is None)
    if not ours:
        return {"input_ids": more}
    read = _read(model, more, saved)
    if save is not None:
        read.save(save, model)
    return read.generate_kwargs()


def special_tokens(model: Any, tokenizer: Any) -> dict[str, int | None]:
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
    """The prompt ``[1, T]``; a text of its own is never empty."""
    import torch

    if not prompt.isprintable() and any("\ud800" <= c <= "\udfff" for c in prompt):
        raise ValueError("--prompt is no UTF-8 text: give it in the terminal's encoding")
    ids = tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]
    if add_special_tokens and not ids:
        # A text of its own begins where another ended.
        first = tokenizer.bos_token_id
        first = tokenizer.eos_token_id if first is None else first
        if first is None or first >= model.config.vocab_size:
            raise ValueError("give --prompt: this tokenizer has no token that begins a text")
        ids = [first]
    return torch.tensor([ids], dtype=torch.long, device=model.device)


def _read(model: RecollectForCausalLM, more: torch.Tensor, saved: Path | None) -> CachedPrompt:
    """The prompt read but for its last token, after what was read before."""
    from recollect.lm.prompt import CachedPrompt

    if saved is None:
        return CachedPrompt.prefill(model, more)
    loaded = CachedPrompt.load(saved, model)
    if loaded.input_ids.shape[0] != 1:
        raise ValueError(f"{saved} holds {loaded.input_ids.shape[0]} texts, and one is continued")
    return loaded.extend(model, more) if more.shape[1] else loaded


@dataclass(frozen=True, kw_only=True)
class _CacheSize:
    """Bytes of a cache per sequence, after so many columns, and whether they grow with the text."""

    bytes: int
    columns: int
    grows: bool

    def __str__(self) -> str:
        from recollect.report.units import readable

        size = readable(self.bytes, "B")
        if self.grows:
            return f"cache: {size} per sequence after {self.columns} tokens, growing with the text"
        return f"cache: {size} per sequence, however long the text"


def _cache_size(model: Any, cache: Any) -> _CacheSize:
    from recollect.lm.model.cache import RecollectCache, StateLayer, grows
    from recollect.lm.swap import SwappedAttention

    if isinstance(cache, RecollectCache):
        return _CacheSize(
            bytes=cache.nbytes_per_sequence, columns=cache.seen, grows=model.cache_grows
        )
    size = rows = 0
    for layer in cache.layers:
        if isinstance(layer, StateLayer):
            size += 0 if layer.state is None else layer.state.nbytes
            rows = max(rows, layer.batch_size)
        else:
            size += sum(x.numel() * x.element_size() for x in (layer.keys, layer.values))
            rows = max(rows, layer.keys.shape[0])
    swapped = [x.layer for x in model.modules() if isinstance(x, SwappedAttention)]
    return _CacheSize(
        bytes=size // max(rows, 1),
        columns=cache.get_seq_length(),
        grows=len(swapped) < len(cache.layers) or any(grows(layer) for layer in swapped),
    )
