"""Language modelling over the bytes of a text, and the bigram model as a baseline.

Text is split into paragraphs, and repeated paragraphs are dropped. A hash of its words assigns each
remaining paragraph to the training or the held-out part. So a paragraph's part does not depend on
other text or on a seed, and the training part contains no held-out paragraph.
"""

from __future__ import annotations

import hashlib
import math
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from recollect.fields import int_check, validate
from recollect.tasks.documentation import documentation
from recollect.tasks.mqar import IGNORE

_HELDOUT_FRACTION = 0.05
_MAX_DEFAULT_BYTES = 8_000_000  # enough for minutes of training, read in seconds
_MAX_PARAGRAPH = 2_000  # characters; longer paragraphs are split, so that every file has several
_MIN_TRAIN, _MIN_HELDOUT = 4_096, 256  # bytes below which a loss is noise
_SEPARATOR = b"\n\n"


@dataclass(frozen=True, kw_only=True, eq=False)
class TextCorpus:
    """A text in two parts that share no paragraph.

    Args:
        train: bytes for training, uint8 ``[N]``.
        heldout: bytes for evaluation, uint8 ``[M]``.
        sha256: digest of both parts; equal digests mean equal corpora.
        source: name of the source of the text.

    Examples:
        >>> corpus = rc.tasks.TextCorpus(
        ...     train=torch.tensor(list(b"key value ") * 9, dtype=torch.uint8),
        ...     heldout=torch.tensor(list(b"key value "), dtype=torch.uint8),
        ...     sha256="of both parts", source="made up",
        ... )
        >>> round(rc.tasks.bigram_bits_per_byte(corpus), 1)
        0.3
    """

    train: Tensor
    heldout: Tensor
    sha256: str
    source: str

    @property
    def vocab(self) -> int:
        """The number of tokens: one per value of a byte."""
        return 256

    def __repr__(self) -> str:
        return (
            f"TextCorpus({self.source}: {self.train.numel():,} bytes to train on, "
            f"{self.heldout.numel():,} held out, sha256 {self.sha256[:12]})"
        )


def load_text(path: str | PathLike[str] | None = None) -> TextCorpus:
    r"""Read a text and split it.

    Without a path, the text is the English documentation inside the installed Python and torch
    packages: prose only, at most 8 MB, collected in a few seconds, once per process. Its bytes
    depend on the versions of both, which ``source`` names. With a path, the text is the full UTF-8
    file with its line breaks. Empty lines separate paragraphs, and a paragraph of more than 2,000
    characters is split at its line ends or spaces.

    About one paragraph in twenty is held out.

    Args:
        path: a text file, or None for the default text.

    Returns:
        The two parts, their digest and their source.

    Raises:
        FileNotFoundError: if there is no file at ``path``.
        ValueError: if ``path`` is a directory, empty, not UTF-8 text, or too short to split.

    Examples:
        >>> from pathlib import Path
        >>> letters = "abcdefghijklmnop"
        >>> lines = [f"The {a}{b} is near the {b}{a}. It waits." for a in letters for b in letters]
        >>> _ = Path("text.txt").write_text("\n\n".join(lines))
        >>> corpus = rc.tasks.load_text("text.txt")
        >>> corpus.source, len(corpus.train) > len(corpus.heldout)
        ('text.txt', True)
    """
    if path is None:
        corpus = _default_corpus()
        return replace(corpus, train=corpus.train.clone(), heldout=corpus.heldout.clone())
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"load_text: {path} is a directory; give one text file")
    if not path.exists():
        raise FileNotFoundError(f"load_text: there is no file {path}")
    raw = path.read_bytes()
    if not raw.strip():
        raise ValueError(f"load_text: {path} is empty")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"load_text: {path} is not UTF-8 at byte {error.start}; convert it to UTF-8 first"
        ) from None
    return split_documents([text], source=str(path))


@cache
def _default_corpus() -> TextCorpus:
    return _split(documentation(), source=default_source(), limit=_MAX_DEFAULT_BYTES)


def split_documents(documents: Iterable[str], *, source: str) -> TextCorpus:
    """Split documents into a training and a held-out part, as `load_text` splits a file."""

    def paragraphs() -> Iterator[str]:
        for text in documents:
            if "\0" in text:
                raise ValueError(
                    f"load_text: {source} holds zero bytes, so it is binary; give a text file"
                )
            yield from _paragraphs(text)

    return _split(paragraphs(), source=source, limit=None)


def default_source() -> str:
    """Return the name of the default text's source; equal names mean equal texts."""
    return f"documentation of Python {platform.python_version()} and torch {torch.__version__}"


def bigram_bits_per_byte(corpus: TextCorpus) -> float:
    r"""Return bits per held-out byte of a smoothed byte bigram, the baseline without context.

    A byte b after a byte a has probability ``(n(a, b) + s p(b)) / (n(a) + s)``. Counts n are those
    of the training part, and p is its add-one unigram. The strength s is the best power of two on
    the last tenth of the training part with the counts of the other nine tenths. The held-out part
    is evaluated once.

    Args:
        corpus: the text.

    Returns:
        The mean of −log₂ probability over all held-out bytes but the first.

    Examples:
        >>> from pathlib import Path
        >>> letters = "abcdefghijklmnop"
        >>> lines = [f"The {a}{b} is near the {b}{a}. It waits." for a in letters for b in letters]
        >>> _ = Path("text.txt").write_text("\n\n".join(lines))
        >>> corpus = rc.tasks.load_text("text.txt")
        >>> 0 < rc.tasks.bigram_bits_per_byte(corpus) < 8
        True
    """
    train, heldout = corpus.train, corpus.heldout
    cut = train.numel() - train.numel() // 10
    counts, tail = _pair_counts(train[:cut]), _pair_counts(train[cut:])
    best = min(
        (2.0**power for power in range(-4, 13)),
        key=lambda strength: _bits(counts, strength, tail),
    )
    return _bits(_pair_counts(train), best, _pair_counts(heldout))


def batches(
    corpus: TextCorpus, *, length: int, batch: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    r"""Return an endless iterator of training batches: windows with uniformly random offsets.

    Args:
        corpus: the text.
        length: T, the number of bytes that a window predicts.
        batch: B, the number of windows.
        generator: source of the windows' offsets, on the CPU.

    Yields:
        ``(inputs, labels)``, int64 ``[B, T]`` on the CPU; labels are the inputs' next bytes.

    Raises:
        ValueError: at the call, if a window is longer than the training part or a size is below 1.

    Examples:
        >>> from pathlib import Path
        >>> letters = "abcdefghijklmnop"
        >>> lines = [f"The {a}{b} is near the {b}{a}. It waits." for a in letters for b in letters]
        >>> _ = Path("text.txt").write_text("\n\n".join(lines))
        >>> corpus = rc.tasks.load_text("text.txt")
        >>> draw = torch.Generator().manual_seed(0)
        >>> endless = rc.tasks.batches(corpus, length=16, batch=2, generator=draw)
        >>> inputs, labels = next(endless)
        >>> torch.equal(inputs[:, 1:], labels[:, :-1])
        True
    """
    validate("batches: length", int_check(1), length)
    validate("batches: batch", int_check(1), batch)
    num_offsets = corpus.train.numel() - length
    if num_offsets < 1:
        raise ValueError(
            f"batches: a window of {length} needs {length + 1} bytes and the training part has "
            f"{corpus.train.numel()}; shorten the window or give more text"
        )

    def draw() -> Iterator[tuple[Tensor, Tensor]]:
        offsets = torch.arange(length + 1)
        while True:
            starts = torch.randint(num_offsets, (batch, 1), generator=generator)
            window = corpus.train[starts + offsets].long()  # [B, T + 1]
            yield window[:, :-1], window[:, 1:]

    return draw()


def heldout_windows(
    corpus: TextCorpus, *, length: int, batch: int, limit: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    r"""Return windows of the held-out part in order; each byte but the first is one label.

    Args:
        corpus: the text.
        length: T, the number of bytes that a window predicts.
        batch: B, the maximum number of windows in one batch.
        limit: maximum number of labels, evenly spread over the held-out part, for a quick estimate;
            None for all.

    Yields:
        ``(inputs, labels)``, int64 ``[≤ B, T]``. The last window is padded with zeros whose labels
        are ``IGNORE``.

    Raises:
        ValueError: at the call, if a size is below 1.

    Examples:
        >>> from pathlib import Path
        >>> letters = "abcdefghijklmnop"
        >>> lines = [f"The {a}{b} is near the {b}{a}. It waits." for a in letters for b in letters]
        >>> _ = Path("text.txt").write_text("\n\n".join(lines))
        >>> corpus = rc.tasks.load_text("text.txt")
        >>> windows = list(rc.tasks.heldout_windows(corpus, length=16, batch=2))
        >>> num_labels = sum(int((labels != rc.tasks.IGNORE).sum()) for _, labels in windows)
        >>> num_labels == len(corpus.heldout) - 1
        True
    """
    validate("heldout_windows: length", int_check(1), length)
    validate("heldout_windows: batch", int_check(1), batch)
    if limit is not None:
        validate("heldout_windows: limit", int_check(1), limit)
    heldout = corpus.heldout.long()
    count = math.ceil((heldout.numel() - 1) / length)
    fill = count * length - (heldout.numel() - 1)
    inputs = torch.cat([heldout[:-1], heldout.new_zeros(fill)]).view(count, length)
    labels = torch.cat([heldout[1:], heldout.new_full((fill,), IGNORE)]).view(count, length)
    if limit is not None and limit < count * length:
        num_selected = max(1, limit // length)
        selected = torch.arange(num_selected) * count // num_selected
        inputs, labels = inputs[selected], labels[selected]
    return zip(inputs.split(batch), labels.split(batch), strict=True)


def _split(paragraphs: Iterable[str], *, source: str, limit: int | None) -> TextCorpus:
    """Drop repeated paragraphs, stop at ``limit`` bytes, and assign paragraphs by their hash."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    digests: set[bytes] = set()
    size = 0
    for paragraph in paragraphs:
        digest = _digest(paragraph)
        if digest in digests:
            continue
        digests.add(digest)
        data = paragraph.encode("utf-8")
        size += len(data) + len(_SEPARATOR)
        if limit is not None and size > limit:
            break
        fraction = int.from_bytes(digest[:8], "big") / 2**64
        parts[fraction < _HELDOUT_FRACTION].append(data)
    train, heldout = (_SEPARATOR.join(part) for part in parts)
    if len(train) < _MIN_TRAIN or len(heldout) < _MIN_HELDOUT:
        raise ValueError(
            f"load_text: {source} is too short: without repeated paragraphs it has "
            f"{len(train):,} bytes to train on and {len(heldout):,} to hold out, and at least "
            f"{_MIN_TRAIN:,} and {_MIN_HELDOUT:,} are needed; give a longer text"
        )
    return TextCorpus(
        train=_tensor(train),
        heldout=_tensor(heldout),
        sha256=hashlib.sha256(train + b"\0" + heldout).hexdigest(),
        source=source,
    )


def _digest(paragraph: str) -> bytes:
    """Return a digest that ignores case, spacing, punctuation and numbers.

    Documentation repeats paragraphs with such small changes. Without this digest, held-out text
    would resemble training text. A paragraph without letters is hashed unchanged.
    """
    words = re.findall(r"[^\W\d_]+", paragraph.casefold())
    return hashlib.sha256(" ".join(words or paragraph.split()).encode("utf-8")).digest()


def _paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs between empty lines, without spaces at line ends; split long ones."""
    for block in re.split(r"\n(?:[^\S\n]*\n)+", text.replace("\r\n", "\n").replace("\r", "\n")):
        paragraph = "\n".join(line.rstrip() for line in block.splitlines()).strip("\n")
        while len(paragraph) > _MAX_PARAGRAPH:
            # A line end in the second half comes first, then a space, then any character.
            cuts = (paragraph.rfind(c, _MAX_PARAGRAPH // 2, _MAX_PARAGRAPH) for c in "\n ")
            cut = next((cut for cut in cuts if cut >= 0), _MAX_PARAGRAPH)
            yield paragraph[:cut].rstrip()
            paragraph = paragraph[cut:].lstrip("\n")
        if paragraph.strip():
            yield paragraph


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _pair_counts(data: Tensor) -> Tensor:
    """Return counts of pairs of bytes, float64 ``[256, 256]``; rows are the first byte."""
    pairs = data[:-1].long() * 256 + data[1:].long()
    return torch.bincount(pairs, minlength=256 * 256).view(256, 256).double()


def _bits(counts: Tensor, strength: float, target: Tensor) -> float:
    """Return the mean bits of the pairs in ``target`` under a bigram with ``counts``."""
    unigram = counts.sum(0) + 1
    unigram = unigram / unigram.sum()
    probability = (counts + strength * unigram) / (counts.sum(1, keepdim=True) + strength)
    return float(-(target * probability.log2()).sum() / target.sum())
