"""Documents and scores of the local tasks, as the YAML files in ``local/`` name them.

lm-eval calls a function of documents with its metadata and the task's ``dataset_kwargs`` together,
so each takes what it knows from a mapping and leaves the rest. What it knows:

- ``context``: tokens of a prompt and of what is written after it, together;
- ``tokenizer`` (or ``pretrained``): a folder, whose tokenizer counts them;
- ``limit``: how many documents at most; ``documents``: how many the task has;
- ``text``: a file in place of the default text, as for `recollect.tasks.load_text`;
- ``reserve``: tokens that may be written; ``config``: arguments of the generator.

Document i is drawn by a generator of its own, so a smaller limit gives the first of the same
documents.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer

from recollect.tasks.extraction import ExtractionConfig, extractions
from recollect.tasks.needles import NeedleConfig, needle_prompts
from recollect.tasks.prompts import Prompt, sentences
from recollect.tasks.stories import PEOPLE, PLACES, THINGS, StoryConfig, stories, story_prompts
from recollect.tasks.text import TextCorpus, load_text
from recollect.tasks.tracking import (
    CommonWordsConfig,
    FrequentWordsConfig,
    VariableConfig,
    common_words,
    frequent_words,
    variable_prompts,
)

if TYPE_CHECKING:
    import datasets

__all__ = ["local_text"]

DOCUMENTS = 100
CONTEXT = 2048
PIECE = 2000  # bytes of a document of the text task, at least, where the text goes on
_CLOSE = 0.97  # of the room; a prompt that fills so much of it is long enough
_TRIES = 12
_LONGEST_TOKEN = 64  # bytes that a token has on average, at most
_GROWN = 1.5  # times the length; a document that is the same at so much more has reached its end

Draw = Callable[[int, torch.Generator], Prompt]
"""A prompt of at most so many bytes."""


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What lm-eval handed over, sorted."""

    count: int
    context: int
    reserve: int
    config: dict[str, Any]
    text: str | None
    tokenizer: str | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Given:
        lengths = given.get("max_seq_lengths") or [CONTEXT]
        count = given.get("documents", DOCUMENTS)
        limit = given.get("limit")
        return cls(
            count=count if limit is None else min(count, limit),
            context=given.get("context") or max(lengths),
            reserve=given.get("reserve", 0),
            config=dict(given.get("config") or {}),
            text=given.get("text"),
            tokenizer=given.get("tokenizer") or given.get("pretrained"),
        )


_Stamp = tuple[tuple[str, int, int], ...]  # path, when it was written, bytes: of every file


def _stamp(path: str | None) -> _Stamp:
    """What tells a file, or a folder's files, from what stood there before."""
    if path is None or not Path(path).exists():
        return ()
    place = Path(path).resolve()
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    known = [(str(file), file.stat()) for file in files]
    return tuple((name, about.st_mtime_ns, about.st_size) for name, about in known)


def local_text(path: str | None) -> TextCorpus:
    """The text of local tasks, read once for as long as its file is not written anew.

    Args:
        path: a file, or ``None`` for the documentation inside Python and torch.
    """
    return _local_text(path, _stamp(path))


@functools.lru_cache(maxsize=4)
def _local_text(path: str | None, stamp: _Stamp) -> TextCorpus:
    return load_text(path)


def _hay(path: str | None) -> tuple[str, ...]:
    return _sentences(path, _stamp(path))


@functools.lru_cache(maxsize=4)
def _sentences(path: str | None, stamp: _Stamp) -> tuple[str, ...]:
    return sentences(_local_text(path, stamp), heldout=True)


def _tokenizer(folder: str) -> Any:
    return _loaded(folder, _stamp(folder))


@functools.lru_cache(maxsize=4)
def _loaded(folder: str, stamp: _Stamp) -> Any:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


# -- prompts that fill a context -------------------------------------------------------------------


def _as_test(found: list[dict[str, Any]]) -> dict[str, datasets.Dataset]:
    import datasets  # seconds, and nobody who trains a model needs it

    return {"test": datasets.Dataset.from_list(found)}


def needles(**given: Any) -> dict[str, datasets.Dataset]:
    """Documents of the needle tasks; ``config`` is of `NeedleConfig`."""
    one = _Given.of(given)
    hay = () if one.config["name"] == "passkey" or one.config.get("distractors") else _hay(one.text)

    def draw(length: int, generator: torch.Generator) -> Prompt:
        return needle_prompts(NeedleConfig(**one.config, length=length), hay, 1, generator)[0]

    return _prompts(one, draw)


def variables(**given: Any) -> dict[str, datasets.Dataset]:
    """Documents of variable tracking; ``config`` is of `VariableConfig`."""
    one = _Given.of(given)

    def draw(length: int, generator: torch.Generator) -> Prompt:
        return variable_prompts(VariableConfig(**one.config, length=length), 1, generator)[0]

    return _prompts(one, draw)


def common(**given: Any) -> dict[str, datasets.Dataset]:
    """Documents of common words; ``config`` is of `CommonWordsConfig`.

    Where RULER's 30 times of each common word and 3 of each other do not fit, it is 10 and 1.
    """
    one = _Given.of(given)

    def draw(length: int, generator: torch.Generator) -> Prompt:
        config = CommonWordsConfig(**one.config, length=length)
        if config.least > length:
            config = CommonWordsConfig(**{**one.config, "often": 10, "seldom": 1}, length=length)
        return common_words(config, 1, generator)[0]

    return _prompts(one, draw)


def frequent(**given: Any) -> dict[str, datasets.Dataset]:
    """Documents of frequent words; ``config`` is of `FrequentWordsConfig`."""
    one = _Given.of(given)

    def draw(length: int, generator: torch.Generator) -> Prompt:
        return frequent_words(FrequentWordsConfig(**one.config, length=length), 1, generator)[0]

    return _prompts(one, draw)


def hidden_stories(**given: Any) -> dict[str, datasets.Dataset]:
    """Documents of stories in long text; ``config`` is of `StoryConfig`."""
    one = _Given.of(given)

    def draw(length: int, generator: torch.Generator) -> Prompt:
        config = StoryConfig(**one.config, length=length)
        return story_prompts(config, _hay(one.text), 1, generator)[0]

    return _prompts(one, draw)


def fixtures(**given: Any) -> dict[str, datasets.Dataset]:
    """Documents in the shape of real data; ``config`` is of `ExtractionConfig`."""
    one = _Given.of(given)

    def draw(length: int, generator: torch.Generator) -> dict[str, Any]:
        (made,) = extractions(ExtractionConfig(**one.config, length=length), 1, generator)
        return {"input": made.text, "question": made.question, "outputs": list(made.answers)}

    def size(doc: Mapping[str, Any]) -> str:
        return f"{doc['input']}\nQuestion: {doc['question']}\nAnswer:"

    return _fitted(one, draw, size)


def _prompts(one: _Given, draw: Draw) -> dict[str, datasets.Dataset]:
    """Prompts as documents: the text, and what the answer names."""

    def document(length: int, generator: torch.Generator) -> dict[str, Any]:
        prompt = draw(length, generator)
        return {"input": prompt.text, "outputs": prompt.answer.rstrip(".").split(", ")}

    return _fitted(one, document, lambda doc: doc["input"])


def _fitted(
    one: _Given,
    draw: Callable[[int, torch.Generator], dict[str, Any]],
    size: Callable[[Mapping[str, Any]], str],
) -> dict[str, datasets.Dataset]:
    """Documents whose prompts fill what the context leaves, but for the tokens to be written.

    Args:
        one: what was asked for.
        draw: a document of at most so many bytes.
        size: its whole prompt.
    """
    room = one.context - one.reserve
    if room < 1:
        raise ValueError(f"{_short(one)}: it leaves nothing to read; give a longer one")
    found: list[dict[str, Any]] = []
    length = room
    for index in range(one.count):
        doc, length = _fit(one, draw, size, index, length, room)
        found.append(doc)
    return _as_test(found)


def _fit(
    one: _Given,
    draw: Callable[[int, torch.Generator], dict[str, Any]],
    size: Callable[[Mapping[str, Any]], str],
    index: int,
    length: int,
    room: int,
) -> tuple[dict[str, Any], int]:
    """One document, and the length in bytes with which the search for it ended.

    Tokens of a text are about proportional to its bytes, so a few proportional steps reach a length
    whose tokens fit; the longest that fitted is taken. A generator refuses lengths that hold too
    little; those are doubled, and between a length that was refused and one that is too long the
    search goes on by halves, so that no context is refused in which a prompt fits.

    Raises:
        ValueError: the shortest prompt that can be drawn does not fit.
    """
    best: tuple[dict[str, Any], int] | None = None
    refused, least = 0, 0  # the longest length that was refused; tokens of the shortest prompt
    high: int | None = None  # the shortest length that was too long
    over = tries = 0
    while tries < _TRIES or (best is None and high is not None and high - refused > 1):
        tries += 1
        try:
            doc = draw(length, torch.Generator().manual_seed(index))
        except ValueError as error:
            if best is not None:
                return best
            refused = max(refused, length)
            if high is not None:
                if high - refused <= 1:
                    break
                length = (refused + high) // 2
                continue
            if length > _LONGEST_TOKEN * room:
                raise ValueError(f"{_short(one)}: {error}") from None
            length, tries = 2 * length, 0
            continue
        tokens = _tokens(one, size(doc))
        if tokens <= room:
            if best is not None and doc == best[0] and length >= _GROWN * best[1]:
                return best  # its text has an end, and longer ones are the same
            if best is None or (length > best[1] and doc != best[0]):
                best = doc, length
            if tokens >= _CLOSE * room:
                return best
        else:
            least = tokens if high is None else min(least, tokens)
            high = length if high is None else min(high, length)
            over += 1
        # Texts grow sentence by sentence, so what is a little too long is shortened by ever more.
        share = 1.0 if tokens <= room else 1.0 - 0.02 * over
        proposed = int(length * room / tokens * share)
        if best is None and high is not None and (proposed <= refused or tries >= _TRIES):
            proposed = (refused + high) // 2
        if proposed == length:
            break
        length = proposed
    if best is None:
        raise ValueError(
            f"{_short(one)}: its shortest prompt has {least:,} tokens and {room:,} are left; give "
            f"one of {least + one.reserve:,} or more"
        )
    return best


def _short(one: _Given) -> str:
    return (
        f"a context of {one.context:,} tokens, of which {one.reserve:,} may be written, is too "
        "short for this task"
    )


def _tokens(one: _Given, text: str) -> int:
    """Tokens of a text; bytes where there is no tokenizer to count them."""
    if one.tokenizer is None:
        return len(text.encode())
    return max(1, len(_tokenizer(one.tokenizer)(text)["input_ids"]))


# -- tasks that do not fill a context --------------------------------------------------------------


def short_stories(**given: Any) -> dict[str, datasets.Dataset]:
    """Stories alone, each with a question and all that could answer it."""
    one = _Given.of(given)
    config = StoryConfig(**one.config)
    found: list[dict[str, Any]] = []
    for index in range(one.count):
        (story,) = stories(config, 1, torch.Generator().manual_seed(index))
        (choices,) = (kind for kind in (PEOPLE, PLACES, THINGS) if story.answer in kind)
        found.append(
            {
                "input": f"{' '.join(story.facts)} {story.question} Answer:",
                "choices": list(choices),
                "answer": choices.index(story.answer),
            }
        )
    return _as_test(found)


def pieces(**given: Any) -> dict[str, datasets.Dataset]:
    """The held-out part of the local text, in pieces of whole paragraphs."""
    one = _Given.of(given)
    text = bytes(local_text(one.text).heldout.tolist()).decode("utf-8", "replace")
    found: list[str] = [""]
    for paragraph in text.split("\n\n"):
        if len(found[-1].encode()) >= PIECE:
            found.append("")
        found[-1] += ("\n\n" if found[-1] else "") + paragraph
    return _as_test([{"input": x} for x in found[: one.count] if x])


# -- scores ----------------------------------------------------------------------------------------


def string_match(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The share of what is asked for that stands in what was written, as RULER has it."""
    said = results[0].lower()
    asked = doc["outputs"]
    return {"string_match": sum(one.lower() in said for one in asked) / len(asked)}


def contains(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether one of the answers stands in what was written: whole words, letters of any case."""
    whole = (rf"(?<!\w){re.escape(one)}(?!\w)" for one in doc["outputs"])
    found = any(re.search(pattern, results[0], re.IGNORECASE) for pattern in whole)
    return {"contains": float(found)}
