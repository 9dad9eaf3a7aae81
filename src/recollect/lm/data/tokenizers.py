"""Tokenizers: bytes by default, a BPE trained on one's own text, or any of Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recollect.lm.hub import hub_options
from recollect.lm.model.checkpoint import check_regular_files

__all__ = ["END", "byte_tokenizer", "encode", "load_tokenizer", "read_tokenizer", "train_bpe"]

END = "<|end|>"
"""Stands at the end of every document; where generation stops."""


_FILES = ("tokenizer.json", "tokenizer_config.json")
"""One of them is in every folder that holds a tokenizer."""


def byte_tokenizer(*, end: bool = True) -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, its number that of the byte, and 256 for the end of a document.

    It saves and loads as any tokenizer of Hugging Face does, without code of ours, and pads on the
    left, as `generate` needs it of a batch.

    Args:
        end: whether there is a token 256; without, for a vocabulary of 256, the byte 0 ends a
            document, because no text holds it.
    """
    alphabet = _byte_letters()
    model = models.BPE(vocab={letter: byte for byte, letter in enumerate(alphabet)}, merges=[])
    return _wrapped(Tokenizer(model), END if end else alphabet[0])


def train_bpe(texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of ``vocab`` tokens trained on texts; every text has an encoding.

    Args:
        texts: read once. vocab: at least 257, the bytes and the end of a document.

    Raises:
        ValueError: fewer than 257.
    """
    if vocab < 257:
        raise ValueError(f"a byte-level BPE needs at least 257 tokens, not {vocab}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 1,  # and the end of a document
        initial_alphabet=_byte_letters(),
        show_progress=False,
        special_tokens=[],
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrapped(tokenizer)


def load_tokenizer(name: str, *, key: str = "[data] tokenizer") -> PreTrainedTokenizerFast:
    """Return the tokenizer of a folder or of the hub; no code that comes with it is run.

    It pads on the left, as `generate` needs it, and still does after it was saved and loaded. A
    tokenizer without a token to pad with takes the end of a document.

    Args:
        name: of the folder, or on the hub. key: of the plan, which messages name.

    Raises:
        ValueError: none can be loaded, or it has no token that ends a document.
    """
    if name[:1] in ("/", ".", "~") and not Path(name).is_dir():
        raise ValueError(f"{key} {name!r}: there is no such folder")
    try:
        # Only options of its construction are saved with a tokenizer.
        tokenizer = read_tokenizer(name, padding_side="left")
    except ValueError as error:
        if not Path(name).is_dir():
            raise ValueError(
                f"{key} {name!r}: there is no such folder, and the hub gives no tokenizer of that "
                'name: give "bytes", "bpe", or the folder of a saved one'
            ) from None
        if not any((Path(name) / file).exists() for file in _FILES):
            raise ValueError(
                f"{key} {name!r}: this folder holds no tokenizer ({' or '.join(_FILES)}): save one "
                "there with save_pretrained"
            ) from None
        raise ValueError(f"{key} {name!r}: its tokenizer cannot be loaded: {error}") from None
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{key} {name!r} has a tokenizer without eos_token, which ends a document: set one "
            "and save it"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_tokenizer(name: str, **options: Any) -> Any:
    """Return the tokenizer that transformers loads, whatever it is; no code of it is run.

    Args:
        name: of the folder, or on the hub.
        options: of the tokenizer.

    Raises:
        ValueError: it cannot be loaded, with the reason alone.
    """
    if Path(name).is_dir():
        check_regular_files(Path(name))
    try:
        return AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, **options, **hub_options(name)
        )
    except ImportError:
        raise
    except RecursionError:
        raise ValueError("a file of it is nested too deep") from None
    except Exception as error:  # transformers and tokenizers check little in their files
        reason = " ".join(str(error).split()).partition(". ")[0][:200]
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{kind}{reason}") from None


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> np.ndarray:
    """The tokens of a document with its end, int32 ``[n]``."""
    end = cast(int, tokenizer.eos_token_id)
    if is_bytes(tokenizer):
        raw = np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)
        return np.append(raw, np.int32(end))
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return np.array([*ids, end], dtype=np.int32)


def is_bytes(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether tokens are bytes, so that nothing need be looked up."""
    known = getattr(tokenizer, "_recollect_bytes", None)
    if known is None:
        vocab = tokenizer.get_vocab()
        known = len(vocab) == 257 and all(
            vocab.get(letter) == byte for byte, letter in enumerate(_byte_letters())
        )
        tokenizer._recollect_bytes = known  # type: ignore[attr-defined]
    return known


def _wrapped(tokenizer: Tokenizer, end: str = END) -> PreTrainedTokenizerFast:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=end,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte, in the bytes' order.

    Printable bytes of Latin-1 stand for themselves, the others are numbered from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]
