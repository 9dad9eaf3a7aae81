"""A whole model along several ranks: its layers, its documents and its loss."""

from __future__ import annotations

import inspect
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recollect.layer.feed_forward import FeedForward
from recollect.layer.memory_layer import MemoryLayer
from recollect.parallel.functions import once_here
from recollect.parallel.layer import Along, run_feed_forward, run_layer, run_memory_layer
from recollect.parallel.link import Group, Link, link_of
from recollect.parallel.models import by_name, check_model, layers, models, parts
from recollect.parallel.segment import pieces_of
from recollect.parallel.ways import Way
from recollect.report.ranks import of_all

__all__ = ["ContextParallel", "context"]

IGNORE = -100


class _Total(torch.autograd.Function):
    """The sum over ranks; every rank's own share gets the gradient, times ``scale``."""

    @staticmethod
    def forward(ctx: Any, link: Link, scale: float, x: Tensor) -> Tensor:
        ctx.scale = scale
        total = x.clone()
        dist.all_reduce(total, group=link.group)
        return total

    @staticmethod
    @once_here
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, grads[0] * ctx.scale


class ContextParallel:
    """A model whose tokens are one rank's segment, until `remove` or the end of a ``with`` block.

    Attributes:
        model: the model.
        along: the ranks.
        gradients: ``"sum"`` or ``"mean"``.
        splits: whether calls are given whole rows.
        ways: how each memory layer goes from rank to rank, by its name in the model.

    Raises:
        ValueError: a model without sequence layers, or one that is in such a context already.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layer = rc.MemoryLayer(16, heads=2, recipe=rc.Recipe())
        >>> with rc.parallel.context(layer) as parallel:
        ...     [way.name for way in parallel.ways.values()]
        ['affine']
        >>> dist.destroy_process_group()
    """

    def __init__(
        self, model: nn.Module, along: Along, gradients: str, *, splits: bool = False
    ) -> None:
        self.model, self.along, self.gradients, self.splits = model, along, gradients, splits
        self.ways: dict[str, Way] = {}
        self._changed: list[nn.Module] = []
        check_model(model)
        for name, layer in layers(model, ""):
            if isinstance(layer, MemoryLayer):
                self.ways[name] = along.way_of(layer)
                run: Any = run_memory_layer
            else:
                run = run_feed_forward if isinstance(layer, FeedForward) else run_layer
            self._put(layer, partial(run, along, layer))
        if not self._changed:
            raise ValueError(
                f"{type(model).__name__} has no sequence layer of recollect's: give a MemoryLayer, "
                "or a model that holds some"
            )
        inside = list(models(model))
        if splits and not inside:
            self.remove()
            raise ValueError(
                f"splits=True is for language models, and {type(model).__name__} is none: give its "
                "layers this rank's tokens (`split`)"
            )
        for inner in inside:
            forward = self._language if "lm_head" in parts(inner) else self._body
            self._put(inner, partial(forward, inner))

    def _put(self, module: nn.Module, forward: Any) -> None:
        if "forward" in vars(module):
            self.remove()
            raise ValueError(
                f"the forward of {type(module).__name__} was replaced before: end the other "
                "context first, by remove()"
            )
        # Trainers read the names of a forward pass's arguments.
        forward.__signature__ = inspect.signature(module.forward)
        module.forward = forward
        self._changed.append(module)

    def remove(self) -> None:
        """Give the model its own forward passes back."""
        for module in self._changed:
            vars(module).pop("forward", None)
        self._changed = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def split(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's segment of a whole sequence: lengths differ by at most one token.

        Args:
            x: the whole, the same on all ranks.
            dim: axis of the tokens.
        """
        return x.tensor_split(self.along.link.ranks, dim=dim)[self.along.link.rank]

    @property
    def _link(self) -> Link:
        """To the other processes: on paper there are none that could be waited for."""
        return cast(Link, self.along.link)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum (or average, as ``gradients`` says) every parameter's gradient over the ranks.

        For a loop of one's own; DDP and FSDP2 over these ranks do it themselves.
        """
        link = self._link
        for p in self.model.parameters():
            if p.requires_grad:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad, group=link.group)
                if self.gradients == "mean":
                    p.grad /= link.ranks

    # -- forward passes ---------------------------------------------------------------------------

    def _body(self, model: nn.Module, *given: Any, **named: Any) -> Any:
        return type(model).forward(model, **self._local(model, given, named))

    def _language(self, model: nn.Module, *given: Any, **named: Any) -> Any:
        """With labels, the loss of the whole sequence, the same on all ranks."""
        link = self._link
        named = self._local(model, given, named)
        labels, targets = named.pop("labels", None), named.get("shift_labels")
        if labels is None and targets is None:
            return type(model).forward(model, **named)
        if "shift_labels" not in inspect.signature(type(model).forward).parameters:
            raise ValueError(
                f"the loss of {type(model).__name__} takes no shift_labels, so it cannot see the "
                "next rank's first label: leave labels out, or use RecollectForCausalLM"
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
        found = type(model).forward(model, **named)
        scale = float(link.ranks) if self.gradients == "mean" else 1.0
        loss = cast("Tensor", _Total.apply(link, scale, found[0]))
        if isinstance(found, tuple):
            return (loss, *found[1:])
        found["loss"] = loss
        return found

    def _targets(self, labels: Tensor, named: dict[str, Any]) -> Tensor:
        """What this rank's columns predict: the last one, the next rank's first label."""
        link = self._link
        first = labels[:, :1].contiguous()
        firsts = [torch.empty_like(first) for _ in range(link.ranks)]
        dist.all_gather(firsts, first, group=link.group)
        after = torch.full_like(first, IGNORE) if link.last else firsts[link.rank + 1]
        targets = torch.cat([labels[:, 1:], after], dim=1)
        mask, borders = named.get("attention_mask"), named.get("cu_seqlens")
        if mask is not None:
            targets = targets.masked_fill(mask.to(targets.device) == 0, IGNORE)
        if borders is not None:
            ends = borders[1:-1].to(targets.device, torch.long) - 1
            targets = targets.index_fill(1, ends, IGNORE)
        return targets

    def _local(
        self, model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> dict[str, Any]:
        """Arguments of this rank's tokens, all by name; documents as its pieces."""
        named = by_name(model, given, named)
        if self.splits:
            named = self._columns(named)
        for name in ("position_ids", "cache_position", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"):
            if named.get(name) is not None:
                raise ValueError(
                    f"{name} is not followed along several ranks: leave it out, and give documents "
                    "by cu_seqlens, the borders in the whole sequence"
                )
        borders = named.get("cu_seqlens")
        if borders is None:
            return named
        known = (named.get("input_ids"), named.get("inputs_embeds"), *named.values())
        x = next(x for x in known if isinstance(x, Tensor))
        if x.shape[0] != 1:
            raise ValueError(
                f"documents along several ranks are packed in one row, and there are {x.shape[0]}: "
                "put the rows after each other, or give them one by one"
            )
        link = self._link
        own = torch.tensor([x.shape[1]], device=x.device)
        sizes = [torch.empty_like(own) for _ in range(link.ranks)]
        dist.all_gather(sizes, own, group=link.group)
        tokens = tuple(int(size) for size in sizes)
        local, _ = pieces_of(borders, tokens, link.rank)
        return {**named, "cu_seqlens": local, "use_cache": False}

    def _columns(self, named: dict[str, Any]) -> dict[str, Any]:
        """This rank's columns of whole rows, which must be the same on all ranks."""
        link = self._link
        given = {name: named[name] for name in _COLUMNS if isinstance(named.get(name), Tensor)}
        sums = [_fingerprint(given[name]) if name in given else -1 for name in _COLUMNS]
        if not given:
            raise ValueError("whole rows are divided, and none were given: pass input_ids")
        first = next(iter(given.values()))
        own = torch.tensor([*first.shape[:2], *sums], device=first.device)
        every = [torch.empty_like(own) for _ in range(link.ranks)]
        dist.all_gather(every, own, group=link.group)
        for name, told in zip(
            ("rows", "tokens per row", *_COLUMNS), torch.stack(every, 1).tolist(), strict=True
        ):
            other = next((r for r, value in enumerate(told) if value != told[0]), None)
            if other is not None:
                raise self._said_by_one(
                    f"rank {other} of a sequence was given other {name} than rank 0: all ranks of "
                    "one sequence are given the same whole rows, of which each takes its columns"
                )
        if first.shape[1] < link.ranks:
            raise self._said_by_one(
                f"rows of {first.shape[1]} tokens cannot lie along {link.ranks} ranks: each needs "
                "one token at least"
            )
        return named | {name: self.split(x) for name, x in given.items()}

    def _said_by_one(self, reason: str) -> Exception:
        """What all ranks of a sequence raise, and the first of them says."""
        error = ValueError(reason)
        return of_all(error, speakers=0) if self.along.link.rank else error


_COLUMNS = ("input_ids", "inputs_embeds", "attention_mask", "labels", "shift_labels")
"""Arguments of a language model with a column per token."""


def _fingerprint(x: Tensor) -> int:
    """A number that tells tensors of other entries, or of another order of them, apart."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    entries = x.detach().contiguous().view(whole).flatten().long()
    place = torch.arange(entries.numel(), device=x.device)
    return int((entries * (2 * 2654435761 * place + 1)).sum())  # modulo 2^64, odd weights


def context(
    model: nn.Module,
    group: Group = None,
    *,
    way: str = "auto",
    pieces: int | None = None,
    gradients: str = "sum",
    splits: bool = False,
) -> ContextParallel:
    """Let a model's tokens be one rank's segment of sequences that lie along several ranks.

    Every rank then calls the model, or a sequence layer, with its own segment ``[B, T_r]`` of the
    same rows; segments may differ in length. Outputs, states and gradients are those of the whole
    sequence on one process; the loss is its mean over all tokens and the same on all ranks.
    Positions continue. Arguments of a language model mean: ``input_ids``, ``inputs_embeds``,
    ``attention_mask``, ``labels`` and ``shift_labels``: this rank's columns, or whole rows with
    ``splits``; ``cu_seqlens``: borders in the *whole* sequence (one row); ``cache``: before the
    first token of all, and after the last one on the way back; both the same on all ranks.

    A rank's gradients are its share: sum them over the ranks (`ContextParallel.reduce_gradients`).
    Backward passes have to run on every rank.

    Args:
        model: a `MemoryLayer`, a composition, or any module that holds some, also inside a
            wrapper such as DDP or a PEFT adapter.
        group: the ranks in the order of their segments: a process group or a mesh of one dimension;
            ``None`` is all processes.
        way: ``"auto"``: as each recipe's structure allows; ``"hand_over"``: every layer's state is
            handed from rank to rank.
        pieces: m, how many pieces of rows and heads follow each other in a hand-over.
        gradients: ``"sum"``: the ranks' gradients add up to the whole one; ``"mean"``: their mean
            is the whole one, as DDP and FSDP2 over these ranks expect. It is the gradient of the
            loss that is scaled, not its value.
        splits: whether a language model is called with whole rows, the same on all ranks, of which
            each takes its columns. What comes back is of these columns still.

    Raises:
        ValueError: no process group, a model without sequence layers, ``splits`` without a language
            model, tokens that are routed to memories, an unknown way, a model that is compiled as a
            whole, classifies or has a learned prompt, or one that is in such a context already.
            From a call: whole rows that differ between the ranks, or are shorter than these are
            many.

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
        >>> layer, x = rc.MemoryLayer(16, heads=2, recipe=rc.Recipe()), torch.randn(1, 8, 16)
        >>> with rc.parallel.context(layer):
        ...     y, state = layer(x)  # x: this rank's segment; one rank has all of it
        >>> torch.allclose(y, layer(x)[0], atol=1e-5)
        True
        >>> dist.destroy_process_group()
    """
    if way not in ("auto", "hand_over"):
        raise ValueError(
            f"way must be auto or hand_over, not {way!r}: what else a layer can do is its recipe's"
        )
    if gradients not in ("sum", "mean"):
        raise ValueError(f"gradients must be sum or mean, not {gradients!r}")
    along = Along(link=link_of(group), way=way, pieces=pieces)
    _ = along.count
    return ContextParallel(model, along, gradients, splits=splits)
