"""Questions of a new user have an answer within two links of the first page."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"

ANSWERS = {
    "What is this, in one sentence?": "index.md",
    "Where do I get it, and where do I report a fault?": "install.md",
    "How do I install it, with which extras?": "install.md",
    "What is the shortest program that works?": "index.md#five-minutes",
    "Which four papers?": "concepts.md#papers",
    "Which layer should I try first?": "choose.md",
    "Is RetNet there, and is it exact?": "zoo.md#the-families",
    "What do η, α, θ, W°, φ mean?": "explain.md#the-blocks",
    "What is the difference between a gate, a param and a constant?": (
        "recipe.md#constants-gates-and-params"
    ),
    "Which shapes and dtypes go in?": "recall.md",
    "How do I handle padding and packed documents?": "recall.md#padding-and-packed-documents",
    "How do I use a layer in my own model and loop?": "layer.md#in-a-model-of-your-own",
    "How do I train on my text?": "tutorials/train.md",
    "How do I resume or extend a run?": "resume.md#more-steps",
    "How do I generate text?": "language-models.md#generating",
    "Can I load published weights?": "adopt.md#models",
    "Can I put a layer into my Llama?": "tutorials/swap.md",
    "Does it run on my GPU, and how fast?": "gpu.md#measurements",
    "How do I use bfloat16?": "gpu.md#precision",
    "Does torch.compile work?": "explain.md#one-graph",
    "My loss is NaN. Why?": "troubleshooting.md#the-loss-or-an-output-is-nan",
    "It is slow, or out of memory. What now?": "troubleshooting.md#it-is-slow",
    "How do I write my own loss?": "testing.md",
    "How fast is it next to attention, flash-linear-attention, titans-pytorch?": (
        "comparison-with-others.md#speed-on-a-cpu"
    ),
    "How do I cite it, and under which licence?": "index.md#where-to-go-next",
}


def _links(name: str) -> set[str]:
    """Return the pages that a page links, by their path in the folder of pages."""
    links = re.findall(r"\]\(([\w/.-]+\.md)(?:#[\w-]+)?\)", (DOCS / name).read_text("utf-8"))
    return {posixpath.normpath(posixpath.join(posixpath.dirname(name), link)) for link in links}


def _anchors(name: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", (DOCS / name).read_text("utf-8"), re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


@pytest.mark.parametrize("question", ANSWERS)
def test_an_answer_is_within_two_links(question: str) -> None:
    page, _, anchor = ANSWERS[question].partition("#")
    first = {"index.md"} | _links("index.md")
    second = set().union(*(_links(name) for name in first if (DOCS / name).is_file()))
    assert page in first | second
    assert not anchor or anchor in _anchors(page)
