"""Loss and generated text of a model next to its teacher's, on held-out rows.

The loss alone hides differences: a model may predict each token of a text well and lose its thread
when it reads its own output. Both models therefore continue the same prompts greedily.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recollect.lm.model.loss import IGNORE_INDEX

__all__ = ["Continuation", "continuations", "generation_agreement", "heldout_loss"]

MAX_NEW_TOKENS = 64
MIN_DOCUMENT = 4  # tokens
MAX_PROMPTS = 32

Continuation = tuple[Tensor, Tensor]
"""Prompts ``[B, P]`` of one length, and their continuations ``[B, N]``."""


@torch.no_grad()
def heldout_loss(model: Any, batches: Sequence[Mapping[str, Tensor]]) -> float:
    """Return the loss of batches in nats per token; the model is left in evaluation mode."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        num_tokens = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
        inputs = {name: x.to(model.device) for name, x in batch.items()}
        total += float(model(**inputs, use_cache=False).loss) * num_tokens
        count += num_tokens
    return total / max(count, 1)


@torch.no_grad()
def continuations(teacher: Any, batches: Sequence[Mapping[str, Tensor]]) -> list[Continuation]:
    """Return prompts and the teacher's greedy continuations of them.

    A prompt is the first half of a document and one token more. Batches are packed, so that the
    first documents have all lengths.
    """
    documents: list[Tensor] = []
    for batch in batches:
        rows = batch["input_ids"]
        packed = "cu_seqlens" in batch
        documents += rows[0].split(batch["cu_seqlens"].diff().tolist()) if packed else rows
    prompts: dict[tuple[int, int], list[Tensor]] = {}
    for ids in [ids for ids in documents if len(ids) >= MIN_DOCUMENT][:MAX_PROMPTS]:
        start = len(ids) // 2 + 1
        size = min(len(ids) - start, MAX_NEW_TOKENS)
        prompts.setdefault((start, size), []).append(ids[:start])
    result = []
    for (_, size), group in prompts.items():
        prompt = torch.stack(group).to(teacher.device)
        result.append((prompt, _generate(teacher, prompt, size)))
    return result


@torch.no_grad()
def generation_agreement(model: Any, references: Sequence[Continuation]) -> float:
    """Return the mean fraction of a continuation that comes before its first other token."""
    shares = []
    for prompt, expected in references:
        ids = _generate(model, prompt.to(model.device), expected.shape[1])
        equal = (ids == expected.to(ids.device)).long().cumprod(1)
        shares.append(equal.double().mean(1).cpu())
    return float(torch.cat(shares).mean()) if shares else float("nan")


def _generate(model: Any, prompt: Tensor, size: int) -> Tensor:
    """Return exactly ``size`` greedy tokens after each prompt."""
    model.eval()
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=size,
        min_new_tokens=size,
        pad_token_id=0,
    )
    return output[:, prompt.shape[1] :]
