"""Cached prompts: states of a model in a file, from which generation continues.

The file holds the tensors of all states as safetensors, and their description as JSON metadata.
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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from recollect.blocks.state import AnyState, state_from_dict
from recollect.lm.model.arguments import check_token_ids
from recollect.lm.model.cache import CACHE_KEY, RecollectCache, cache_of
from recollect.lm.model.checkpoint import CheckpointError, read_tensors
from recollect.report.files import write_atomic
from recollect.serialization import read_json

if TYPE_CHECKING:
    from recollect.lm.model.model import RecollectForCausalLM

__all__ = ["CachedPrompt", "is_prompt_file", "model_fingerprint"]

FORMAT_VERSION = 2
IGNORED_CONFIG_KEYS = (
    *("engine", "use_cache", "loss_chunk_size", "dtype", "architectures", "transformers_version"),
    *("_name_or_path", "auto_map"),
)
"""Fields of a configuration that do not change the states of a model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedPrompt:
    """A prompt and the model's states after all but its last token.

    Args:
        input_ids: token ids ``[B, T]``.
        cache: states after the first ``cache.past_length`` ≤ T columns.
        attention_mask: ``[B, T]``, nonzero at tokens that are not padding; all when omitted.

    Raises:
        ValueError: arguments of different sizes.

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
        batch_size, length = self.input_ids.shape
        if self.cache and self.cache.batch_size != batch_size:
            raise ValueError(
                f"the cache has {self.cache.batch_size} sequences and input_ids has {batch_size}: "
                "the cache of a beam search has one per beam and cannot be continued"
            )
        if self.cache.past_length > length:
            raise ValueError(
                f"the cache has {self.cache.past_length} columns and input_ids has {length}: pass "
                "the text from its beginning"
            )
        mask = self.attention_mask
        if mask is not None and mask.shape != self.input_ids.shape:
            raise ValueError(
                f"attention_mask must have shape {[batch_size, length]}, not {list(mask.shape)}"
            )

    @classmethod
    @torch.no_grad()
    def prefill(
        cls, model: RecollectForCausalLM, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> CachedPrompt:
        """Compute the states after all columns but the last, with which generation begins.

        Args:
            model: the model; its ``generate`` also returns such a cache with
                ``return_dict_in_generate=True``, next to ``sequences``.
            input_ids: ``[B, T]``, padded on the left.
            attention_mask: ``[B, T]``.

        Raises:
            ValueError: a text that ends in padding, or invalid token ids.
        """
        check_token_ids(input_ids)
        if attention_mask is not None and not bool((attention_mask[:, -1] != 0).all()):
            raise ValueError("a prompt is continued at its end: pad it on the left")
        prompt = cls(input_ids=input_ids, cache=RecollectCache(), attention_mask=attention_mask)
        return prompt._process(model) if input_ids.shape[1] > 1 else prompt

    @torch.no_grad()
    def extend(self, model: RecollectForCausalLM, new_ids: Tensor) -> CachedPrompt:
        """Return the prompt with more tokens, and the states after all of them but the last.

        Args:
            model: the model of the cached states.
            new_ids: token ids ``[B, t]``.

        Raises:
            ValueError: another batch size than the prompt's.
        """
        kwargs = self.generate_kwargs(new_ids)
        ids, mask, cache = kwargs["input_ids"], kwargs["attention_mask"], kwargs[CACHE_KEY]
        prompt = CachedPrompt(input_ids=ids, cache=cache, attention_mask=mask)
        return prompt._process(model) if ids.shape[1] - 1 > cache.past_length else prompt

    def _process(self, model: RecollectForCausalLM) -> CachedPrompt:
        """Compute the states after all columns but the last."""
        mask = None if self.attention_mask is None else self.attention_mask[:, :-1]
        ids = self.input_ids[:, self.cache.past_length : -1]
        kwargs = {CACHE_KEY: self.cache, "attention_mask": mask, "use_cache": True}
        return replace(self, cache=cache_of(model(ids, **kwargs, logits_to_keep=1)))

    def generate_kwargs(self, new_ids: Tensor | None = None) -> dict[str, Any]:
        """Return arguments of ``model.generate`` that continue the prompt.

        Args:
            new_ids: more token ids ``[B, t]``; of any batch size for a prompt of one sequence.

        Raises:
            ValueError: another batch size, or no column after the cached states.
        """
        prompt = self
        if new_ids is not None:
            batch_size = self.input_ids.shape[0]
            if new_ids.dim() != 2 or batch_size not in (1, new_ids.shape[0]):
                raise ValueError(
                    f"new_ids must have shape [{batch_size}, t], not {list(new_ids.shape)}"
                )
            if new_ids.shape[0] > batch_size:
                prompt = prompt.repeat(new_ids.shape[0])
        ids, mask = prompt.input_ids, prompt.attention_mask
        mask = torch.ones_like(ids) if mask is None else mask
        if new_ids is not None:
            ids = torch.cat([ids, new_ids.to(ids)], 1)
            mask = torch.cat([mask, torch.ones_like(new_ids).to(mask)], 1)
        if prompt.cache.past_length >= ids.shape[1]:
            raise ValueError(
                f"the cache includes all {ids.shape[1]} columns: give at least one token more"
            )
        return {"input_ids": ids, "attention_mask": mask, CACHE_KEY: prompt.cache}

    def repeat(self, n: int) -> CachedPrompt:
        """Return the prompt with each sequence n times in succession."""
        mask = self.attention_mask
        return replace(
            self,
            input_ids=self.input_ids.repeat_interleave(n, 0),
            cache=self.cache.map(lambda state: state.repeat(n)),
            attention_mask=None if mask is None else mask.repeat_interleave(n, 0),
        )

    def save(self, path: str | os.PathLike[str], model: RecollectForCausalLM) -> Path:
        """Write the prompt to one file. An existing file is kept until the new file is complete.

        Args:
            path: path of the file, usually ``.safetensors``.
            model: model of the cached states, whose configuration and weights are hashed.

        Raises:
            OSError: the folder cannot be written, or the disk is full.
        """
        tensors = {"input_ids": self.input_ids}
        if self.attention_mask is not None:
            tensors["attention_mask"] = self.attention_mask
        for index, state in enumerate(self.cache):
            tensors.update({f"layers.{index}.{n}": x for n, x in state.to_dict().items()})
        # Copies, because safetensors refuses tensors that share memory.
        tensors = {n: x.detach().cpu().contiguous().clone() for n, x in tensors.items()}
        metadata = {
            "format": FORMAT_VERSION,
            "seen": self.cache.past_length,
            "layers": len(self.cache),
            "model": model_fingerprint(model),
            "sha256": _sha256(tensors),
        }
        return write_atomic(path, save(tensors, metadata={"recollect": json.dumps(metadata)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: RecollectForCausalLM) -> CachedPrompt:
        """Load the file of `save` to the model's device.

        Args:
            path: path of the file.
            model: model of the cached states.

        Raises:
            CheckpointError: a file that is cut short, altered, or of another model.
        """
        path = Path(path)
        tensors, file_metadata = read_tensors(path)
        metadata = _parse_metadata(path, file_metadata)
        for part, checksum in model_fingerprint(model).items():
            if metadata["model"].get(part) != checksum:
                raise CheckpointError(
                    f"{path} belongs to another model, which differs in its {part}: its states are "
                    "useless to this model, so prefill the prompt again"
                )
        if metadata["sha256"] != _sha256(tensors):
            raise CheckpointError(
                f"{path} was altered after it was written: prefill the prompt again"
            )
        try:
            tensors = {name: x.to(model.device) for name, x in tensors.items()}
            states: list[AnyState] = []
            for index in range(metadata["layers"]):
                prefix = f"layers.{index}."
                names = [name for name in tensors if name.startswith(prefix)]
                states.append(state_from_dict({n.removeprefix(prefix): tensors[n] for n in names}))
            return cls(
                input_ids=tensors["input_ids"],
                cache=RecollectCache(states, metadata["seen"]),
                attention_mask=tensors.get("attention_mask"),
            )
        except (ValueError, TypeError, RuntimeError, LookupError) as error:
            raise CheckpointError(f"{path} holds no prompt of this model: {error}") from None


def is_prompt_file(path: Path) -> bool:
    """Return whether `CachedPrompt.save` wrote a file."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            return "recollect" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def model_fingerprint(model: RecollectForCausalLM) -> dict[str, str]:
    """Return SHA-256 of a model's configuration and weights, in about a second per gigabyte."""
    config = {n: x for n, x in model.config.to_dict().items() if n not in IGNORED_CONFIG_KEYS}
    text = json.dumps(config, sort_keys=True, default=str)
    return {
        "configuration": hashlib.sha256(text.encode()).hexdigest(),
        "weights": _sha256(model.state_dict()),
    }


def _sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return SHA-256 of names, types, shapes and bytes of tensors."""
    checksum = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        checksum.update(f"{name} {x.dtype} {list(x.shape)}\n".encode())
        # As bytes, because numpy lacks some types.
        raw: Any = x.reshape(-1).view(torch.uint8).numpy()
        checksum.update(raw)
    return checksum.hexdigest()


def _parse_metadata(path: Path, file_metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the metadata that `CachedPrompt.save` writes next to the tensors."""
    try:
        metadata = read_json(file_metadata["recollect"])
        types = {"format": int, "seen": int, "layers": int, "model": dict, "sha256": str}
        if not all(isinstance(metadata[name], type_) for name, type_ in types.items()):
            raise TypeError
    except (KeyError, TypeError, ValueError, RecursionError):
        raise CheckpointError(
            f"{path} is not a saved prompt: write one with CachedPrompt.save (load the file of a "
            "model with from_pretrained)"
        ) from None
    if metadata["format"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {metadata['format']} and this version of recollect reads format "
            f"{FORMAT_VERSION}: prefill the prompt again, or install the version that wrote it"
        )
    return metadata
