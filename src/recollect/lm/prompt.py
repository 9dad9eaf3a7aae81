"""Cached prompts: states on disk, from which generation resumes.

One file, written under its name only when it is whole: the tensors of all states as safetensors,
and beside them, as JSON in the same file's metadata, what they belong to. Reading one runs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor

from recollect.blocks.state import state_from_dict
from recollect.lm.model.arguments import check_token_ids
from recollect.lm.model.cache import CACHE, RecollectCache, cache_of
from recollect.lm.model.checkpoint import CheckpointError, read_tensors
from recollect.report.files import write_atomic
from recollect.serialization import read_json

if TYPE_CHECKING:
    from recollect.lm.model.model import RecollectForCausalLM

__all__ = ["CachedPrompt", "fingerprint"]

FORMAT = 2
WRITER = "memory.recipe_id"
"""The end of the names of who wrote a memory."""
# What says how a model runs or is saved, not what it computes.
SILENT = (
    *("engine", "use_cache", "loss_chunk_size", "dtype", "architectures", "transformers_version"),
    *("_name_or_path", "auto_map"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedPrompt:
    """A prompt and the model's states after all but its last token.

    Args:
        input_ids: tokens ``[B, T]``.
        cache: of the first ``cache.seen`` ≤ T columns.
        attention_mask: ``[B, T]``, nonzero at real tokens; all are, when omitted.

    Raises:
        ValueError: parts that do not fit together.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> model = rc.lm.RecollectForCausalLM(config).eval()
        >>> prompt = rc.lm.CachedPrompt.prefill(model, torch.tensor([[1, 2, 3]]))
        >>> question = torch.tensor([[4, 5]])
        >>> kwargs = prompt.generate_kwargs(question)
        >>> model.generate(**kwargs, max_new_tokens=2, do_sample=False).shape
        torch.Size([1, 7])
        >>> _ = prompt.save("prompt.safetensors", model)
        >>> rc.lm.CachedPrompt.load("prompt.safetensors", model).input_ids
        tensor([[1, 2, 3]])
    """

    input_ids: Tensor
    cache: RecollectCache
    attention_mask: Tensor | None = None

    def __post_init__(self) -> None:
        check_token_ids(self.input_ids)
        rows, columns = self.input_ids.shape
        if self.cache and self.cache.rows != rows:
            raise ValueError(
                f"the cache has {self.cache.rows} rows and the text {rows}: that of a beam search "
                "has a row per beam and cannot be continued, so read its text anew"
            )
        if self.cache.seen > columns:
            raise ValueError(
                f"the cache has seen {self.cache.seen} columns and the text has {columns}: give "
                "the text from its beginning"
            )
        mask = self.attention_mask
        if mask is not None and mask.shape != self.input_ids.shape:
            raise ValueError(
                f"attention_mask must have shape {[rows, columns]}, not {list(mask.shape)}"
            )

    @classmethod
    @torch.no_grad()
    def prefill(
        cls, model: RecollectForCausalLM, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> CachedPrompt:
        """Read all columns but the last, with which generation begins.

        Args:
            model: the reader; ``generate`` itself returns such a cache with
                ``return_dict_in_generate=True``, beside ``sequences``.
            input_ids: ``[B, T]``, padded on the left.
            attention_mask: ``[B, T]``.

        Raises:
            ValueError: a text that ends in padding; ids that are no tokens.
        """
        check_token_ids(input_ids)
        if attention_mask is not None and not bool((attention_mask[:, -1] != 0).all()):
            raise ValueError("a prompt is continued at its end: pad it on the left")
        cache = RecollectCache()
        if input_ids.shape[1] > 1:
            mask = None if attention_mask is None else attention_mask[:, :-1]
            out = model(input_ids[:, :-1], attention_mask=mask, use_cache=True, logits_to_keep=1)
            cache = cache_of(out)
        return cls(input_ids=input_ids, cache=cache, attention_mask=attention_mask)

    @torch.no_grad()
    def extend(self, model: RecollectForCausalLM, more: Tensor) -> CachedPrompt:
        """This text and ``more [B, t]`` after it, read but for the last column.

        Args:
            model: which reads; the one that read this text.
            more: token ids ``[B, t]``.

        Raises:
            ValueError: rows that are not this text's.
        """
        inputs = self.generate_kwargs(more)
        ids, mask, seen = inputs["input_ids"], inputs["attention_mask"], self.cache.seen
        cache = inputs[CACHE]
        if ids.shape[1] - 1 > seen:
            fresh = {"attention_mask": mask[:, :-1], "use_cache": True, "logits_to_keep": 1}
            out = model(ids[:, seen:-1], cache=cache, **fresh)
            cache = cache_of(out)
        return CachedPrompt(input_ids=ids, cache=cache, attention_mask=mask)

    def generate_kwargs(self, more: Tensor | None = None) -> dict[str, Any]:
        """What ``model.generate`` takes to go on, after ``more [B, t]`` tokens.

        A prompt of one row takes ``more`` of any number of rows.

        Raises:
            ValueError: other rows, or nothing left to read.
        """
        prompt = self
        if more is not None:
            if more.dim() != 2 or self.input_ids.shape[0] not in (1, more.shape[0]):
                raise ValueError(
                    f"more must have shape [{self.input_ids.shape[0]}, t], not {list(more.shape)}"
                )
            if more.shape[0] > self.input_ids.shape[0]:
                prompt = prompt.repeat(more.shape[0])
        ids, mask = prompt.input_ids, prompt.attention_mask
        mask = torch.ones_like(ids) if mask is None else mask
        if more is not None:
            ids = torch.cat([ids, more.to(ids)], 1)
            mask = torch.cat([mask, torch.ones_like(more).to(mask)], 1)
        if prompt.cache.seen >= ids.shape[1]:
            raise ValueError(
                f"the model has read all {ids.shape[1]} columns: give at least one token more"
            )
        return {"input_ids": ids, "attention_mask": mask, CACHE: prompt.cache}

    def repeat(self, n: int) -> CachedPrompt:
        """Each row n times in a row."""
        mask = self.attention_mask
        return replace(
            self,
            input_ids=self.input_ids.repeat_interleave(n, 0),
            cache=self.cache.map(lambda state: state.repeat(n)),
            attention_mask=None if mask is None else mask.repeat_interleave(n, 0),
        )

    def save(self, path: str | os.PathLike[str], model: RecollectForCausalLM) -> Path:
        """Write it to one file; the old file stays until the new one is whole.

        Args:
            path: where to, customarily ``.safetensors``.
            model: that read it; `load` takes no other. All of its weights are hashed.

        Raises:
            OSError: the folder cannot be written, or the disk is full.
        """
        tensors = {"input_ids": self.input_ids}
        if self.attention_mask is not None:
            tensors["attention_mask"] = self.attention_mask
        for index, state in enumerate(self.cache):
            tensors.update({f"layers.{index}.{n}": x for n, x in state.to_dict().items()})
        # Copies, because one tensor may be another's view, which the format does not know.
        tensors = {n: x.detach().cpu().contiguous().clone() for n, x in tensors.items()}
        written = {
            "format": FORMAT,
            "seen": self.cache.seen,
            "layers": len(self.cache),
            "model": fingerprint(model),
            "sha256": _digest(tensors),
        }
        return write_atomic(path, save(tensors, metadata={"recollect": json.dumps(written)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: RecollectForCausalLM) -> CachedPrompt:
        """Read what `save` wrote, onto the model's device.

        Args:
            path: a file that `save` wrote.
            model: the model that read the text.

        Raises:
            CheckpointError: a file that is cut short, altered, or of another model.
        """
        path = Path(path)
        tensors, metadata = read_tensors(path)
        written = _metadata(path, metadata)
        for part, digest in fingerprint(model).items():
            if written["model"].get(part) != digest:
                raise CheckpointError(
                    f"{path} was read by another model, which differs in its {part}, and a state "
                    "means nothing to other weights; read the prompt anew"
                )
        if written["sha256"] != _digest(tensors):
            raise CheckpointError(f"{path} was altered after it was written: read the prompt anew")
        ids, mask = tensors.pop("input_ids", None), tensors.pop("attention_mask", None)
        try:
            states = [
                state_from_dict(_under(f"layers.{index}.", tensors))
                for index in range(written["layers"])
            ]
            if ids is None or len(tensors) != sum(len(state.to_dict()) for state in states):
                raise ValueError("tensors that no layer of this model has")
            cache = RecollectCache(states, written["seen"])
            _check_states(cache, model)
            prompt = cls(input_ids=ids, cache=cache, attention_mask=mask)
        except (ValueError, TypeError, RuntimeError, LookupError) as error:
            raise CheckpointError(f"{path} holds no prompt of this model: {error}") from None
        return prompt._to(model.device)

    def _to(self, device: torch.device) -> CachedPrompt:
        mask = self.attention_mask
        return CachedPrompt(
            input_ids=self.input_ids.to(device),
            cache=self.cache.map(lambda state: state.to(device=device)),
            attention_mask=None if mask is None else mask.to(device),
        )


def fingerprint(model: RecollectForCausalLM) -> dict[str, str]:
    """SHA-256 of what a model computes with: its configuration, and its weights as they are now.

    Cost: one pass over the weights, about a second per gigabyte.
    """
    settings = {n: x for n, x in model.config.to_dict().items() if n not in SILENT}
    plain = json.dumps(settings, sort_keys=True, default=str).encode()
    return {
        "configuration": hashlib.sha256(plain).hexdigest(),
        "weights": _digest(model.state_dict()),
    }


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {x.dtype} {list(x.shape)}\n".encode())
        # Not every element type has a counterpart in numpy, and every one has bytes.
        raw: Any = x.reshape(-1).view(torch.uint8).numpy()
        total.update(raw)
    return total.hexdigest()


def _metadata(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the metadata that `CachedPrompt.save` writes next to the tensors."""
    try:
        written = read_json(metadata["recollect"])
        kinds = {"format": int, "seen": int, "layers": int, "model": dict, "sha256": str}
        if not all(isinstance(written[name], kind) for name, kind in kinds.items()):
            raise TypeError
    except (KeyError, TypeError, ValueError, RecursionError):
        raise CheckpointError(
            f"{path} is no saved prompt: write one with CachedPrompt.save (a model's own file is "
            "loaded with from_pretrained)"
        ) from None
    if written["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {written['format']} and this version of recollect reads format "
            f"{FORMAT}: read the prompt again, or install the version that wrote it"
        )
    return written


def _under(head: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(head) :]: x for name, x in tensors.items() if name.startswith(head)}


def _check_states(cache: RecollectCache, model: RecollectForCausalLM) -> None:
    """That states have the tensors, types and shapes that this model's have.

    Sizes in which the states of one text and of a longer one differ are free: they grow.
    """
    if not cache:
        return
    rows, wanted = cache.rows, len(model.model.blocks)
    if len(cache) != wanted:
        raise ValueError(f"{len(cache)} layers, and the model has {wanted}")
    ids = torch.zeros(1, 3, dtype=torch.long, device=model.device)
    with torch.no_grad():  # a segment may begin anew between two lengths, not between all three
        made = [cache_of(model.model(ids[:, :n], use_cache=True)) for n in (1, 2, 3)]
    for index, (state, *layer) in enumerate(zip(cache, *made, strict=True)):
        parts, (one, two, three) = state.to_dict(), (after.to_dict() for after in layer)
        for name in [name for name in three if name.endswith(WRITER)]:
            if name not in parts:  # saved before states knew who wrote them
                three.pop(name)
            elif not torch.equal(parts[name].cpu(), three[name].cpu()):
                raise ValueError(f"the memory of layer {index} was written by another recipe")
        if set(parts) != set(three):
            odd = sorted(set(parts) ^ set(three))[0]
            raise ValueError(f"{odd!r} of layer {index} is missing or too many")
        for name, x in parts.items():
            if name.endswith(WRITER):
                continue
            shapes = (one[name].shape, two[name].shape, three[name].shape)
            free = [len(set(sizes)) > 1 for sizes in zip(*shapes, strict=True)]
            shape = [
                n if f else m for m, n, f in zip(three[name].shape, x.shape, free, strict=True)
            ]
            if not name.endswith(("memory.sizes", "clock", "prefix")):
                shape[:1] = [rows]
            if x.dtype != three[name].dtype or list(x.shape) != shape:
                raise ValueError(
                    f"{name!r} of layer {index} is {x.dtype} of shape {list(x.shape)}, and the "
                    f"model's is {three[name].dtype} of shape {shape}"
                )
