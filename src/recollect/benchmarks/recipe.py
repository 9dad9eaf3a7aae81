"""The speed of one recipe next to Gated DeltaNet and SDPA: forward, training and decoding."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from recollect.benchmarks.harness import run
from recollect.benchmarks.results import BenchResult, Case, duration
from recollect.benchmarks.suites.calls import (
    Shape,
    gates_of,
    init_of,
    params_of,
    recall_case,
    sdpa_case,
    tensors,
)
from recollect.fields import int_check, validate
from recollect.functional.recall import recall
from recollect.recipe.recipe import Recipe
from recollect.recipe.resolve import RecipeLike, as_recipe, resolve_name
from recollect.report.devices import resolve_device
from recollect.report.tables import Column, Table
from recollect.zoo.preset import get

__all__ = ["PASSES", "PEERS", "RecipeBenchmark", "bench"]

PASSES = ("forward", "training", "decode")
PEERS = ("gated_delta_net", "SDPA")
_RECIPE = "recipe"


@dataclass(frozen=True, kw_only=True)
class RecipeBenchmark:
    """Times of a recipe and of its peers, measured alternately in one run.

    Attributes:
        title: name of the preset, or the recipe as Python text.
        recipe: the recipe.
        shape: sizes B, T, H, K, V and device of the calls.
        result: times of all cases, named ``"recipe, forward"``, ``"SDPA, forward"`` and so on.

    Examples:
        >>> timed = rc.bench("delta_net", K=8, V=8, H=1, T=16, rounds=1)
        >>> timed.ratio("forward", "SDPA") > 0
        True
    """

    title: str
    recipe: Recipe
    shape: Shape
    result: BenchResult

    def seconds(self, name: str, of: str = _RECIPE) -> float:
        """Median time of a pass.

        Args:
            name: one of `PASSES`.
            of: ``"recipe"`` or one of `PEERS`.

        Raises:
            KeyError: a pass or a peer that was not measured.
        """
        return self.result[f"{of}, {name}"].median

    def ratio(self, name: str, peer: str) -> float:
        """Time of the recipe over the time of a peer: the median of the ratios within rounds.

        Args:
            name: one of `PASSES`.
            peer: one of `PEERS`.

        Raises:
            KeyError: a pass or a peer that was not measured.
        """
        times, peer_times = (self.result[f"{of}, {name}"].seconds for of in (_RECIPE, peer))
        return statistics.median(a / b for a, b in zip(times, peer_times, strict=True))

    def columns(self) -> list[str]:
        """Headings of :meth:`rows`."""
        return ["pass", _RECIPE, *PEERS, *(f"× {peer}" for peer in PEERS)]

    def rows(self) -> list[list[str]]:
        """The table as text, one row per pass."""
        return [
            [
                name,
                *(duration(self.seconds(name, of)) for of in (_RECIPE, *PEERS)),
                *(f"{self.ratio(name, peer):.3g}" for peer in PEERS),
            ]
            for name in PASSES
        ]

    def footer(self) -> tuple[str, ...]:
        """The meaning of rows and columns, sizes, rounds, device, versions and commit."""
        sizes = ", ".join(f"{name} = {getattr(self.shape, name)}" for name in "BTHKV")
        facts = self.result.environment.facts()
        return (
            "training: forward and backward; decode: one token after T",
            f"×: time of the {_RECIPE} over the time of a peer",
            f"{sizes}, float32; medians over {self.result.rounds} alternating rounds",
            f"{facts['device']}; {facts['software']}; commit {facts['commit']}",
        )

    def to_dict(self) -> dict[str, Any]:
        """All numbers with the recipe, the sizes, and the environment, ready for JSON."""
        shape = {name: getattr(self.shape, name) for name in "BTHKV"}
        return {
            "suite": _RECIPE,
            "title": self.title,
            "recipe": self.recipe.to_dict(),
            "shape": {**shape, "dtype": str(self.shape.dtype), "device": self.shape.device},
            **json.loads(self.result.to_json()),
            "ratios": {
                f"{name}: {_RECIPE} / {peer}": self.ratio(name, peer)
                for name in PASSES
                for peer in PEERS
            },
        }

    def __str__(self) -> str:
        return self._table(self.title).to_text()

    def _repr_html_(self) -> str:
        return self._table(f"`{self.title}`").to_html(notebook=True)

    def _table(self, title: str) -> Table:
        first, *others = self.columns()
        return Table(
            title=title,
            columns=[first, *(Column(name=name, align="right") for name in others)],
            rows=self.rows(),
            caption="\n".join(self.footer()),
        )


def bench(
    recipe: RecipeLike,
    *,
    K: int = 64,
    V: int = 64,
    H: int = 4,
    T: int = 512,
    B: int = 1,
    rounds: int = 5,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> RecipeBenchmark:
    """Time a recipe next to Gated DeltaNet and SDPA at equal sizes, alternately in one run.

    The calls are those of `recollect.recall` in float32, without the projections of a layer:
    forward, forward and backward to all inputs, and one token after T others.

    Args:
        recipe: a recipe, the name of an architecture, or a preset.
        K: key channels, ≥ 1.
        V: value channels, ≥ 1.
        H: heads, ≥ 1.
        T: tokens, ≥ 1.
        B: batch size, ≥ 1.
        rounds: number of rounds; every case runs once in each. At least five for stable medians.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"mps"``.
        progress: called after each round with the number of finished rounds and of all rounds.

    Returns:
        The times and their ratios; ``str()`` makes a table of them.

    Raises:
        RecipeError: an unknown name, a composition of several recipes, or sizes that the recipe
            cannot have.
        ValueError: a size that is not a whole number ≥ 1, or a device that torch does not have.

    Examples:
        >>> timed = rc.bench(rc.Recipe(bias=rc.bias.Huber()), K=8, V=8, H=1, T=16, rounds=1)
        >>> timed.columns()[:4]
        ['pass', 'recipe', 'gated_delta_net', 'SDPA']
    """
    numbers = {"K": K, "V": V, "H": H, "T": T, "B": B, "rounds": rounds}
    *sizes, rounds = (validate(name, int_check(1), size) for name, size in numbers.items())
    K, V, H, T, B = sizes
    resolve_device(device, argument_name="device")
    timed = as_recipe(recipe, "bench")
    shape = Shape(B=B, T=T, H=H, K=K, V=V, device=device)
    cases: list[Case] = []
    for of, one in ((_RECIPE, timed), (PEERS[0], get(PEERS[0]).recipe)):
        forward, training, decode = (f"{of}, {name}" for name in PASSES)
        cases.append(recall_case(one, forward, shape))
        cases.append(recall_case(one, training, shape, backward=True))
        cases.append(_decode_case(one, decode, shape))
    forward, training, decode = (f"{PEERS[1]}, {name}" for name in PASSES)
    cases.append(sdpa_case(forward, shape))
    cases.append(sdpa_case(training, shape, backward=True))
    cases.append(_sdpa_decode_case(decode, shape))
    result = run(
        cases,
        baseline=f"{PEERS[0]}, {PASSES[0]}",
        rounds=rounds,
        warmup=1,
        device=device,
        progress=progress,
    )
    title = getattr(resolve_name(recipe), "name", timed.brief)
    return RecipeBenchmark(title=title, recipe=timed, shape=shape, result=result)


def _decode_case(recipe: Recipe, label: str, shape: Shape) -> Case:
    """One token that goes on from the state after T tokens."""

    @torch.no_grad()
    def make() -> Callable[[], object]:
        longer = replace(shape, T=shape.T + 1)
        q, k, v = tensors(longer, grad=False, n=recipe.associations_per_token)
        gates, params = gates_of(recipe, longer, grad=False), params_of(recipe, shape)
        init = init_of(recipe, shape, grad=False)

        def part(at: slice, **options: Any) -> Any:
            taken = {name: x[:, at] for name, x in gates.items()}
            return recall(recipe, q[:, at], k[:, at], v[:, at], taken, params=params, **options)

        _, state = part(slice(shape.T), initial_memory=init)

        @torch.no_grad()
        def call() -> object:
            return part(slice(shape.T, None), state=state)

        return call

    return Case(name=label, make=make)


def _sdpa_decode_case(label: str, shape: Shape) -> Case:
    """One query over T + 1 keys and values that are stored already."""

    def make() -> Callable[[], object]:
        longer = replace(shape, T=shape.T + 1)
        q, k, v = (x.transpose(1, 2).contiguous() for x in tensors(longer, grad=False))
        query = q[:, :, -1:].contiguous()

        def call() -> Tensor:
            return functional.scaled_dot_product_attention(query, k, v)

        return call

    return Case(name=label, make=make)
