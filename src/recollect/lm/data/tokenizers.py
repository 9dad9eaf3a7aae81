"""Tokenizers: bytes by default, a byte-level BPE trained on your text, or any of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recollect.lm.hub import offline_kwargs
from recollect.lm.model.checkpoint import check_regular_files

__all__ = ["byte_tokenizer", "encode", "load_tokenizer", "read_tokenizer", "train_bpe"]

EOS_TOKEN = "<|end|>"
"""Token at the end of every document, at which generation stops."""

_FILES = ("tokenizer.json", "tokenizer_config.json")
"""Files of which every folder with a tokenizer has one."""


def byte_tokenizer(*, add_eos: bool = True) -> PreTrainedTokenizerFast:
    """Return the tokenizer of UTF-8 bytes, in which token 256 ends a document.

    Transformers alone saves and loads it, and it pads on the left, as `generate` needs. Without
    ``add_eos`` there are 256 tokens, and byte 0, which texts do not contain, ends a document.
    """
    alphabet = _byte_alphabet()
    model = models.BPE(vocab={letter: byte for byte, letter in enumerate(alphabet)}, merges=[])
    return _wrap(Tokenizer(model), EOS_TOKEN if add_eos else alphabet[0])


def train_bpe(texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of ``vocab`` ≥ 257 tokens, in which every text has an encoding."""
    if vocab < 257:
        raise ValueError(f"a byte-level BPE needs at least 257 tokens, not {vocab}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 1,  # and the end of a document
        initial_alphabet=_byte_alphabet(),
        show_progress=False,
        special_tokens=[],
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def load_tokenizer(name: str, *, key: str = "[data] tokenizer") -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder or of the hub without running code that comes with it.

    It pads on the left, also after it is saved and loaded. A tokenizer without a padding token pads
    with the end of a document, and one without that token is refused. Messages name it by ``key``.
    """
    if name[:1] in ("/", ".", "~") and not Path(name).is_dir():
        raise ValueError(f"{key} {name!r}: there is no such folder")
    try:
        # Options of the constructor are saved with the tokenizer.
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
    """Load any tokenizer of transformers without running code that comes with it."""
    if Path(name).is_dir():
        check_regular_files(Path(name))
    try:
        return AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, **options, **offline_kwargs(name)
        )
    except ImportError:
        raise
    except RecursionError:
        raise ValueError("a file of it is nested too deep") from None
    except Exception as error:  # transformers and tokenizers check little in their files
        reason = " ".join(str(error).split()).partition(". ")[0][:200]
        prefix = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{prefix}{reason}") from None


def encode(
    tokenizer: PreTrainedTokenizerFast, text: str, *, add_eos: bool = True
) -> np.ndarray:  # int32 [n]
    """Return the tokens of a document, or of its beginning without ``add_eos``."""
    if is_byte_tokenizer(tokenizer):
        ids = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
    else:
        backend = tokenizer.backend_tokenizer
        # The batch method is the faster one, because it computes no offsets.
        ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    end = [cast(int, tokenizer.eos_token_id)] if add_eos else []
    return np.concatenate([ids, end], dtype=np.int32, casting="unsafe")


def is_byte_tokenizer(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether the tokens are the bytes of UTF-8; the answer is stored on the tokenizer."""
    result = getattr(tokenizer, "_recollect_bytes", None)
    if result is None:
        vocab = tokenizer.get_vocab()
        result = len(vocab) == 257 and all(
            vocab.get(letter) == byte for byte, letter in enumerate(_byte_alphabet())
        )
        tokenizer._recollect_bytes = result  # type: ignore[attr-defined]
    return result


def _wrap(tokenizer: Tokenizer, eos_token: str = EOS_TOKEN) -> PreTrainedTokenizerFast:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([eos_token])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos_token,
        pad_token=eos_token,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _byte_alphabet() -> list[str]:
    """Return the letter of each byte in byte-level tokenizers (GPT-2's ``bytes_to_unicode``)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]
