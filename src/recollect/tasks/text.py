"""Language modelling over the bytes of a text, and the bigram model that any layer must beat.

Text is cut into paragraphs, repeated paragraphs are dropped, and only then is each remaining one
given to the training or the held-out part by a hash of its own words. So a paragraph's part never
depends on the rest of the text or on a seed, and no held-out paragraph was trained on.
"""

from __future__ import annotations

import hashlib
import math
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from recollect.fields import int_check, validate
from recollect.tasks.documentation import documentation
from recollect.tasks.mqar import IGNORE

_HELDOUT_SHARE = 0.05
_LIMIT = 8_000_000  # bytes of the default text: enough for minutes of training, read in seconds
_LONGEST = 2_000  # characters of a paragraph; a longer one is cut, so that every file has several
_SHORTEST_TRAIN, _SHORTEST_HELDOUT = 4_096, 256  # bytes below which a loss means nothing
_GAP = b"\n\n"


@dataclass(frozen=True, kw_only=True, eq=False)
class TextCorpus:
    """A text in two parts that share no paragraph.

    Args:
        train: bytes to train on, uint8 ``[N]``.
        heldout: bytes to measure on, uint8 ``[M]``.
        sha256: a digest of both parts; equal digests mean equal corpora.
        source: where the text came from, in words.

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
    packages: prose only, at most 8 MB, gathered in a few seconds without importing anything. Its
    bytes depend on the versions of the two, which ``source`` names. With a path, it is the whole
    of that UTF-8 file, line breaks and all; paragraphs are what empty lines set apart, and one of
    more than 2,000 characters is cut at its line ends or spaces.

    About one paragraph in twenty is held out.

    Args:
        path: a text file of one's own, or None for the default text.

    Returns:
        The two parts, their digest and their source.

    Raises:
        FileNotFoundError: if there is no file at ``path``.
        ValueError: if it is a directory, empty, not UTF-8 text, or too short to split.

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
        return _split(documentation(), source=default_source(), limit=_LIMIT)
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


def split_documents(documents: Iterable[str], *, source: str) -> TextCorpus:
    """Split documents into a training and a held-out part, as `load_text` splits a file.

    Args:
        documents: texts.
        source: name of the documents, for messages and reports.

    Raises:
        ValueError: they are too short to split, or hold zero bytes.
    """

    def paragraphs() -> Iterator[str]:
        for text in documents:
            if "\0" in text:
                raise ValueError(
                    f"load_text: {source} holds zero bytes, so it is binary; give a text file"
                )
            yield from _paragraphs(text)

    return _split(paragraphs(), source=source, limit=None)


def default_source() -> str:
    """Where the default text comes from; equal words mean equal texts."""
    return f"documentation of Python {platform.python_version()} and torch {torch.__version__}"


def bigram_bits_per_byte(corpus: TextCorpus) -> float:
    r"""Bits per held-out byte of a smoothed byte bigram: the baseline that knows no context.

    A byte b after a byte a has probability ``(n(a, b) + s p(b)) / (n(a) + s)``, where n counts the
    training part and p is its add-one unigram. The strength s is the power of two that does best on
    the last tenth of the training part when counts come from the rest; the held-out part is looked
    at once.

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
    r"""Endless training batches: windows that begin anywhere, with equal probability.

    Args:
        corpus: the text.
        length: T, the number of bytes that a window predicts.
        batch: B, the number of windows.
        generator: where the windows' places come from (on the CPU).

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
    room = corpus.train.numel() - length
    if room < 1:
        raise ValueError(
            f"batches: a window of {length} needs {length + 1} bytes and the training part has "
            f"{corpus.train.numel()}; shorten the window or give more text"
        )

    def draw() -> Iterator[tuple[Tensor, Tensor]]:
        offsets = torch.arange(length + 1)
        while True:
            starts = torch.randint(room, (batch, 1), generator=generator)
            window = corpus.train[starts + offsets].long()  # [B, T + 1]
            yield window[:, :-1], window[:, 1:]

    return draw()


def heldout_windows(
    corpus: TextCorpus, *, length: int, batch: int, limit: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    r"""The held-out part, once, in order: each of its bytes but the first is a label exactly once.

    Args:
        corpus: the text.
        length: T, the number of bytes that a window predicts.
        batch: B, the most windows in one batch.
        limit: look at no more than this many labels, evenly spread over the held-out part, for a
            quick estimate; None for all.

    Yields:
        ``(inputs, labels)``, int64 ``[≤ B, T]``. The last window is filled up with zeros whose
        labels are ``IGNORE``, so that every window has the same length.

    Raises:
        ValueError: at the call, if a size is below 1.

    Examples:
        >>> from pathlib import Path
        >>> letters = "abcdefghijklmnop"
        >>> lines = [f"The {a}{b} is near the {b}{a}. It waits." for a in letters for b in letters]
        >>> _ = Path("text.txt").write_text("\n\n".join(lines))
        >>> corpus = rc.tasks.load_text("text.txt")
        >>> windows = list(rc.tasks.heldout_windows(corpus, length=16, batch=2))
        >>> asked = sum(int((labels != rc.tasks.IGNORE).sum()) for _, labels in windows)
        >>> asked == len(corpus.heldout) - 1
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
        keep = max(1, limit // length)
        chosen = torch.arange(keep) * count // keep
        inputs, labels = inputs[chosen], labels[chosen]
    return zip(inputs.split(batch), labels.split(batch), strict=True)


def _split(paragraphs: Iterable[str], *, source: str, limit: int | None) -> TextCorpus:
    """Drop repeated paragraphs, stop at ``limit`` bytes, then share out by hash."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    seen: set[bytes] = set()
    size = 0
    for paragraph in paragraphs:
        digest = _digest(paragraph)
        if digest in seen:
            continue
        seen.add(digest)
        data = paragraph.encode("utf-8")
        size += len(data) + len(_GAP)
        if limit is not None and size > limit:
            break
        share = int.from_bytes(digest[:8], "big") / 2**64
        parts[share < _HELDOUT_SHARE].append(data)
    train, heldout = (_GAP.join(part) for part in parts)
    if len(train) < _SHORTEST_TRAIN or len(heldout) < _SHORTEST_HELDOUT:
        raise ValueError(
            f"load_text: {source} is too short: after dropping repeated paragraphs it gives "
            f"{len(train):,} bytes to train on and {len(heldout):,} to hold out, and at least "
            f"{_SHORTEST_TRAIN:,} and {_SHORTEST_HELDOUT:,} are needed; give a longer text"
        )
    return TextCorpus(
        train=_tensor(train),
        heldout=_tensor(heldout),
        sha256=hashlib.sha256(train + b"\0" + heldout).hexdigest(),
        source=source,
    )


def _digest(paragraph: str) -> bytes:
    """The same for paragraphs that differ only in case, spacing, punctuation or numbers.

    Documentation repeats itself with such small changes, and held-out text that is all but known
    would flatter every model. A paragraph without letters is taken as it stands.
    """
    words = re.findall(r"[^\W\d_]+", paragraph.casefold())
    return hashlib.sha256(" ".join(words or paragraph.split()).encode("utf-8")).digest()


def _paragraphs(text: str) -> Iterator[str]:
    """What empty lines set apart, without spaces at line ends, cut where it is too long."""
    for block in re.split(r"\n(?:[^\S\n]*\n)+", text.replace("\r\n", "\n").replace("\r", "\n")):
        paragraph = "\n".join(line.rstrip() for line in block.splitlines()).strip("\n")
        while len(paragraph) > _LONGEST:
            head = paragraph[:_LONGEST]
            # A line end in the second half is the best place, then a space, then anywhere.
            cut = head.rfind("\n", _LONGEST // 2)
            if cut < 0:
                cut = head.rfind(" ", _LONGEST // 2)
            if cut < 0:
                cut = _LONGEST
            yield paragraph[:cut].rstrip()
            paragraph = paragraph[cut:].lstrip("\n")
        if paragraph.strip():
            yield paragraph


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _pair_counts(data: Tensor) -> Tensor:
    """How often each byte follows each other: float64 [256, 256], rows are the first byte."""
    pairs = data[:-1].long() * 256 + data[1:].long()
    return torch.bincount(pairs, minlength=256 * 256).view(256, 256).double()


def _bits(counts: Tensor, strength: float, target: Tensor) -> float:
    """Mean bits of the pairs counted in ``target`` under a bigram fitted to ``counts``."""
    unigram = counts.sum(0) + 1
    unigram = unigram / unigram.sum()
    chance = (counts + strength * unigram) / (counts.sum(1, keepdim=True) + strength)
    return float(-(target * chance.log2()).sum() / target.sum())
