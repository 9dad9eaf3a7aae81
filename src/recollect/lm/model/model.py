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
from recollect.blocks.routed import Router, Routing, record_routing
from recollect.layer.block import Block
from recollect.layer.recorded_call import RecordedCall
from recollect.lm.model.arguments import (
    ForwardArguments,
    HeadlessArguments,
    check_token_ids,
    document_borders,
    embedded,
)
from recollect.lm.model.cache import CACHE, RecollectCache, cache_of, one_cache
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.loss import IGNORE_INDEX, next_token_loss, next_token_targets
from recollect.lm.model.pretrained import RecollectPreTrainedModel
from recollect.messages import renamed_arguments

__all__ = ["RecollectForCausalLM", "RecollectModel"]


class RecollectModel(RecollectPreTrainedModel):
    """Embedding, blocks and a last norm.

    Raises:
        RecipeError: sizes that do not fit a recipe.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> model = rc.lm.RecollectModel(config)
        >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 16])
    """

    _unread = ("lm_head.", "score.")

    def __init__(self, config: RecollectConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.blocks = nn.ModuleList(
            Block(
                _layer(config, mixer, index),
                config.intermediate_size if follows else None,
                eps=config.rms_norm_eps,
            )
            for index, (mixer, follows) in enumerate(config.mixed)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
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
        **others: Unpack[HeadlessArguments],
    ) -> BaseModelOutputWithPast:
        """Hidden states after the last norm.

        Args:
            input_ids: ``[B, T]``, int64; this or ``inputs_embeds``.
            attention_mask: ``[B, T]`` (or with the columns before, as generation gives it), nonzero
                at real tokens, padded on either side. Padding changes nothing.
            cache: of an earlier call, to continue from.
            inputs_embeds: ``[B, T, hidden_size]``, in place of ``input_ids``.
            use_cache: whether states come back; by default the configuration's word, and not while
                training.
            cu_seqlens: ``[N + 1]`` borders of N documents packed in one row, or in all rows one
                after the other; then there are no states.
            output_hidden_states: whether the inputs of all blocks come back too.
            past_key_values: ``cache``, by its name before transformers 5.24.
            others: what transformers hands on, by its names: `HeadlessArguments`.

        Raises:
            ValueError: inputs that contradict each other, or ask for what a memory cannot do.
            TypeError: an argument that nobody knows.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, and not both")
        if inputs_embeds is None:
            assert input_ids is not None
            x = embedded(self.embed_tokens, input_ids, self.config.vocab_size)
        else:
            x = inputs_embeds
        cache = one_cache(cache, past_key_values)
        _check_cache(cache, len(self.blocks))
        before = cache.states if cache else (None,) * len(self.blocks)
        seen = 0 if cache is None else cache.get_seq_length()
        rows, columns = x.shape[:2]
        cu_seqlens = document_borders(
            others, (rows, columns), seen=seen, mask=attention_mask, cu_seqlens=cu_seqlens
        )
        mask = _mask(attention_mask, x, seen)
        many = cu_seqlens is not None and rows > 1
        if many and (use_cache or seen):
            raise ValueError(
                "documents packed in several rows leave no state to go on from: pass "
                "use_cache=False and no cache, or one row"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not many
        if many:  # all rows in one: documents know nothing of each other anyway
            x = x.reshape(1, rows * columns, -1)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden, states = [], []
        records = use_cache and cache is not None and cache.is_croppable and cu_seqlens is None
        calls: list[RecordedCall] | None = [] if records else None
        for block, state in zip(self.blocks, before, strict=True):
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
            states.append(new_state)
        x = self.norm(x)
        if many:
            x, hidden = x.view(rows, columns, -1), [y.view(rows, columns, -1) for y in hidden]
        new_state = None
        if use_cache:
            new_state = (RecollectCache() if cache is None else cache).continued(
                states, columns, calls or ()
            )
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*hidden, x) if output_hidden_states else None,
            **_kept(new_state),
        )


class RecollectForCausalLM(RecollectPreTrainedModel, GenerationMixin):
    """`RecollectModel` with a head that predicts the next token.

    Raises:
        RecipeError: sizes that do not fit a recipe.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
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
        **others: Unpack[ForwardArguments],
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Logits, and the loss when there are labels.

        A training loss takes the output layer ``loss_chunk_size`` tokens at a time and gives no
        logits, unless they are asked for.

        Where tokens are routed to memories, ``aux_loss`` is the mean load-balancing loss of the
        routers; in training, and only then, the loss contains ``router_aux_loss_coef`` times it.

        Args:
            input_ids: ``[B, T]``, int64; this or ``inputs_embeds``.
            attention_mask: ``[B, T]`` (or with the columns before, as generation gives it), nonzero
                at real tokens, padded on either side. Padding changes nothing.
            cache: of an earlier call, to continue from.
            inputs_embeds: ``[B, T, hidden_size]``, in place of ``input_ids``.
            labels: ``[B, T]``, the input's own tokens: they are shifted here; −100 asks nothing,
                and neither does a token that nothing precedes (after padding, or the first of a
                packed document).
            use_cache: whether states come back; by default the configuration's word, and not while
                training.
            cu_seqlens: ``[N + 1]`` borders of N documents packed in one row, or in all rows one
                after the other; then there are no states.
            output_hidden_states: whether the inputs of all blocks come back too.
            logits_to_keep: only the last so many positions, or those of an index; 0 is all.
            num_items_in_batch: what the summed loss is divided by, when an optimizer step takes
                more than this batch.
            shift_labels: ``[B, T]``, what each column predicts, in place of ``labels``: where a
                text goes on after the last column, it knows the next token.
            output_logits: whether logits come back beside a loss; by default not while training,
                where the configuration has a ``loss_chunk_size``.
            past_key_values: ``cache``, by its name before transformers 5.24.
            others: what transformers hands on, by its names: `ForwardArguments`.

        Raises:
            ValueError: inputs that contradict each other, or ask for what a memory cannot do.
            TypeError: an argument that nobody knows.
        """
        cache = one_cache(cache, past_key_values)
        if input_ids is not None:
            check_token_ids(input_ids)
        if others:
            text = inputs_embeds if input_ids is None else input_ids
            if text is not None:
                seen = 0 if cache is None else cache.get_seq_length()
                shape = text.shape[0], text.shape[1]
                cu_seqlens = document_borders(
                    others, shape, seen=seen, mask=attention_mask, cu_seqlens=cu_seqlens
                )
        asked = labels is not None or shift_labels is not None
        routed = asked and self.routed
        with record_routing(self.model) if routed else nullcontext([]) as routings:
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
            output_logits = not (asked and self.training and self.config.loss_chunk_size)
        all_columns = isinstance(logits_to_keep, int) and logits_to_keep == 0
        logits = None
        if output_logits or not asked or not all_columns:
            columns = (
                slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            )
            logits = self.lm_head(x[:, columns])
        loss = None
        if asked:
            found = x if logits is None else logits
            targets = _targets(labels, shift_labels, attention_mask, cu_seqlens, found.shape[:2])
            loss = next_token_loss(
                x,
                self.lm_head,
                targets,
                num_items=num_items_in_batch,
                chunk_size=self.config.loss_chunk_size,
                logits=logits,
            )
            if routed:
                return self._balanced(outputs, logits, loss, routings, targets, num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **_kept(cache_of(outputs)),
        )

    @property
    def routed(self) -> bool:
        """Whether tokens are routed to memories somewhere."""
        return any(isinstance(module, Router) for module in self.model.modules())

    def _balanced(
        self,
        outputs: BaseModelOutputWithPast,
        logits: Tensor | None,
        loss: Tensor,
        routings: Sequence[Routing],
        targets: Tensor,
        items: int | Tensor | None,
    ) -> MoeCausalLMOutputWithPast:
        """The outputs with the routers' mean balance loss, which a training loss adds a share of.

        A batch counts by its tokens where a step takes several.
        """
        aux = torch.stack([routing.balance_loss.to(loss) for routing in routings]).mean()
        if self.training and self.config.router_aux_loss_coef:
            part = 1.0 if items is None else (targets != IGNORE_INDEX).sum().to(loss) / items
            loss = loss + self.config.router_aux_loss_coef * part * aux
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **_kept(cache_of(outputs)),
        )

    @property
    def cache_grows(self) -> bool:
        """Whether a layer's state grows with the text: all associations, or a row per key."""
        return any(mixer.grows for mixer, _ in self.config.mixed)

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
        """What one step of `generate` feeds: the columns that no state has seen.

        With a cache, ``input_ids`` is the whole text so far, or the new columns beside an
        ``attention_mask`` of all of them. A cache of B rows continues n · B sequences (beams).

        Args:
            input_ids: ``[B, T]``, the whole text so far or the new columns.
            next_sequence_length: new columns; counted from the mask when omitted.
            cache: of the columns that were read.
            attention_mask: over all columns, read and new.
            inputs_embeds: ``[B, T, hidden_size]``, in place of the first columns' tokens.
            is_first_iteration: whether this is the prompt, though a cache is given.
            past_key_values: ``cache``, by its name before transformers 5.24.
            **kwargs: ``use_cache`` and ``logits_to_keep``, as `forward` takes them; others are
                ignored.

        Raises:
            ValueError: no column that the cache has not seen.
        """
        cache = one_cache(cache, past_key_values)
        seen = 0 if cache is None else cache.get_seq_length()
        new = next_sequence_length
        if new is None:
            new = input_ids.shape[1] if attention_mask is None else attention_mask.shape[1] - seen
        if inputs_embeds is not None and (seen == 0 or is_first_iteration):
            fresh: dict[str, Any] = {"inputs_embeds": inputs_embeds[:, seen:]}
        else:
            if not 1 <= new <= input_ids.shape[1]:
                raise ValueError(
                    f"the cache has seen {seen} columns and {input_ids.shape[1]} were given, which "
                    "leaves none to read: give the whole text so far and at least one token more, "
                    "or only the new tokens with an attention_mask over all columns"
                )
            fresh = {"input_ids": input_ids[:, -new:]}
        rows = next(iter(fresh.values())).shape[0]
        if cache and cache.rows < rows and not rows % cache.rows:
            repeats = rows // cache.rows
            cache = cache.map(lambda state: state.repeat(repeats))
        to_keep = kwargs.get("logits_to_keep")
        return {
            **fresh,
            "attention_mask": attention_mask,
            CACHE: cache,
            "use_cache": kwargs.get("use_cache", True),
            **({} if to_keep is None else {"logits_to_keep": to_keep}),
        }

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Begin with an empty cache, or with a copy of the given one, which stays as it is.

        Drafts are verified with a cache that records, so there must be one before the prompt.
        """
        super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, *args, **kwargs
        )
        cache = model_kwargs.get(CACHE)
        if generation_config.use_cache is False or not isinstance(cache, RecollectCache | None):
            return
        cache = RecollectCache() if cache is None else cache.copy()
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[CACHE] = cache

    def generate(  # type: ignore[override]
        self, *args: Any, generator: torch.Generator | None = None, **kwargs: Any
    ) -> Any:
        """`transformers.GenerationMixin.generate`, with its randomness as an argument.

        Args:
            *args: as in transformers.
            generator: draws the seed of this call, and the global generators stay as they were;
                without one, sampling reads those.
            **kwargs: as in transformers.

        Raises:
            ValueError: a generator that is none of torch's; a prompt that is no table of token
                ids, or is empty.
        """
        cache = one_cache(kwargs.pop("cache", None), kwargs.pop("past_key_values", None))
        if cache is not None:
            kwargs[CACHE] = cache
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
        own = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=own):
            torch.manual_seed(seed)
            return super().generate(*args, **kwargs)  # type: ignore[misc]


@renamed_arguments(
    {
        "d_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
    }
)
def _layer(config: RecollectConfig, mixer: Mixer, index: int) -> nn.Module:
    return build(
        mixer,
        config.hidden_size,
        config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        value_dim=config.value_dim,
        engine=config.engine,
        precision=config.precision_of(config.pattern[index]),
        depth=(index, config.num_hidden_layers),
    )


def _targets(
    labels: Tensor | None,
    shift_labels: Tensor | None,
    mask: Tensor | None,
    borders: Tensor | None,
    shape: Sequence[int],
) -> Tensor:
    """What each column predicts."""
    if labels is not None and shift_labels is not None:
        raise ValueError(
            "labels and shift_labels exclude each other: the first are shifted here, the second "
            "already are"
        )
    given, name = (labels, "labels") if shift_labels is None else (shift_labels, "shift_labels")
    assert given is not None
    if given.shape != shape:
        raise ValueError(
            f"{name} must have shape {list(shape)} [B, T], one per logit, not {list(given.shape)}"
        )
    if given.dtype != torch.int64:
        raise ValueError(
            f"{name} must be token ids in int64, not {given.dtype}: convert by .long()"
        )
    return next_token_targets(given, mask, borders) if shift_labels is None else given


def _kept(cache: RecollectCache | None) -> dict[str, Any]:
    """The cache, as outputs of this version of transformers name it."""
    return {CACHE: cache}


def _check_cache(cache: object, layers: int) -> None:
    if cache is None or (isinstance(cache, RecollectCache) and len(cache) in (0, layers)):
        return
    what = f"one of {len(cache)} layers" if isinstance(cache, RecollectCache) else repr(type(cache))
    raise ValueError(
        f"cache must be the RecollectCache that this model of {layers} layers returned "
        f"earlier, not {what}"
    )


def _mask(mask: Tensor | None, x: Tensor, seen: int) -> Tensor | None:
    """The mask of the new columns, or ``None`` where all are real."""
    B, T = x.shape[:2]
    if mask is None:
        return None
    if mask.dim() != 2 or mask.shape[0] != B or mask.shape[1] not in (T, seen + T):
        raise ValueError(
            f"attention_mask must have shape {[B, T]}"
            + (f" or {[B, seen + T]}" if seen else "")
            + f", not {list(mask.shape)}"
        )
    mask = mask[:, mask.shape[1] - T :]
    # Without padding the rows need no compaction; asking costs less than doing it for nothing.
    if not torch.compiler.is_compiling() and bool((mask != 0).all()):
        return None
    return mask
