"""`recollect generate`: text streamed from a saved model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from recollect.lm.model.cache import RecollectCache
    from recollect.lm.model.model import RecollectForCausalLM
    from recollect.lm.prompt import Prompt

__all__ = ["generate"]

INTERRUPTED = 130
BYTES = (256, 257)  # vocabularies of bytes, without and with an end of the document


def generate(
    checkpoint: Annotated[str, typer.Argument(help="Folder of a saved model, or a hub name.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 200,
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
    import torch
    from transformers import TextStreamer
    from transformers.utils import logging

    _check(tokens, temperature, top_p, top_k, beams)
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device {device} is not here: use cpu, or cuda where torch sees a GPU")
    logging.disable_progress_bar()
    model, tokenizer = _loaded(checkpoint)
    model.to(device)  # type: ignore[arg-type]
    read = _read(model, tokenizer, prompt, from_state)
    if save_state is not None:
        read.save(save_state, model)
    how: dict[str, Any] = {"max_new_tokens": tokens, "num_beams": beams, "do_sample": False}
    if temperature > 0 and beams == 1:
        how |= {"do_sample": True, "temperature": temperature}
        how |= {"top_p": 1.0 if top_p is None else top_p, "top_k": top_k or 0}
    for name in ("eos_token_id", "pad_token_id"):
        own = getattr(tokenizer, name)
        how[name] = own if own is not None and own < model.config.vocab_size else None
    how["pad_token_id"] = how["pad_token_id"] or how["eos_token_id"] or 0
    streamer = None
    if not as_json and beams == 1:
        if prompt:
            typer.echo(prompt, nl=False)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[arg-type]
    start = time.perf_counter()
    try:
        made = model.generate(
            **read.inputs(),
            **how,
            streamer=streamer,
            return_dict_in_generate=True,
            generator=torch.Generator().manual_seed(seed),
        )
    except KeyboardInterrupt:
        typer.echo("")
        raise typer.Exit(INTERRUPTED) from None
    seconds = time.perf_counter() - start
    new = made.sequences[0, read.input_ids.shape[1] :]
    text, cache = tokenizer.decode(new, skip_special_tokens=True), made.past_key_values
    facts = {
        "prompt": prompt,
        "text": text,
        "tokens": len(new),
        "tokens_per_second": len(new) / seconds,
        "cache_bytes_per_sequence": cache.nbytes_per_sequence,
        "cache_grows": model.cache_grows,
        "cache_columns": cache.seen,
        "seed": seed,
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    if streamer is None:
        typer.echo(prompt + text)
    typer.echo(_size(model, cache), err=True)
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


def _loaded(checkpoint: str) -> tuple[RecollectForCausalLM, Any]:
    """Model and tokenizer; a folder without one, of a vocabulary of bytes, means bytes."""
    from transformers import AutoTokenizer

    from recollect.lm.data.tokenizers import byte_tokenizer
    from recollect.lm.model.model import RecollectForCausalLM

    folder = Path(checkpoint)
    if not folder.is_dir() and (folder.exists() or folder.is_absolute() or checkpoint[:1] == "."):
        raise ValueError(f"there is no folder {checkpoint!r}: name that of a saved model")
    try:
        model = RecollectForCausalLM.from_pretrained(checkpoint).eval()
    except OSError as error:
        if not folder.is_dir():
            raise ValueError(
                f"there is no folder {checkpoint!r}, and no model of that name can be fetched from "
                "the hub: name the folder of a saved model, such as runs/train/model"
            ) from None
        raise ValueError(f"{checkpoint} cannot be loaded: {_first(error)}") from None
    has = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
    if folder.is_dir() and not has:
        if model.config.vocab_size in BYTES:
            return model, byte_tokenizer()
        raise ValueError(
            f"{checkpoint} has no tokenizer, and {model.config.vocab_size} tokens are not bytes: "
            "save its tokenizer beside the model (tokenizer.save_pretrained)"
        )
    try:
        return model, AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the tokenizer of {checkpoint} cannot be loaded: {_first(error)}"
        ) from None


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _read(model: RecollectForCausalLM, tokenizer: Any, prompt: str, saved: Path | None) -> Prompt:
    """The prompt read but for its last token, after what was read before."""
    import torch

    from recollect.lm.prompt import Prompt

    if not prompt.isprintable() and any("\ud800" <= c <= "\udfff" for c in prompt):
        raise ValueError("--prompt is no UTF-8 text: give it in the terminal's encoding")
    ids = tokenizer(prompt, add_special_tokens=saved is None)["input_ids"]
    if saved is None and not ids:
        # A text of its own begins where another ended.
        first = tokenizer.bos_token_id
        first = tokenizer.eos_token_id if first is None else first
        if first is None or first >= model.config.vocab_size:
            raise ValueError("give --prompt: this tokenizer has no token that begins a text")
        ids = [first]
    more = torch.tensor([ids], dtype=torch.long, device=model.device)
    if saved is None:
        return Prompt.read(model, more)
    before = Prompt.load(saved, model)
    if before.input_ids.shape[0] != 1:
        raise ValueError(f"{saved} holds {before.input_ids.shape[0]} texts, and one is continued")
    return before.extended(model, more) if ids else before


def _size(model: RecollectForCausalLM, cache: RecollectCache) -> str:
    from recollect.report.units import readable

    size = readable(cache.nbytes_per_sequence, "B")
    if model.cache_grows:
        return f"cache: {size} per sequence after {cache.seen} tokens, growing with the text"
    return f"cache: {size} per sequence, however long the text"
