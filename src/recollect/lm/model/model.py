"""The model: Llama's backbone with memory layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
)
from transformers.utils.generic import can_return_tuple

from recollect.blocks.builder import build
from recollect.blocks.mixers import Mixer
from recollect.blocks.routed import Router, record_routing
from recollect.choices.runtime import seeded_generators
from recollect.layer.block import Block, ZeroCenteredRMSNorm
from recollect.layer.gates import share_depth_floors
from recollect.layer.recorded_call import RecordedCall
from recollect.lm.model.arguments import (
    ForwardKwargs,
    check_token_ids,
    embed_tokens,
    resolve_cu_seqlens,
)
from recollect.lm.model.cache import CACHE_KEY, RecollectCache, cache_of, resolve_cache
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.loss import IGNORE_INDEX, next_token_loss, next_token_targets
from recollect.lm.model.pretrained import RecollectPreTrainedModel
from recollect.messages import renamed_arguments

__all__ = ["RecollectForCausalLM", "RecollectModel"]


class RecollectModel(RecollectPreTrainedModel):
    """Embedding, blocks and a last norm.

    Raises:
        RecipeError: sizes do not fit a recipe.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes("gla", vocab_size=32, hidden_size=16)
        >>> model = rc.lm.RecollectModel(config)
        >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 16])
    """

    _ignore_unexpected = ("lm_head.", "score.")

    def __init__(self, config: RecollectConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.blocks = nn.ModuleList(
            Block(
                _build_layer(config, mixer, index),
                config.intermediate_size if has_mlp else None,
                eps=config.rms_norm_eps,
                zero_centered=config.zero_centered_norms,
            )
            for index, (mixer, has_mlp) in enumerate(config.layer_specs)
        )
        self.decay_floors = share_depth_floors(self.blocks)
        norm = ZeroCenteredRMSNorm if config.zero_centered_norms else nn.RMSNorm
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: RecollectCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        past_key_values: RecollectCache | None = None,
        **kwargs: Unpack[ForwardKwargs],
    ) -> BaseModelOutputWithPast:
        """Return the hidden states after the last norm.

        Args:
            input_ids: tokens ``[B, T]``, int64; either these or ``inputs_embeds``.
            attention_mask: ``[B, T]``, or ``[B, past + T]`` with the tokens of the cache. It is
                nonzero at valid tokens, which padding on either side does not affect.
            cache: cache of an earlier call, to continue from.
            inputs_embeds: vectors ``[B, T, hidden_size]`` in place of ``input_ids``.
            use_cache: whether to return a cache; by default that of the configuration outside of
                training, and not during training.
            cu_seqlens: boundaries ``[N + 1]`` of N documents packed in one row or in the flattened
                batch, which returns no cache.
            output_hidden_states: whether to return the inputs of all blocks.
            past_key_values: name of ``cache`` before transformers 5.24.
            kwargs: other arguments of transformers, see `ForwardKwargs`.

        Raises:
            ValueError: inputs contradict each other, or a memory does not support them.
            TypeError: an unknown argument.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, and not both")
        if inputs_embeds is None:
            assert input_ids is not None
            x = embed_tokens(self.embed_tokens, input_ids)
        else:
            x = inputs_embeds
        B, T = x.shape[:2]
        cache = resolve_cache(cache, past_key_values)
        _check_cache(cache, len(self.blocks))
        states = cache.states if cache else (None,) * len(self.blocks)
        past_length = _past_length(cache)
        cu_seqlens = resolve_cu_seqlens(
            *(kwargs, (B, T)), past_length=past_length, mask=attention_mask, cu_seqlens=cu_seqlens
        )
        mask = _new_token_mask(attention_mask, x, past_length)
        is_packed_batch = cu_seqlens is not None and B > 1
        if is_packed_batch:
            assert cu_seqlens is not None
            _check_packed_batch(cu_seqlens, mask, B, T)
            if use_cache or past_length:
                raise ValueError(
                    "documents packed in several rows have no cache to continue from: pass "
                    "use_cache=False and no cache, or one row"
                )
            x = x.reshape(1, B * T, -1)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not is_packed_batch
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden, new_states = [], []
        is_recorded = use_cache and cache is not None and cache.is_croppable and cu_seqlens is None
        calls: list[RecordedCall] | None = [] if is_recorded else None
        for block, state in zip(self.blocks, states, strict=True):
            hidden.append(x)
            if self.gradient_checkpointing and self.training:
                x, new_state = self._gradient_checkpointing_func(
                    *(block.__call__, x, state, mask, cu_seqlens),
                    output_final_state=use_cache,
                    calls=calls,
                )
            else:
                x, new_state = block(
                    x, state, mask, cu_seqlens, output_final_state=use_cache, calls=calls
                )
            new_states.append(new_state)
        x = self.norm(x)
        if is_packed_batch:
            x, hidden = x.view(B, T, -1), [y.view(B, T, -1) for y in hidden]
        new_cache = None
        if use_cache:
            new_cache = (RecollectCache() if cache is None else cache).continued(
                new_states, T, calls or ()
            )
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*hidden, x) if output_hidden_states else None,
            **{CACHE_KEY: new_cache},  # type: ignore[arg-type]
        )


class RecollectForCausalLM(RecollectPreTrainedModel, GenerationMixin):
    """`RecollectModel` with a head that predicts the next token.

    Raises:
        RecipeError: sizes do not fit a recipe.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes("gla", vocab_size=32, hidden_size=16)
        >>> model = rc.lm.RecollectForCausalLM(config).eval()
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> bool(model(ids, labels=ids).loss > 0)
        True
        >>> model.generate(ids, max_new_tokens=2, do_sample=False).shape
        torch.Size([1, 5])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012
    accepts_loss_kwargs = True  # num_items_in_batch, below

    def __init__(self, config: RecollectConfig) -> None:
        super().__init__(config)
        self.model = RecollectModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: RecollectCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        shift_labels: Tensor | None = None,
        output_logits: bool | None = None,
        past_key_values: RecollectCache | None = None,
        **kwargs: Unpack[ForwardKwargs],
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Return logits, and the loss if there are labels.

        A training loss computes the logits of ``loss_chunk_size`` tokens at a time and returns none
        by default. If tokens are routed to memories, ``aux_loss`` is the mean load-balancing loss
        of the routers; the loss contains ``router_aux_loss_coef`` times it during training only.

        Args:
            input_ids, attention_mask, cache, inputs_embeds: as in `RecollectModel.forward`.
            labels: the tokens of the input ``[B, T]``, which are shifted here. Positions labelled
                −100 are ignored, and so is the first token of each text or document.
            use_cache, cu_seqlens, output_hidden_states: as in `RecollectModel.forward`.
            logits_to_keep: number of last positions with logits, or their indices; 0: all.
            num_items_in_batch: divisor of the summed loss, if an optimizer step has several
                batches.
            shift_labels: the next token of every position ``[B, T]``, in place of ``labels``; also
                for the last position, if a text continues after it.
            output_logits: whether to return logits with a loss; by default not during training with
                a ``loss_chunk_size``.
            past_key_values: name of ``cache`` before transformers 5.24.
            kwargs: other arguments of transformers, see `ForwardKwargs`.

        Raises:
            ValueError: inputs contradict each other, or a memory does not support them.
            TypeError: an unknown argument.
        """
        cache = resolve_cache(cache, past_key_values)
        tokens = inputs_embeds if input_ids is None else input_ids
        if kwargs and tokens is not None:
            if input_ids is not None:
                check_token_ids(input_ids)
            cu_seqlens = resolve_cu_seqlens(
                *(kwargs, (tokens.shape[0], tokens.shape[1])),
                past_length=_past_length(cache),
                mask=attention_mask,
                cu_seqlens=cu_seqlens,
            )
        has_labels = labels is not None or shift_labels is not None
        has_aux_loss = has_labels and self.has_routers
        with record_routing(self.model) if has_aux_loss else nullcontext([]) as routings:
            outputs = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                cache=cache,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                cu_seqlens=cu_seqlens,
                output_hidden_states=output_hidden_states,
            )
        x = outputs.last_hidden_state
        if self.config.logit_scale != 1:
            x = x * self.config.logit_scale
        if output_logits is None:
            output_logits = not (has_labels and self.training and self.config.loss_chunk_size)
        logits = None
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if output_logits or not has_labels or not keeps_all:
            is_count = isinstance(logits_to_keep, int)
            logits = self.lm_head(
                x[:, slice(-logits_to_keep, None) if is_count else logits_to_keep]
            )
        fields: dict[str, Any] = {"logits": logits, "hidden_states": outputs.hidden_states}
        fields[CACHE_KEY] = cache_of(outputs)
        if not has_labels:
            return CausalLMOutputWithPast(**fields)
        shape = (x if logits is None else logits).shape[:2]
        targets = _targets(labels, shift_labels, attention_mask, cu_seqlens, shape)
        loss = next_token_loss(
            x,
            self.lm_head,
            targets,
            num_items=num_items_in_batch,
            chunk_size=self.config.loss_chunk_size,
            logits=logits,
        )
        if not has_aux_loss:
            return CausalLMOutputWithPast(loss=loss, **fields)
        aux_loss = torch.stack([routing.balance_loss.to(loss) for routing in routings]).mean()
        if self.training and self.config.router_aux_loss_coef:
            share: Any = 1.0  # of this batch in the tokens of the optimizer step
            if num_items_in_batch is not None:
                share = (targets != IGNORE_INDEX).sum().to(loss) / num_items_in_batch
            loss = loss + self.config.router_aux_loss_coef * share * aux_loss
        return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux_loss, **fields)

    @property
    def has_routers(self) -> bool:
        """Whether a layer routes tokens to memories."""
        return any(isinstance(module, Router) for module in self.model.modules())

    @property
    def has_growing_cache(self) -> bool:
        """Whether the state of a layer grows with the text: all associations, or a row per key."""
        return any(mixer.grows for mixer, _ in self.config.layer_specs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the inputs of one step of `generate`: the tokens after the cache.

        With a cache, ``input_ids`` is the text so far, or only the new tokens together with an
        ``attention_mask`` of all tokens. A cache of B rows continues n · B sequences (beams).

        Args:
            input_ids: the text so far or the new tokens, ``[B, T]``.
            next_sequence_length: number of new tokens; by default that of the mask.
            cache: cache of the earlier tokens.
            attention_mask: mask of earlier and new tokens.
            inputs_embeds: vectors ``[B, T, hidden_size]`` in place of the first tokens.
            is_first_iteration: whether these are the tokens of the prompt.
            past_key_values: name of ``cache`` before transformers 5.24.
            **kwargs: ``use_cache`` and ``logits_to_keep`` of `forward`; others are ignored.

        Raises:
            ValueError: there is no token after the cache.
        """
        cache = resolve_cache(cache, past_key_values)
        past_length, length = _past_length(cache), next_sequence_length
        if length is None and attention_mask is not None:
            length = attention_mask.shape[1] - past_length
        elif length is None:
            length = input_ids.shape[1]
        if inputs_embeds is not None and (past_length == 0 or is_first_iteration):
            inputs: dict[str, Any] = {"inputs_embeds": inputs_embeds[:, past_length:]}
        elif 1 <= length <= input_ids.shape[1]:
            inputs = {"input_ids": input_ids[:, -length:]}
        else:
            raise ValueError(
                f"the cache has {past_length} tokens and input_ids has {input_ids.shape[1]}, so "
                "none is new: give the text so far and at least one token more, or only the new "
                "tokens with an attention_mask of all tokens"
            )
        B = next(iter(inputs.values())).shape[0]
        if cache and cache.batch_size < B and not B % cache.batch_size:
            repeats = B // cache.batch_size
            cache = cache.map(lambda state: state.repeat(repeats))
        inputs |= {"attention_mask": attention_mask, "use_cache": kwargs.get("use_cache", True)}
        if kwargs.get("logits_to_keep") is not None:
            inputs["logits_to_keep"] = kwargs["logits_to_keep"]
        return {**inputs, CACHE_KEY: cache}

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Create a cache, or copy the given one, which is not changed.

        Assisted generation verifies drafts with a cache that records calls from the prompt on.
        """
        super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, *args, **kwargs
        )
        cache = model_kwargs.get(CACHE_KEY)
        if generation_config.use_cache is False or not isinstance(cache, RecollectCache | None):
            return
        cache = RecollectCache() if cache is None else cache.copy()
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[CACHE_KEY] = cache

    def generate(  # type: ignore[override]
        self, *args: Any, generator: torch.Generator | None = None, **kwargs: Any
    ) -> Any:
        """Generate as `transformers.GenerationMixin.generate`, optionally from a generator.

        Args:
            *args: as in transformers.
            generator: generator of the seed of this call; the global generators are not changed.
                Without one, sampling uses the global generators.
            **kwargs: as in transformers.

        Raises:
            ValueError: not a torch.Generator, or a prompt that is not token ids ``[B, T]``, T > 0.
        """
        cache = resolve_cache(kwargs.pop("cache", None), kwargs.pop("past_key_values", None))
        if cache is not None:
            kwargs[CACHE_KEY] = cache
        prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if prompt is not None:
            check_token_ids(prompt)
            if not prompt.shape[1] and kwargs.get("inputs_embeds") is None:
                raise ValueError(
                    f"input_ids has no tokens (shape {list(prompt.shape)}), and a text goes on "
                    "from one at least: begin with the tokenizer's bos_token_id, or with the "
                    "eos_token_id where it has none"
                )
        if generator is None:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        if not isinstance(generator, torch.Generator):
            raise ValueError(f"generator must be a torch.Generator, not {generator!r}")
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        with seeded_generators(seed, {weight.device for weight in self.parameters()}):
            return super().generate(*args, **kwargs)  # type: ignore[misc]


@renamed_arguments(
    {
        "d_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
    }
)
def _build_layer(config: RecollectConfig, mixer: Mixer, index: int) -> nn.Module:
    sizes: Any = config.sizes_of(config.layer_names[index])
    return build(
        mixer,
        config.hidden_size,
        sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        value_dim=sizes["value_dim"],
        engine=config.engine,
        precision=config.precision_of(config.layer_names[index]),
        depth=(index, config.num_hidden_layers),
    )


def _targets(
    labels: Tensor | None,
    shift_labels: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    shape: Sequence[int],  # B, T of the logits
) -> Tensor:
    """Return the target of every position, ``[B, T]``."""
    if labels is not None and shift_labels is not None:
        raise ValueError(
            "labels and shift_labels exclude each other: labels are shifted here, and shift_labels "
            "already are"
        )
    name, values = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    assert values is not None
    if values.shape != shape:
        raise ValueError(
            f"{name} must have shape {list(shape)} [B, T], one per logit, not {list(values.shape)}"
        )
    if values.dtype != torch.int64:
        raise ValueError(
            f"{name} must be token ids in int64, not {values.dtype}: convert by .long()"
        )
    return values if labels is None else next_token_targets(values, mask, cu_seqlens)


def _past_length(cache: RecollectCache | None) -> int:
    return 0 if cache is None else cache.get_seq_length()


def _check_cache(cache: object, num_layers: int) -> None:
    is_cache = isinstance(cache, RecollectCache)
    if cache is not None and not (is_cache and len(cache) in (0, num_layers)):
        actual = f"one of {len(cache)} layers" if is_cache else repr(type(cache))
        raise ValueError(
            f"cache must be the RecollectCache that this model of {num_layers} layers returned "
            f"earlier, not {actual}"
        )


def _new_token_mask(mask: Tensor | None, x: Tensor, past_length: int) -> Tensor | None:
    """Return the mask of the new tokens ``[B, T]``, or ``None`` if all are valid."""
    B, T = x.shape[:2]
    if mask is None:
        return None
    if mask.dim() != 2 or mask.shape[0] != B or mask.shape[1] not in (T, past_length + T):
        raise ValueError(
            f"attention_mask must have shape {[B, T]}"
            + (f" or {[B, past_length + T]}" if past_length else "")
            + f", not {list(mask.shape)}"
        )
    mask = mask[:, mask.shape[1] - T :]
    # Layers compact rows with a mask, which costs more than this synchronisation.
    if not torch.compiler.is_compiling() and bool((mask != 0).all()):
        return None
    return mask


def _check_packed_batch(cu_seqlens: Tensor, mask: Tensor | None, B: int, T: int) -> None:
    """Check that documents of several rows end with their row, and that there is no padding."""
    if not set(range(0, (B + 1) * T, T)) <= set(cu_seqlens.tolist()):
        raise ValueError(
            f"cu_seqlens must have a boundary at the end of every row, at {T}, {2 * T} and so on, "
            "because documents do not continue in the next row"
        )
    if mask is not None and not bool((mask != 0).all()):
        raise ValueError(
            "attention_mask has padding and cu_seqlens has boundaries of packed documents, and a "
            "batch has one or the other: pack rows that are full"
        )
