"""Speed of a recipe next to Gated DeltaNet and SDPA: forward, training and decoding."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from recollect.benchmarks.cases.baselines import sdpa_case, sdpa_inputs
from recollect.benchmarks.cases.recall import Shape, initial_arguments, recall_case
from recollect.benchmarks.harness import run
from recollect.benchmarks.results import BenchResult, Case, format_duration
from recollect.fields import int_check, validate
from recollect.functional.recall import recall
from recollect.recipe.recipe import Recipe
from recollect.recipe.resolve import RecipeLike, as_recipe, resolve_name
from recollect.report.devices import resolve_device
from recollect.report.tables import Table

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
        """Return the median time of a pass.

        Args:
            name: one of `PASSES`.
            of: ``"recipe"`` or one of `PEERS`.

        Raises:
            KeyError: a pass or a peer that was not measured.
        """
        return self.result[f"{of}, {name}"].median

    def ratio(self, name: str, peer: str) -> float:
        """Return the time of the recipe divided by that of a peer: the median over rounds.

        Args:
            name: one of `PASSES`.
            peer: one of `PEERS`.

        Raises:
            KeyError: a pass or a peer that was not measured.
        """
        times, peer_times = (self.result[f"{of}, {name}"].seconds for of in (_RECIPE, peer))
        return statistics.median(a / b for a, b in zip(times, peer_times, strict=True))

    def to_table(self) -> Table:
        """Return one row per pass, with sizes, device and versions in the caption."""
        facts = self.result.environment.facts()
        sizes = ", ".join(f"{name} = {size}" for name, size in self.shape.sizes.items())
        caption = (
            "training: forward and backward; decode: one token after T",
            f"×: time of the {_RECIPE} over the time of a peer",
            f"{sizes}, float32; medians over {self.result.rounds} alternating rounds",
            f"{facts['device']}; {facts['software']}; commit {facts['commit']}",
        )
        rows = [
            [
                name,
                *(format_duration(self.seconds(name, of)) for of in (_RECIPE, *PEERS)),
                *(f"{self.ratio(name, peer):.3g}" for peer in PEERS),
            ]
            for name in PASSES
        ]
        return Table(
            columns=["pass", _RECIPE, *PEERS, *(f"× {peer}" for peer in PEERS)],
            rows=rows,
            title=self.title,
            caption="\n".join(caption),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers with the recipe, the sizes and the environment, ready for JSON."""
        return {
            "suite": _RECIPE,
            "title": self.title,
            "recipe": self.recipe.to_dict(),
            "shape": self.shape.to_dict(),
            **json.loads(self.result.to_json()),
            "ratios": {
                f"{name}: {_RECIPE} / {peer}": self.ratio(name, peer)
                for name in PASSES
                for peer in PEERS
            },
        }

    def __str__(self) -> str:
        return self.to_table().to_text()

    def _repr_html_(self) -> str:
        return replace(self.to_table(), title=f"`{self.title}`").to_html(notebook=True)


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
        >>> timed.to_table().columns[:4]
        ['pass', 'recipe', 'gated_delta_net', 'SDPA']
    """
    numbers = {"K": K, "V": V, "H": H, "T": T, "B": B, "rounds": rounds}
    *sizes, rounds = (validate(name, int_check(1), size) for name, size in numbers.items())
    K, V, H, T, B = sizes
    resolve_device(device, argument_name="device")
    timed = as_recipe(recipe, "bench")
    shape = Shape(B=B, T=T, H=H, K=K, V=V, device=device)
    cases: list[Case] = []
    for prefix, other in ((_RECIPE, timed), (PEERS[0], as_recipe(PEERS[0], "bench"))):
        forward, training, decode = (f"{prefix}, {name}" for name in PASSES)
        cases += [
            recall_case(other, shape, name=forward),
            recall_case(other, shape, name=training, backward=True),
            _decode_case(other, shape, name=decode),
        ]
    forward, training, decode = (f"{PEERS[1]}, {name}" for name in PASSES)
    cases += [
        sdpa_case(shape, name=forward),
        sdpa_case(shape, name=training, backward=True),
        _sdpa_decode_case(shape, name=decode),
    ]
    result = run(
        cases,
        baseline=f"{PEERS[0]}, {PASSES[0]}",
        rounds=rounds,
        warmup=1,
        device=device,
        dtype=shape.dtype,
        progress=progress,
    )
    title = getattr(resolve_name(recipe), "name", timed.brief)
    return RecipeBenchmark(title=title, recipe=timed, shape=shape, result=result)


def _decode_case(recipe: Recipe, shape: Shape, *, name: str) -> Case:
    """Return a case of one token that continues the state after T tokens."""

    @torch.no_grad()
    def make() -> Callable[[], object]:
        arguments = initial_arguments(recipe, replace(shape, T=shape.T + 1))
        memory, params = arguments["initial_memory"], arguments["params"]

        def part(tokens: slice, **options: Any) -> Any:
            q, k, v = (arguments[name][:, tokens] for name in "qkv")
            gates = {name: x[:, tokens] for name, x in arguments["gates"].items()}
            return recall(recipe, q, k, v, gates, params=params, **options)

        _, state = part(slice(shape.T), initial_memory=memory)
        return torch.no_grad()(lambda: part(slice(shape.T, None), state=state))

    return Case(name=name, make=make)


def _sdpa_decode_case(shape: Shape, *, name: str) -> Case:
    """Return a case of one query over T + 1 stored keys and values."""

    def make() -> Callable[[], object]:
        q, k, v = sdpa_inputs(replace(shape, T=shape.T + 1))
        query = q[:, :, -1:].contiguous()
        return lambda: scaled_dot_product_attention(query, k, v)

    return Case(name=name, make=make)
