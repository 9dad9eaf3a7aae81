"""Context parallelism of a model: its layers, its packed documents and its loss."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recollect.layer.memory_layer import MemoryLayer
from recollect.parallel.exchange import no_double_backward
from recollect.parallel.layer import ContextRanks, forward_over_ranks
from recollect.parallel.link import Group, Link, rank_group
from recollect.parallel.models import bind_arguments, check_model, outer_models, sequence_layers
from recollect.parallel.segment import local_pieces
from recollect.parallel.strategies import Strategy
from recollect.report.ranks import mark_collective

__all__ = ["ContextParallel", "context"]

IGNORE = -100


class _Total(torch.autograd.Function):
    """Sum over ranks; the gradient of every rank's summand is multiplied by ``scale``."""

    @staticmethod
    def forward(ctx: Any, link: Link, scale: float, x: Tensor) -> Tensor:
        ctx.scale = scale
        total = x.clone()
        dist.all_reduce(total, group=link.group)
        return total

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, grads[0] * ctx.scale


class ContextParallel:
    """A model that runs on one rank's segment, until `remove` or the end of a ``with`` block.

    Attributes:
        model: the model.
        context_ranks: the ranks.
        gradient_reduction: ``"sum"`` or ``"mean"``.
        shard_inputs: whether calls receive full sequences.
        strategies: strategy of each memory layer, by its name in the model.

    Raises:
        ValueError: a model without sequence layers, or one that is in another context.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layer = rc.MemoryLayer(16, num_heads=2, recipe=rc.Recipe())
        >>> with rc.parallel.context(layer) as parallel:
        ...     [strategy.name for strategy in parallel.strategies.values()]
        ['affine']
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        model: nn.Module,
        context_ranks: ContextRanks,
        gradient_reduction: str,
        *,
        shard_inputs: bool = False,
    ) -> None:
        self.model, self.context_ranks = model, context_ranks
        self.gradient_reduction, self.shard_inputs = gradient_reduction, shard_inputs
        self.strategies: dict[str, Strategy] = {}
        self._changed: list[nn.Module] = []
        check_model(model)
        for name, layer in sequence_layers(model, ""):
            if isinstance(layer, MemoryLayer):
                self.strategies[name] = context_ranks.strategy_for(layer)
            self._put(layer, forward_over_ranks(layer, context_ranks))
        if not self._changed:
            raise ValueError(
                f"{type(model).__name__} has no sequence layer of recollect: pass a MemoryLayer, "
                "or a model that contains one"
            )
        models = list(outer_models(model))
        if shard_inputs and not models:
            self.remove()
            raise ValueError(
                f"shard_inputs=True is for language models, not {type(model).__name__}: pass this "
                "rank's tokens to its layers (`split`)"
            )
        for inner in models:
            forward = self._language if "lm_head" in dict(inner.named_children()) else self._body
            self._put(inner, partial(forward, inner))

    def _put(self, module: nn.Module, forward: Any) -> None:
        if "forward" in vars(module):
            self.remove()
            raise ValueError(
                f"the forward of {type(module).__name__} is already replaced: "
                "end the other context first, by remove()"
            )
        # Trainers inspect the argument names of `forward`.
        forward.__signature__ = inspect.signature(module.forward)
        module.forward = forward
        self._changed.append(module)

    def remove(self) -> None:
        """Restore the forward methods of the model."""
        for module in self._changed:
            vars(module).pop("forward", None)
        self._changed = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def split(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's segment of a full sequence. Lengths differ by at most one token.

        Args:
            x: the full sequence, equal on all ranks.
            dim: axis of the tokens.
        """
        return x.tensor_split(self.context_ranks.link.ranks, dim=dim)[self.context_ranks.link.rank]

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum or average all gradients over the ranks, according to ``gradient_reduction``.

        It is for custom training loops. DDP and FSDP2 over these ranks reduce gradients themselves.
        """
        link = self.context_ranks.link
        for p in self.model.parameters():
            if p.requires_grad:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad, group=link.group)
                if self.gradient_reduction == "mean":
                    p.grad /= link.ranks

    # -- forward passes ---------------------------------------------------------------------------

    def _body(self, model: nn.Module, *args: Any, **named: Any) -> Any:
        return type(model).forward(model, **self._local(model, args, named))

    def _language(self, model: nn.Module, *args: Any, **named: Any) -> Any:
        """Run a language model. With labels, the loss is that of the full sequence on all ranks."""
        link = self.context_ranks.link
        named = self._local(model, args, named)
        labels, targets = named.pop("labels", None), named.get("shift_labels")
        if labels is None and targets is None:
            return type(model).forward(model, **named)
        if "shift_labels" not in inspect.signature(type(model).forward).parameters:
            raise ValueError(
                f"{type(model).__name__} takes no shift_labels, which the loss needs for the next "
                "rank's first label: leave labels out, or use RecollectForCausalLM"
            )
        if targets is None:
            assert labels is not None
            targets = self._targets(labels, named)
        items = named.pop("num_items_in_batch", None)
        if items is None:
            items = (targets != IGNORE).sum()
            dist.all_reduce(items, group=link.group)
            items = items.clamp_min(1)
        named |= {"shift_labels": targets, "num_items_in_batch": items}
        output = type(model).forward(model, **named)
        scale = float(link.ranks) if self.gradient_reduction == "mean" else 1.0
        loss = cast("Tensor", _Total.apply(link, scale, output[0]))
        if isinstance(output, tuple):
            return (loss, *output[1:])
        output["loss"] = loss
        return output

    def _targets(self, labels: Tensor, named: dict[str, Any]) -> Tensor:
        """Return the targets of this rank's columns; the last is the next rank's first label."""
        link = self.context_ranks.link
        firsts = link.gather(labels[:, :1])
        next_label = firsts[link.rank + 1] if not link.last else torch.full_like(firsts[0], IGNORE)
        targets = torch.cat([labels[:, 1:], next_label], dim=1)
        mask, cu_seqlens = named.get("attention_mask"), named.get("cu_seqlens")
        if mask is not None:
            targets = targets.masked_fill(mask.to(targets.device) == 0, IGNORE)
        if cu_seqlens is not None:
            ends = cu_seqlens[1:-1].to(targets.device, torch.long) - 1
            targets = targets.index_fill(1, ends, IGNORE)
        return targets

    def _local(
        self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of this rank's tokens by name, with documents as its pieces."""
        named = bind_arguments(model, args, named)
        if self.shard_inputs:
            named = self._columns(named)
        for name in ("position_ids", "cache_position", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"):
            if named.get(name) is not None:
                raise ValueError(
                    f"{name} is not supported over several ranks: leave it out, and pass the "
                    "boundaries of documents in the full sequence as cu_seqlens"
                )
        cu_seqlens = named.get("cu_seqlens")
        if cu_seqlens is None:
            return named
        values = (named.get("input_ids"), named.get("inputs_embeds"), *named.values())
        x = next(x for x in values if isinstance(x, Tensor))
        if x.shape[0] != 1:
            raise ValueError(
                f"documents over several ranks must be packed in one sequence, not {x.shape[0]}: "
                "concatenate the sequences, or pass them one by one"
            )
        link = self.context_ranks.link
        tokens = tuple(size for (size,) in link.numbers((x.shape[1],), x.device))
        local, _ = local_pieces(cu_seqlens, tokens, link.rank)
        return {**named, "cu_seqlens": local, "use_cache": False}

    def _columns(self, named: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's columns of full sequences, which must be equal on all ranks."""
        link = self.context_ranks.link
        args = {name: named[name] for name in _COLUMNS if isinstance(named.get(name), Tensor)}
        sums = [_fingerprint(args[name]) if name in args else -1 for name in _COLUMNS]
        if not args:
            raise ValueError("shard_inputs=True needs full sequences: pass input_ids")
        first = next(iter(args.values()))
        names = ("rows", "tokens per row", *_COLUMNS)
        by_rank = link.numbers((*first.shape[:2], *sums), first.device)
        for name, *values in zip(names, *by_rank, strict=True):
            other = next((r for r, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                raise self._consensus_error(
                    f"rank {other} of a sequence has other {name} than rank 0: pass the same full "
                    "sequences on all ranks"
                )
        if first.shape[1] < link.ranks:
            raise self._consensus_error(
                f"sequences of {first.shape[1]} tokens are too short for {link.ranks} ranks: each "
                "rank needs at least one token"
            )
        return named | {name: self.split(x) for name, x in args.items()}

    def _consensus_error(self, reason: str) -> Exception:
        """Return an error for all ranks of a sequence, which only rank 0 prints."""
        error = ValueError(reason)
        return mark_collective(error, reporting_ranks=0) if self.context_ranks.link.rank else error


_COLUMNS = ("input_ids", "inputs_embeds", "attention_mask", "labels", "shift_labels")
"""Arguments of a language model with one column per token."""


def _fingerprint(x: Tensor) -> int:
    """Return a checksum of the entries of a tensor and their order."""
    integer_type = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        x.element_size()
    ]
    entries = x.detach().contiguous().view(integer_type).flatten().long()
    index = torch.arange(entries.numel(), device=x.device)
    return int((entries * (2 * 2654435761 * index + 1)).sum())  # modulo 2^64, odd weights


def context(
    model: nn.Module,
    group: Group = None,
    *,
    strategy: str = "auto",
    microbatches: int | None = None,
    gradient_reduction: str = "sum",
    shard_inputs: bool = False,
) -> ContextParallel:
    """Run a model on sequences that are split over several ranks.

    Every rank then calls the model, or a sequence layer, with its segment ``[B, T_r]`` of the
    sequences. Segments may differ in length. Outputs, states, positions and gradients are those of
    the full sequence on one process. The loss is the mean over all tokens, equal on all ranks.

    A language model takes these arguments:

    - ``input_ids``, ``inputs_embeds``, ``attention_mask``, ``labels`` and ``shift_labels``: this
      rank's columns, or full sequences with ``shard_inputs``.
    - ``cu_seqlens``: boundaries of documents in the *full* sequence (B = 1).
    - ``cache``: the cache before the first token of the sequence, equal on all ranks. The returned
      cache is that after the last token, on all ranks.

    The gradients of a rank are summands: sum them over the ranks
    (`ContextParallel.reduce_gradients`). The backward pass must run on every rank.

    Args:
        model: a `MemoryLayer`, a composition, or any module that contains them, also inside a
            wrapper such as DDP or a PEFT adapter.
        group: the ranks in the order of their segments: a process group or a mesh of one dimension;
            ``None`` is all processes.
        strategy: ``"auto"``: the strategy that the structure of each recipe allows;
            ``"sequential"``: every rank waits for the state of the previous one.
        microbatches: number m of pieces of rows and heads in the sequential strategy.
        gradient_reduction: ``"sum"``: the sum of the gradients of all ranks is the full gradient;
            ``"mean"``: their mean is, as DDP and FSDP2 over these ranks expect. It scales the
            gradient of the loss, not its value.
        shard_inputs: whether a language model takes full sequences, equal on all ranks, and selects
            this rank's columns. Outputs are those of these columns.

    Raises:
        ValueError: no process group, a model without sequence layers, ``shard_inputs`` without a
            language model, routed tokens, an unknown strategy, a compiled model, a classifier, a
            model with a learned prompt, or one that is in another context. A call raises it for
            full sequences that differ between ranks, or have fewer tokens than there are ranks.

    Examples:
        One optimizer step, on each rank::

            with rc.parallel.context(model, mesh["context"]) as ranks:
                ids = ranks.split(whole_ids)
                model(ids, labels=ids).loss.backward()
                ranks.reduce_gradients()
            optimizer.step()

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layer, x = rc.MemoryLayer(16, num_heads=2, recipe=rc.Recipe()), torch.randn(1, 8, 16)
        >>> with rc.parallel.context(layer):
        ...     y, state = layer(x)  # x: this rank's segment, here the full sequence
        >>> torch.allclose(y, layer(x)[0], atol=1e-5)
        True
        >>> dist.destroy_process_group()
    """
    if strategy not in ("auto", "sequential"):
        raise ValueError(
            f"strategy must be auto or sequential, not {strategy!r}: auto selects the strategy of "
            "each recipe"
        )
    if gradient_reduction not in ("sum", "mean"):
        raise ValueError(f"gradient_reduction must be sum or mean, not {gradient_reduction!r}")
    context_ranks = ContextRanks(link=rank_group(group), strategy=strategy, pieces=microbatches)
    _ = context_ranks.count
    return ContextParallel(model, context_ranks, gradient_reduction, shard_inputs=shard_inputs)
