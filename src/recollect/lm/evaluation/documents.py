"""Documents and scores of the local tasks, which the YAML files in ``local/`` refer to.

lm-eval calls a function for documents with its metadata and the task's ``dataset_kwargs`` together.
The functions read the following and ignore the rest:

- ``context``: tokens of a prompt and of its answer, together;
- ``tokenizer`` (or ``pretrained``): folder of the tokenizer that counts them;
- ``limit``: largest number of documents; ``documents``: number of documents of the task;
- ``text``: file in place of the default text, as for `recollect.tasks.load_text`;
- ``reserve``: tokens of an answer; ``config``: arguments of the generator.

Document i is drawn with seed i, so a smaller limit gives the first of the same documents.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import AutoTokenizer

from recollect.tasks.extraction import ExtractionConfig, extractions
from recollect.tasks.needles import NeedleConfig, needle_prompts
from recollect.tasks.prompts import Prompt, sentences
from recollect.tasks.stories import PEOPLE, PLACES, THINGS, StoryConfig, stories, story_prompts
from recollect.tasks.text import load_text
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

NUM_DOCUMENTS = 100
CONTEXT = 2048
MIN_DOCUMENT_BYTES = 2000  # of the text task, unless the text ends
_FILL_TARGET = 0.97  # fraction of the budget at which a prompt is long enough
_MAX_TRIES = 12
_MAX_TOKEN_BYTES = 64  # average bytes of a token, at most
_GROWTH = 1.5  # if a document is the same at a length so much larger, its text has ended

T = TypeVar("T")

Draw = Callable[[int, torch.Generator], dict[str, Any]]
"""Function that draws a document of at most so many bytes; a ValueError if that is too short."""


@dataclass(frozen=True, kw_only=True)
class _TaskOptions:
    """Arguments from lm-eval's metadata and a task's ``dataset_kwargs``."""

    num_documents: int
    context: int
    reserve: int
    config: dict[str, Any]
    text: str | None
    tokenizer: str | None

    @classmethod
    def parse(cls, kwargs: Mapping[str, Any]) -> _TaskOptions:
        num_documents = kwargs.get("documents", NUM_DOCUMENTS)
        limit = kwargs.get("limit")
        return cls(
            num_documents=num_documents if limit is None else min(num_documents, limit),
            context=kwargs.get("context") or max(kwargs.get("max_seq_lengths") or [CONTEXT]),
            reserve=kwargs.get("reserve", 0),
            config=dict(kwargs.get("config") or {}),
            text=kwargs.get("text"),
            tokenizer=kwargs.get("tokenizer") or kwargs.get("pretrained"),
        )

    @property
    def budget(self) -> int:
        """Tokens of a prompt."""
        return self.context - self.reserve

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, or of bytes without a tokenizer."""
        if self.tokenizer is None:
            return len(text.encode())
        return max(1, len(_load_cached(_load_tokenizer, self.tokenizer)(text)["input_ids"]))

    def error(self, reason: object) -> ValueError:
        return ValueError(
            f"a context of {self.context:,} tokens, of which {self.reserve:,} may be written, is "
            f"too short for this task: {reason}"
        )


def _load_cached(load: Callable[[Any], T], path: str | None) -> T:
    """Return ``load(path)``, which is called again only if a file was modified."""
    place = Path(path).resolve() if path is not None else None
    files = sorted(place.iterdir()) if place is not None and place.is_dir() else [place]
    stats = [(x, x.stat()) for x in files if x is not None and x.exists()]
    return _cached(load, path, tuple((x, stat.st_mtime_ns, stat.st_size) for x, stat in stats))


@functools.lru_cache(maxsize=8)
def _cached(load: Callable[[Any], Any], path: str | None, modified: object) -> Any:
    return load(path)


def _load_haystack(path: str | None) -> tuple[str, ...]:
    return sentences(_load_cached(load_text, path), heldout=True)


def _load_tokenizer(folder: str) -> Any:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _test_split(documents: list[dict[str, Any]]) -> dict[str, datasets.Dataset]:
    import datasets  # takes seconds

    return {"test": datasets.Dataset.from_list(documents)}


# -- prompts that fill a context -------------------------------------------------------------------


def _prompt_task(
    config_type: Callable[..., Any],
    generate: Callable[..., Sequence[Prompt]],  # takes (config, sentences, batch size, generator)
    needs_text: Callable[[Mapping[str, Any]], bool] = lambda config: False,
) -> Callable[..., dict[str, datasets.Dataset]]:
    """Return the function of a task whose documents are prompts with the values of their answer."""

    def documents(**kwargs: Any) -> dict[str, datasets.Dataset]:
        options = _TaskOptions.parse(kwargs)
        has_text = needs_text(options.config)
        haystack = _load_cached(_load_haystack, options.text) if has_text else ()

        def draw(length: int, generator: torch.Generator) -> dict[str, Any]:
            config = config_type(**options.config, length=length)
            (prompt,) = generate(config, haystack, 1, generator)
            return {"input": prompt.text, "outputs": prompt.answer.rstrip(".").split(", ")}

        return _fill_contexts(options, draw, lambda doc: doc["input"])

    return documents


def _common_words_config(*, length: int, **config: Any) -> CommonWordsConfig:
    """Return RULER's 30 times of each common word and 3 of each other, or 10 and 1 if too long."""
    full = CommonWordsConfig(**config, length=length)
    if full.min_length <= length:
        return full
    return CommonWordsConfig(**config | {"often": 10, "seldom": 1}, length=length)


needles = _prompt_task(
    NeedleConfig,
    needle_prompts,
    lambda config: config["name"] != "passkey" and not config.get("distractors"),
)
hidden_stories = _prompt_task(StoryConfig, story_prompts, lambda config: True)
variables = _prompt_task(VariableConfig, lambda config, _, *args: variable_prompts(config, *args))
common_words_task = _prompt_task(
    _common_words_config, lambda config, _, *args: common_words(config, *args)
)
frequent_words_task = _prompt_task(
    FrequentWordsConfig, lambda config, _, *args: frequent_words(config, *args)
)


def fixtures(**kwargs: Any) -> dict[str, datasets.Dataset]:
    """Return documents in the form of real data; ``config`` is of `ExtractionConfig`."""
    options = _TaskOptions.parse(kwargs)

    def draw(length: int, generator: torch.Generator) -> dict[str, Any]:
        (page,) = extractions(ExtractionConfig(**options.config, length=length), 1, generator)
        return {"input": page.text, "question": page.question, "outputs": list(page.answers)}

    def render(doc: Mapping[str, Any]) -> str:
        return f"{doc['input']}\nQuestion: {doc['question']}\nAnswer:"

    return _fill_contexts(options, draw, render)


def _fill_contexts(
    options: _TaskOptions, draw: Draw, render: Callable[[Mapping[str, Any]], str]
) -> dict[str, datasets.Dataset]:
    """Return documents whose rendered prompts fill the context, except for the answer."""
    if options.budget < 1:
        raise options.error("it leaves nothing to read; give a longer one")
    documents: list[dict[str, Any]] = []
    length = options.budget
    for index in range(options.num_documents):
        doc, length = _longest_document(options, draw, render, index, length)
        documents.append(doc)
    return _test_split(documents)


def _longest_document(
    options: _TaskOptions,
    draw: Draw,
    render: Callable[[Mapping[str, Any]], str],
    index: int,
    length: int,  # bytes at which the search begins
) -> tuple[dict[str, Any], int]:
    """Return the longest document whose prompt fits, and its length in bytes.

    Tokens are about proportional to bytes, so a few proportional steps reach the budget. As long as
    no document fits, lengths that are too short for the generator are doubled, and the search
    bisects between them and those that are too long.
    """
    budget = options.budget
    best, best_length = None, 0
    too_short, too_long = 0, 0  # longest length that is refused, shortest that does not fit
    min_tokens = num_tries = num_too_long = 0
    while True:
        num_tries += 1
        proposal = 0
        try:
            doc = draw(length, torch.Generator().manual_seed(index))
        except ValueError as error:
            if best is None and not too_long and length > _MAX_TOKEN_BYTES * budget:
                raise options.error(error) from None
            too_short = max(too_short, length)
        else:
            tokens = options.count_tokens(render(doc))
            proposal = length * budget / tokens
            if tokens > budget:
                min_tokens = min(min_tokens or tokens, tokens)
                too_long = min(too_long or length, length)
                # Texts grow sentence by sentence, so each further step is shorter.
                num_too_long += 1
                proposal *= 1 - 0.02 * num_too_long
            elif doc == best:
                if length >= _GROWTH * best_length:
                    break
            elif length > best_length:
                best, best_length = doc, length
            if budget >= tokens >= _FILL_TARGET * budget:
                break
        if best is not None:
            if int(proposal) in (0, length) or num_tries >= _MAX_TRIES:
                break
        elif not too_long:
            proposal, num_tries = 2 * length, 0
        elif not too_short < int(proposal) < too_long or num_tries >= _MAX_TRIES:
            if too_long - too_short <= 1:
                break
            proposal = (too_short + too_long) // 2
        length = int(proposal)
    if best is None:
        raise options.error(
            f"its shortest prompt has {min_tokens:,} tokens and {budget:,} are left; give one of "
            f"{min_tokens + options.reserve:,} or more"
        )
    return best, best_length


# -- tasks that do not fill a context --------------------------------------------------------------


def short_stories(**kwargs: Any) -> dict[str, datasets.Dataset]:
    """Return stories, each with a question and all its possible answers."""
    options = _TaskOptions.parse(kwargs)
    config = StoryConfig(**options.config)
    documents: list[dict[str, Any]] = []
    for index in range(options.num_documents):
        (story,) = stories(config, 1, torch.Generator().manual_seed(index))
        (choices,) = (words for words in (PEOPLE, PLACES, THINGS) if story.answer in words)
        documents.append(
            {
                "input": f"{' '.join(story.facts)} {story.question} Answer:",
                "choices": list(choices),
                "answer": choices.index(story.answer),
            }
        )
    return _test_split(documents)


def text_chunks(**kwargs: Any) -> dict[str, datasets.Dataset]:
    """Return the held-out part of the local text in chunks of whole paragraphs."""
    options = _TaskOptions.parse(kwargs)
    corpus = _load_cached(load_text, options.text)
    chunks = [""]
    for paragraph in bytes(corpus.heldout.tolist()).decode("utf-8", "replace").split("\n\n"):
        if len(chunks[-1].encode()) >= MIN_DOCUMENT_BYTES:
            chunks.append("")
        chunks[-1] += ("\n\n" if chunks[-1] else "") + paragraph
    return _test_split([{"input": x} for x in chunks[: options.num_documents] if x])


# -- scores ----------------------------------------------------------------------------------------


def string_match(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the fraction of the values that the answer contains, as in RULER."""
    answer, values = results[0].lower(), doc["outputs"]
    return {"string_match": sum(value.lower() in answer for value in values) / len(values)}


def contains(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return 1 if the answer contains one of the values as whole words, in any case, else 0."""
    patterns = (rf"(?<!\w){re.escape(value)}(?!\w)" for value in doc["outputs"])
    has_match = any(re.search(pattern, results[0], re.IGNORECASE) for pattern in patterns)
    return {"contains": float(has_match)}
