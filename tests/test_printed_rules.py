"""The rule that an explanation prints, evaluated as printed, gives the outputs of the layer.

The evaluator reads the printed lines only: products, sums, transposes, norms and the functions that
the lines name. It shares no formula with the library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect as rc

R, algorithm, bias, memory, retention = (
    rc.Recipe, rc.algorithm, rc.bias, rc.memory, rc.retention,
)  # fmt: skip
Ball, Bregman, Decay, ElasticNet = (
    retention.Ball, retention.Bregman, retention.Decay, retention.ElasticNet,
)  # fmt: skip
Descent, Momentum = algorithm.GradientDescent, algorithm.Momentum


@dataclass
class Symbol:
    """A number, a vector [n, 1] or a matrix; ``*`` is the product of matrices, ``@`` of entries."""

    x: Tensor

    def __mul__(self, other: Any) -> Symbol:
        a, b = self.x, value(other)
        entries = a.dim() == 0 or b.dim() == 0 or a.shape == b.shape  # matrices are not square
        return Symbol(a * b if entries else torch.matmul(a, b))

    def __rmul__(self, other: Any) -> Symbol:
        return Symbol(value(other) * self.x)

    def __matmul__(self, other: Any) -> Symbol:
        return Symbol(self.x * value(other))

    def __add__(self, other: Any) -> Symbol:
        return Symbol(self.x + value(other))

    def __sub__(self, other: Any) -> Symbol:
        return Symbol(self.x - value(other))

    def __neg__(self) -> Symbol:
        return Symbol(-self.x)

    def __truediv__(self, other: Any) -> Symbol:
        return Symbol(torch.where(self.x == 0, 0.0, self.x / value(other)))  # 0/0 is 0

    def __rtruediv__(self, other: Any) -> Symbol:
        return Symbol(value(other) / self.x)

    def __pow__(self, other: Any) -> Symbol:
        return Symbol(self.x ** value(other))


def value(x: Any) -> Tensor:
    return x.x if isinstance(x, Symbol) else torch.tensor(float(x), dtype=torch.float64)


def entrywise(function: Callable[..., Tensor]) -> Callable[..., Symbol]:
    return lambda *xs: Symbol(function(*map(value, xs)))


FUNCTIONS: dict[str, Any] = {
    "sign": entrywise(torch.sign),
    "abs": entrywise(torch.abs),
    "arctan": entrywise(torch.atan),
    "tanh": entrywise(torch.tanh),
    "sigmoid": entrywise(torch.sigmoid),
    "exp": entrywise(torch.exp),
    "softplus": entrywise(torch.nn.functional.softplus),
    "softmax": entrywise(lambda A: A.softmax(-1)),
    "max": entrywise(torch.maximum),
    "min": entrywise(torch.minimum),
    "Diag": entrywise(lambda a: torch.diag(a.flatten())),
    "T": entrywise(lambda a: a.mT),
    "norm": lambda a, q=2.0: Symbol(torch.linalg.vector_norm(value(a), ord=q)),
}  # fmt: skip
POWERS = {"²": "2", "³": "3"}
NAME = re.compile(r"[A-Za-zα-ω]+(?:_\((?:t-1|t,j-1|t,j)\)|_tj|_t|°)?(?!\w*\()ᵀ?")


def evaluate(text: str, names: dict[str, Any]) -> Any:
    """Return the value of an expression of an equation."""

    def named(match: re.Match[str]) -> str:
        name = match[0].removesuffix("ᵀ")
        if name in FUNCTIONS or name == "n":  # of a norm already translated
            return match[0]
        entry = f"N[{name!r}]"
        return f"T({entry})" if match[0].endswith("ᵀ") else entry

    text = re.sub(r"‖([^‖]*)‖(?:_([\d.]+))?", r"norm(\1;\2)", text)
    text = re.sub(r"\|([^|]*)\|", r"abs(\1)", text)
    text = NAME.sub(named, text)
    text = text.replace(";)", ")").replace(";", ", ")
    text = re.sub("[²³]", lambda m: f"**{POWERS[m[0]]}", text).replace("^", "**")
    text = text.replace("⊙", "@").replace("·", "*")
    text = re.sub(r"(?<=[\])])\s*(?=[A-Za-z(])", " * ", text)
    text = re.sub(r"(?<=[\])\d])\s+(?=[A-Za-z(\d])", " * ", text)
    functions = {**FUNCTIONS, **names.get("functions", {})}
    return eval(text, {"__builtins__": {}}, {**functions, "N": names})


def functions_of(legend: list[str]) -> dict[str, Any]:
    """Return functions that the legend defines, such as soft(z, τ)."""
    functions: dict[str, Any] = {}
    for line in legend:
        match = re.fullmatch(r"(\w+)\((\w), (\w)\) = (.*)", line)
        if match:
            _, *letters, body = match.groups()
            constants = {"π": Symbol(torch.tensor(math.pi, dtype=torch.float64))}

            def function(
                *xs: Any, letters: list[str] = letters, body: str = body, constants: Any = constants
            ) -> Any:
                arguments = {x: Symbol(value(v)) for x, v in zip(letters, xs, strict=True)}
                return evaluate(body, {**constants, **arguments})

            functions[match[1]] = function
    return functions


def printed_outputs(recipe: rc.Recipe, inputs: dict[str, Tensor], T: int) -> Tensor:
    """Return outputs [T, V] of one head by the printed rule, from a memory of zeros."""
    printed = rc.explain(recipe)
    blocks = (printed.write_equations, printed.read_equations, printed.symbols)
    write, read, legend = ([line.replace("−", "-") for line in block] for block in blocks)
    b, several = recipe.algorithm.batch_size, recipe.associations_per_token > 1
    new, old = ("_(t,j)", "_(t,j-1)") if several else ("_t", "_(t-1)")
    equations = [x for line in write for x in re.split(",   |;   ", line) if " = " in x]
    rules = dict(x.split(" = ", 1) for x in equations)
    moves = {x: y for x, y in rules.items() if x.endswith(new)}
    start = rules.get("W°", "").partition(": A at the start")[0]
    reads = next((x for x in read if x.startswith("W_t: ")), "")  # updates of W inside a batch
    names: dict[str, Any] = {"functions": functions_of(legend)}

    def of_token(t: int, suffix: str, j: int | None = None) -> dict[str, Symbol]:
        token = {x: y[t] if j is None or x not in "kvη" else y[t, j] for x, y in inputs.items()}
        return {x + suffix: Symbol(y.unsqueeze(-1) if y.dim() else y) for x, y in token.items()}

    zero = torch.zeros(inputs["v"].shape[-1], inputs["k"].shape[-1], dtype=torch.float64)
    A = S = W = Symbol(zero)
    linked = f"A{new}" in moves
    if linked and f"W{new}" in moves:
        W = evaluate(moves[f"W{new}"], {**names, f"A{new}": A, **of_token(0, "_t")})
    outputs = []
    for t in range(T):
        names.update(of_token(t, "_t"))
        if t % b == 0:
            names.update({"A°": A, "W°": W, **of_token(t, "°")})
        for j in range(recipe.associations_per_token):
            names.update(of_token(t, "_tj", j) if several else {})
            if j > 0 and "the decay acts on the first sub-step" in write:
                names["α_tj"] = Symbol(torch.ones(()).double())
            names.update({f"A{old}": A, f"W{old}": W, "S_(t-1)": S, "A_(t-1)": A})
            if "W_(t,0)" in rules and j == 0:
                names["W_(t,j-1)"] = evaluate(rules["W_(t,0)"], names)
            if "second token" in rules.get("W°", "") and t % b == 1:
                names["A°"] = A
            if start and not start.startswith("W at the start"):
                names["W°"] = evaluate(start, names)
            for name, rule in moves.items():
                names[name] = evaluate(rule, names)
            A, S = names[f"A{new}" if linked else f"W{new}"], names.get("S_t", S)
            if reads:
                names["A_(t-1)"] = W if t % b else names["W°"]
                names["W_t"] = evaluate(moves["A_t"], names)
                first = re.match(r"W_t: (\S+) at the first token", reads)
                if first and t % b == 0:
                    names["W_t"] = evaluate(first[1], names)
            W = names["W_t" if reads else f"W{new}"]
        names["W_t"] = W
        outputs.append(value(evaluate(read[0].removeprefix("y_t = "), names)).flatten())
    return torch.stack(outputs)


LETTERS = {"lr": "η", "log_decay": "α", "momentum": "θ", "tau": "τ", "radius": "r"}


def check(recipe: rc.Recipe, T: int = 7, K: int = 3, V: int = 2) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    n, sizes = recipe.associations_per_token, recipe.axes(K, V)
    several = [n] if n > 1 else []
    q, k, v = random(1, T, 1, K), random(1, T, 1, *several, K), 2 * random(1, T, 1, *several, V)
    gates: dict[str, Tensor] = {}
    for gate in recipe.gates():
        lead = several if recipe.per_association(gate) else []
        x = random(1, T, 1, *lead, *(sizes[axis] for axis in gate.axes)).sigmoid()
        gates[gate.name] = x.log() if gate.name == "log_decay" else x
    y, _ = rc.recall(recipe, q, k, v, gates, engine="reference")
    inputs = {"q": q[0, :, 0], "k": k[0, :, 0], "v": v[0, :, 0]}
    for name, x in gates.items():
        inputs[LETTERS[name]] = (x.exp() if name == "log_decay" else x)[0, :, 0]
    torch.testing.assert_close(printed_outputs(recipe, inputs, T), y[0, :, 0])


def descent(link: rc.retention.Retention, **options: Any) -> rc.Recipe:
    return R(retention=link, algorithm=Descent(**options))


SOFT = ElasticNet(tau="input")
EDGE = {"link_every": "batch", "decay": Decay()}
CASES: dict[str, rc.Recipe] = {
    "no link": descent(Decay()),
    "no link, decay first": descent(Decay(when="before")),
    "no link, inner batch": descent(Decay(per="key"), batch_size=3),
    "threshold": descent(SOFT),
    "threshold and decay": descent(ElasticNet(tau="input", decay=Decay(per="value"))),
    "threshold, decay first": descent(ElasticNet(tau="input", decay=Decay(when="before"))),
    "threshold, smooth": descent(ElasticNet(tau="input", smooth=True)),
    "threshold, constant": descent(ElasticNet(tau=0.3)),
    "threshold, proximal": descent(ElasticNet(tau="input", form="proximal", decay=Decay())),
    "threshold, inner batch": descent(SOFT, batch_size=3),
    "threshold at the border": descent(ElasticNet(tau="input", **EDGE), batch_size=3),
    "threshold, border of one": descent(ElasticNet(tau="input", **EDGE)),
    "threshold, sub-steps": descent(SOFT, updates_per_token=2),
    "threshold and momentum": R(retention=SOFT, algorithm=Momentum()),
    "threshold, dot product": R(retention=SOFT, bias=bias.DotProduct(), algorithm=Descent(lr=0.5)),
    "ball": descent(Ball(radius="input")),
    "ball, constant": descent(Ball(decay=Decay())),
    "ball, inner batch": descent(Ball(radius="input"), batch_size=3),
    "ball at the border": descent(Ball(radius="input", **EDGE), batch_size=3),
    "ball, sub-steps": descent(Ball(decay=Decay()), updates_per_token=2),
    "power": descent(retention.Lq(q=4)),
    "power, inner batch": descent(retention.Lq(q=3), batch_size=3),
    "power, printed, at the border": descent(
        retention.Lq(form="as_published", **EDGE), batch_size=3
    ),
    "sigmoid": descent(Bregman(link_function="sigmoid", decay=Decay())),
    "tanh at the border": descent(Bregman(link_function="tanh", **EDGE), batch_size=3),
    "softplus, inner batch": descent(Bregman(link_function="softplus"), batch_size=3),
    "exp": descent(Bregman(link_function="exp"), lr=0.01),
    "simplex": descent(retention.Simplex()),
    "simplex of 2, inner batch": descent(retention.Simplex(scale=2.0), batch_size=3),
    "simplex at the border": descent(retention.Simplex(**EDGE), batch_size=3),
}


@pytest.mark.parametrize("case", CASES)
def test_the_printed_rule_gives_the_outputs(case: str) -> None:
    check(CASES[case])


def test_the_error_is_taken_with_the_current_threshold() -> None:
    """τ is that of the written token, not of the token before: 0.5, 1.0 and not 0.5, 1.5."""
    recipe = R(retention=SOFT, algorithm=Descent(lr=1.0))
    one, tau = torch.ones(1, 2, 1, 1).double(), torch.tensor([0.5, 0.0]).double()
    y, _ = rc.recall(recipe, one, one, one, {"tau": tau.view(1, 2, 1)})
    assert y.flatten().tolist() == [0.5, 1.0]
    inputs = {"q": one[0, :, 0], "k": one[0, :, 0], "v": one[0, :, 0], "τ": tau}
    assert printed_outputs(recipe, inputs, 2).flatten().tolist() == [0.5, 1.0]
    assert rc.explain(recipe).write_equations == (
        "A_t = A_(t−1) − (W° k_t) k_tᵀ + v_t k_tᵀ,   W_t = soft(A_t, τ_t)",
        "W° = soft(A_(t−1), τ_t)",
    )
