"""Equations of a recipe: its objective, its update, and its read rule.

Each line is composed of the signed terms that the members state
(`recollect.choices.equation_terms`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

from recollect.choices.algorithm.erasure import erasure_note, erasure_penalty
from recollect.choices.algorithm.normalized_steps import EPS, effective_batch_size, measures_overlap
from recollect.choices.equation_terms import (
    Gradient,
    Term,
    Terms,
    format_number,
    parenthesise,
    render_sum,
)
from recollect.choices.memory.base import Stack
from recollect.recipe.recipe import Recipe

__all__ = ["legend", "map_names", "objective", "read_rule", "write_rule"]


def _index(recipe: Recipe) -> str:
    n, i = recipe.associations_per_token, recipe.context.index
    return f"{i}j" if n > 1 else i


def objective(recipe: Recipe) -> str:
    """Return the objective at time t."""
    if recipe.solves_from_gram:
        penalty = Term(("‖W‖²",), recipe.ridge / 2)
        return f"{render_sum(_sum_over_context(recipe, _loss_terms(recipe)))} + {penalty}"
    i = _index(recipe)
    x = "k_i" if recipe.nonparametric else recipe.features.lift(f"k_{i}")
    loss = recipe.bias.term(recipe.memory.prediction_text(x, raw=f"k_{i}"), f"v_{i}")
    if recipe.algorithm.erasure:
        loss = (*loss, erasure_penalty(recipe, x, i))
    if i == "t":
        return render_sum(_sum_over_context(recipe, loss, separate=True))
    if recipe.memory.degree:
        return _local_objective(recipe, render_sum(loss))
    if recipe.associations_per_token > 1:
        total = f"Σ_(j≤{recipe.associations_per_token})"
        loss = loss if i == "tj" else _sum_over_context(recipe, loss)
        if len(loss) == 1:
            return str(Term((total, *loss[0].factors), loss[0].coefficient))
        return f"{total} ({render_sum(loss)})"
    penalty = recipe.algorithm.penalty_text(recipe)
    return render_sum(_sum_over_context(recipe, loss)) + (f" + {penalty}" if penalty else "")


def _loss_terms(recipe: Recipe) -> Terms:
    i = _index(recipe)
    x = recipe.features.lift(f"k_{i}")
    return recipe.bias.term(recipe.memory.prediction_text(x, raw=f"k_{i}"), f"v_{i}")


def _local_objective(recipe: Recipe, loss: str) -> str:
    """Return the objective of a local polynomial, with the ridge on its slopes."""
    ridge = recipe.algorithm.ridge
    assert not isinstance(ridge, str)  # solvers for one query have a constant ridge
    slopes = " + ".join(f"‖M{j}‖²" for j in range(1, (recipe.memory.degree or 0) + 1))
    slopes = slopes if recipe.memory.degree == 1 else f"({slopes})"
    penalty = Term((slopes,), ridge / 2)
    inside = render_sum((Term((loss,)), penalty))
    return recipe.context.total(f"({inside})" if ridge else loss)


def _sum_over_context(recipe: Recipe, terms: Terms, *, separate: bool = False) -> Terms:
    """Sum the terms of an association over the context, jointly or each separately."""
    total = recipe.context.total
    if len(terms) > 1 and not separate:
        return (Term((total(f"({render_sum(terms)})"),)),)
    return tuple(Term((total(" ".join(t.factors)),), t.coefficient) for t in terms)


def _gradient(recipe: Recipe, point: str) -> Gradient:
    """Return g_t at the weights ``point``, summed over the context."""
    memory, context, erasure = recipe.memory, recipe.context, recipe.algorithm.erasure
    i = _index(recipe)
    x, v = recipe.features.lift(f"k_{i}"), f"v_{i}"
    share = f"ρ_{i} " if recipe.algorithm.uses_normalized_steps else ""
    if not memory.linear or memory.gradient_text("e", x) is None:
        terms = (Term((context.total(f"{share}∇ℓ({point}; {x}, {v})"),)),)
        if erasure:
            terms = (*terms, Term((context.total(f"{point} h_{i} h_{i}ᵀ"),), erasure))
        return Gradient(terms=terms, compact=terms)
    prediction = memory.prediction_text(x, W=point)
    error = recipe.bias.error_terms(prediction, v)
    if erasure and recipe.bias.is_affine:
        first, *rest = error
        error = (Term(first.factors, first.coefficient + erasure), *rest)
    elif erasure:
        error = (*error, Term((prediction,), erasure))
    error = tuple(term for term in error if term.coefficient != 0)
    written_at = [
        share + (memory.gradient_text(parenthesise(" ".join(term.factors)), x) or "")
        for term in error
    ]
    parts = _sum_over_context(
        recipe,
        tuple(Term((text,), t.coefficient) for text, t in zip(written_at, error, strict=True)),
        separate=True,
    )
    compact = parts
    if len(error) > 1:
        gradient = share + (memory.gradient_text(f"({render_sum(error)})", x) or "")
        compact = _sum_over_context(recipe, (Term((gradient,)),))
    sees = recipe.bias.is_affine and recipe.step_sees_prediction
    return Gradient(
        terms=parts if context.horizon == 1 else compact,
        compact=compact,
        erase=parts[:1] if sees else (),
        write=parts[1:] if sees else parts,
    )


def _probe_terms(recipe: Recipe, point: str) -> tuple[Terms, Terms]:
    """Return the erasure and the write of a probe, as terms added to the memory."""
    probe, affine = recipe.bias.probe, recipe.bias.affine
    assert probe is not None and affine is not None  # a probe needs an affine bias
    lift, i = recipe.features.lift, _index(recipe)
    key, query = lift(f"k_{i}"), lift(f"w_{i}" if probe.at == "token" else f"k_{i}")
    into = query if probe.write == "probe" else key
    rate = probe.symbol("rate", i)
    error = parenthesise(recipe.memory.prediction_text(query, W=point))
    if probe.per == "key" and isinstance(rate, str):
        erase = Term((error, f"({rate} ⊙ {into})ᵀ"), -affine[0])
    else:
        erase = Term((error, f"{into}ᵀ")).times(rate, -affine[0])
    write = Term((f"v_{i}", f"{key}ᵀ")).times(recipe.algorithm.rate_factor_text(i), affine[1])
    return (erase,), (write,)


def write_rule(recipe: Recipe, *, full: bool = False) -> tuple[str, ...]:
    """Return the equations of the update at time t, one per line.

    If ``full``, they include the scales of normalised steps.
    """
    memory, retention, algorithm = recipe.memory, recipe.retention, recipe.algorithm
    if recipe.nonparametric:
        drop = (
            ""
            if recipe.num_past_associations is None
            else f", drop (k_i, v_i) of i ≤ t−{recipe.num_past_associations}"
        )
        return (f"keep (k_t, v_t){drop}",)
    if recipe.algorithm.inverse is not None:
        return algorithm.solution_equations(recipe)
    if recipe.solves_from_gram:
        x = recipe.features.lift("K")
        ridge = Term(("I",), recipe.ridge)
        return (f"W_t = Vᵀ {parenthesise(render_sum((Term(('κ(K, K)',)), ridge)))}⁻¹ {x}ᵀ",)
    if recipe.context.horizon is None:
        return _full_history_update(recipe)
    if algorithm.reduction == "mean":
        return _batch_mean_update(recipe, full=full)
    linked = retention.has_link and retention.is_additive
    W, A = memory.weight_symbol, "A" if linked else memory.weight_symbol
    several = recipe.associations_per_token > 1
    at = "tj" if several else "t"
    old, new = (f"{A}_(t,j−1)", f"{A}_(t,j)") if several else (f"{A}_(t−1)", f"{A}_t")
    vector, decay = memory.is_elementwise, retention.decay
    at_start = algorithm.batch_size > 1 or (_has_link_gates(recipe) and not several)
    point = f"{W}°" if at_start else f"{W}_(t,j−1)" if several else f"{W}_(t−1)"
    if decay is not None and decay.when == "before":
        point = str(decay.decayed_text(point, at, vector=vector))
    if recipe.bias.probe is not None:
        erase, write = _probe_terms(recipe, point)
        lines, step = (), (*erase, *write)
        if algorithm.slots:  # the terms have their rates
            assert algorithm.rate_field is not None
            terms = tuple(-term for term in step)
            gradient = Gradient(terms=terms, compact=terms, erase=terms[:1], write=terms[1:])
            unit_rate = replace(cast(Any, algorithm), **{algorithm.rate_field: 1.0})
            lines, step = unit_rate.update_equations(gradient, at)
    else:
        gradient = _gradient(recipe, point)
        lines, step = algorithm.update_equations(gradient, at)
    equations = [*lines]
    if algorithm.update_every == "batch":
        equations += _batch_end_update(recipe, lines, step, A)
    else:
        moves = retention.state_equations(old, new, step, at=at, vector=vector)
        if linked and not recipe.links_at_batch_end:
            read = f"{W}_(t,j)" if several else f"{W}_t"
            moves = (f"{moves[0]},   {read} = {_link_text(recipe, new)}", *moves[1:])
        equations += [";   ".join((*lines, *moves))] if len(lines) == 1 else moves
        equations = equations[1:] if len(lines) == 1 else equations
    if several:
        n = recipe.associations_per_token
        ends = [f"{A}_(t,0) = {A}_(t−1)", f"{A}_t = {A}_(t,{n})"]
        if linked and not recipe.links_at_batch_end:
            ends += [f"{W}_(t,0) = {_link_text(recipe, f'{A}_(t−1)')}", f"{W}_t = {W}_(t,{n})"]
        equations.append(f"j = 1..{n};   {',   '.join(ends)}")
        if decay is not None:
            equations.append("the decay acts on the first sub-step")
    equations += [*_key_rate_line(recipe), *(_step_scales(recipe, point) if full else [])]
    equations += _unnormalized_note(recipe)
    equations += _boundary_notes(recipe, " ".join((*equations, *read_rule(recipe))))
    return tuple(equations)


def _key_rate_line(recipe: Recipe) -> list[str]:
    """Return the equation of η_t if it depends on the key."""
    algorithm, affine = recipe.algorithm, recipe.bias.affine
    if not algorithm.rate_depends_on_key or affine is None:
        return []
    return [f"η_t = {algorithm.key_rate_text(recipe.features.lift('k_t'), affine[0])}"]


def _step_index(recipe: Recipe) -> str:
    """Return the index of the associations of a normalised step."""
    algorithm = recipe.algorithm
    if algorithm.uses_line_search:
        return "i" if algorithm.update_every == "batch" else _index(recipe)
    return "s" if algorithm.reduction == "mean" else _index(recipe)


def _step_symbols(recipe: Recipe, *, full: bool) -> list[str]:
    """Return descriptions of the scales of normalised steps, and a link to the documentation."""
    algorithm, i, lines = recipe.algorithm, _step_index(recipe), list[str]()
    if measures_overlap(algorithm):
        lines.append(
            "r_t: in [0, 1], shortens the step of a key that overlaps earlier keys of its batch"
        )
    if algorithm.uses_normalized_steps:
        lines.append(f"ρ_{i}: scale at which a step of η = 1 corrects the error of association {i}")
    if algorithm.uses_line_search:
        lines.append("λ_t: length of the step that leaves the smallest errors of its context")
    if not lines:
        return []
    if recipe.memory.bounded:
        lines.append(f"v̂_{i}: attainable target, the output closest to v_{i} that the norm allows")
    letters = ", ".join(line.partition("_")[0] for line in lines)
    hint = "" if full else f"equations of {letters}: full=True or --full; "
    return [*lines, f"{hint}reasons: docs/explain.md#normalised-steps"]


def _step_scales(recipe: Recipe, point: str) -> list[str]:
    """Return the equations of the scales of normalised steps: r, ρ and λ."""
    lines: list[str] = []
    if measures_overlap(recipe.algorithm):
        lines.append(
            "r_t = max(0, u_t),   u_t = 1 − Σ_j |cos(k_t, k_j)| u_j / "
            f"{effective_batch_size(recipe.algorithm)} over the earlier tokens j of the inner batch"
        )
    i = _step_index(recipe)
    if recipe.algorithm.uses_line_search:
        x, eps = recipe.features.lift(f"k_{i}"), format_number(EPS)
        prediction = recipe.memory.prediction_text(x, raw=f"k_{i}", W=point)
        target, bounds = recipe.bias.target or 1.0, []
        error = render_sum((Term((prediction,)), Term((f"v_{i}",), -target)))
        if recipe.memory.bounded:
            error = f"{prediction} − v̂_{i}"
            value = recipe.memory.nearest_output_text(str(Term((f"v_{i}",), target)), f"k_{i}")
            bounds = f"v̂_{i} = {value}".split(",   ")
        moved = f"|∂_D M(k_{i})|²"
        total = "Σ_i γ_i " if i == "i" else ""
        return [
            *lines,
            f"λ_t = max(0, −{total}⟨{error}, ∂_D M(k_{i})⟩) / {total}({moved} + {eps}‖D‖²), "
            f"D = the step at rate 1, ∂_D M at {point}",
            *bounds,
        ]
    if not recipe.algorithm.uses_normalized_steps:
        return lines
    memory, x, W = recipe.memory, recipe.features.lift(f"k_{i}"), recipe.memory.weight_symbol
    prediction, target = memory.prediction_text(x, raw=f"k_{i}", W=point), recipe.bias.target or 1.0
    error = render_sum((Term((prediction,)), Term((f"v_{i}",), -target)))
    value = str(Term((f"v_{i}",), target))
    G = f"∂ℓ_{i}/∂{W}"
    size = f"‖{G}‖²"
    if recipe.retention.has_link:
        L = recipe.retention.link_lipschitz
        size = f"gain({G})" if L is None else str(Term((size,), L))
    above, bounds = f"⟨{error}, e_{i}⟩", []
    if memory.bounded:
        above = f"max(0, ⟨{prediction} − v̂_{i}, e_{i}⟩)"
        bounds = f"v̂_{i} = {memory.nearest_output_text(value, f'k_{i}')}".split(",   ")
    below = f"{size} + {format_number(EPS)}‖e_{i}‖²"
    return [*lines, f"ρ_{i} = {above} / ({below}),   e_{i} = ∂ℓ_{i}/∂M at {point}", *bounds]


def _unnormalized_note(recipe: Recipe) -> list[str]:
    """Return a note if the read divides by a sum over keys, but the gradient does not."""
    if not recipe.uses_kernel_rows or recipe.memory.read.normalize != "sum":
        return []
    (W, *others), key = _reading_maps(recipe), f"k_{_index(recipe)}"
    x, divisor = recipe.features.lift(key), _normalizer(recipe, "j", key)
    gradient = f"∂({W} {x})/∂{W} counts as {x}{_same_for_other_maps(others)}"
    return [f"{gradient}: {divisor} divides what is read, and no step"]


def _has_link_gates(recipe: Recipe) -> bool:
    """Whether the link has gates. They are those of the token of the error."""
    retention = recipe.retention
    decay = {gate.name for gate in retention.decay.gates()} if retention.decay else set[str]()
    has_gates = any(gate.name not in decay for gate in retention.gates())
    return retention.has_link and retention.is_additive and has_gates


def _link_text(recipe: Recipe, state: str, at: str = "_t") -> str:
    """Return the link of a state, with the gates of the token ``at``."""
    return re.sub(r"_t\b", at, recipe.retention.link_text().replace("A_t", state))


def _boundary_notes(recipe: Recipe, text: str) -> list[str]:
    """Return the equation of W°, the weights of the errors, if it occurs in ``text``."""
    W, b, retention = recipe.memory.weight_symbol, recipe.algorithm.batch_size, recipe.retention
    if f"{W}°" not in text:
        return []
    gated = _has_link_gates(recipe)
    if b == 1:
        return [f"{W}° = {_link_text(recipe, 'A_(t−1)')}"]
    start = f"at the start of the inner batch of {b}"
    if not (
        gated
        or recipe.links_at_batch_end
        or (retention.has_link and recipe.algorithm.update_every == "batch")
    ):
        return [f"{W}° = {W} {start}"]
    line = f"{W}° = {_link_text(recipe, 'A°', '°')}: A {start}"
    line += ", gates of its first token" if gated else ""
    first = recipe.links_at_batch_end and retention.links_after_first_token
    return [f"{line}; from its second token on, A after the first" if first else line]


def _batch_end_update(recipe: Recipe, lines: tuple[str, ...], step: Terms, A: str) -> list[str]:
    """Return one update at the end of each inner batch; its tokens read W°."""
    retention, algorithm, W = recipe.retention, recipe.algorithm, recipe.memory.weight_symbol
    decay, b = retention.decay, algorithm.batch_size
    moved = tuple(
        Term(tuple(f.replace("η_t", "η̄") for f in term.factors), term.coefficient) for term in step
    )
    vector = recipe.memory.is_elementwise
    moves = retention.state_equations(f"{A}°", f"{A}_t", moved, at="b", vector=vector)
    moves = (*moves[:-1], f"{moves[-1]} at the last token of the inner batch")
    text = " ".join((*lines, *moves))
    bars = [] if decay is None or not isinstance(decay.alpha, str) else ["α_b = Π α_t"]
    bars += ["η̄ = mean η_t"] if "η̄" in text else []
    bars += ["θ̄ = mean θ_s"] if "θ̄" in text else []
    bars += ["Σ_s"] if "Σ_s" in text else []
    ends = f"tokens in it read {W}°" + (", S° = S at its start" if "S°" in text else "")
    over = [f"{', '.join(bars)} over the inner batch; {ends}"] if bars else []
    return [*moves, *(over or [f"tokens in the inner batch of {b} read {W}°"])]


def _batch_mean_update(recipe: Recipe, *, full: bool) -> tuple[str, ...]:
    """Return the update by the mean over the open inner batch, as in TTT."""
    algorithm, W, b = recipe.algorithm, recipe.memory.weight_symbol, recipe.algorithm.batch_size
    x = recipe.features.lift("k_s")
    share = "ρ_s " if algorithm.uses_normalized_steps else ""
    slope = f"{share}∇ℓ({W}°; {x}, v_s)"
    if algorithm.erasure:
        erased = Term((f"{W}° h_s h_sᵀ",), algorithm.erasure)
        slope = parenthesise(render_sum((Term((slope,)), erased)))
    gradient = Term((slope,)).times(algorithm.rate_factor_text("s"))
    offset, place = algorithm.symbol("offset"), "1/(place in the batch)"
    if offset == 0.0:
        tau = place
    else:
        tau = f"max(0, {render_sum((Term((place,)), Term(()).times(offset)))})"
    return (
        f"{W}_t = {W}° − τ_t Σ_(s≤t) {gradient}",
        f"τ_t = {tau}; {W}° and s begin with the inner batch of {b}",
        *(_step_scales(recipe, f"{W}°") if full else ()),
    )


def _full_history_update(recipe: Recipe) -> tuple[str, ...]:
    """Return gradient steps on all past tokens, from the initial memory, at each token."""
    W, n = recipe.memory.weight_symbol, recipe.algorithm.updates_per_token
    if n == 1:
        step = _gradient(recipe, f"{W}_0").scaled(recipe.algorithm.rate_factor_text(), -1.0)
        return (f"{W}_t = {render_sum((Term((f'{W}_0',)), *step))}",)
    step = _gradient(recipe, W).scaled(recipe.algorithm.rate_factor_text(), -1.0)
    return (f"{W} ← {render_sum((Term((W,)), *step))}", f"{n} times from {W}_0, at every t")


def read_rule(recipe: Recipe) -> tuple[str, ...]:
    """Return the read rule at time t, then the meaning of its symbols."""
    memory, read, W = recipe.memory, recipe.memory.read, recipe.memory.weight_symbol
    if recipe.nonparametric:
        return (_attention_rule(recipe),)
    if recipe.solves_from_gram:
        likeness = recipe.features.similarity("k", "q")
        return ("y_t = W_t φ(q_t), from the rows i ≤ t", f"κ(k, q) = {likeness}")
    q, k = recipe.features.lift("q_t"), recipe.features.lift("k_t")
    weights = f"{W}_(t−1)" if read.when == "before" else f"{W}_t"
    weights += "ᵀ" * read.transposed
    line = memory.prediction_text(q, raw="q_t", W=weights)
    n = "n_(t−1)" if read.when == "before" else "n_t"
    notes: list[str] = []
    if recipe.uses_kernel_rows:
        notes.append(_kernel_rows_note(recipe))
    elif read.normalize != "none":
        below = f"({n}·{q})" if read.normalize == "sum" else f"max(|{n}·{q}|, 1)"
        line = f"{line} / {below}"
        zero = "; y_t = 0 where that is 0" if read.normalize == "sum" else ""
        notes.append(f"n_t: the write with v_t = 1{zero}")
    if read.bonus != 0.0:
        u = read.symbol("bonus")
        match = f"⟨{q}, u ⊙ {k}⟩" if isinstance(u, str) else f"⟨{q}, {k}⟩"
        more = Term((match, "v_t"), 1.0 if isinstance(u, str) else u)
        line = render_sum((Term((line,)), more))
    if recipe.algorithm.update_every == "batch":
        line = line.replace(f"{W}_t", f"{W}°")
    elif recipe.links_at_batch_end:
        first = f"{W}° before the first token"
        if recipe.retention.links_after_first_token:
            first = f"{_link_text(recipe, 'A_t')} at the first token"
        notes.append(f"{W}_t: {first} of the inner batch, then moved as A_t is, without the link")
    return (f"y_t = {line}", *notes)


def _kernel_rows_note(recipe: Recipe) -> str:
    """Return the meaning of a map over infinitely many features."""
    x, likeness = recipe.features.lift("x"), recipe.features.similarity("k_i", "x")
    (W, *others), divided = _reading_maps(recipe), ""
    if recipe.memory.read.normalize == "sum":
        divided = f" / {_normalizer(recipe, 'i', 'x')}"
        if recipe.retention.decay is not None:
            divided += ", m_i starts at 1, and decays like u_i"
    rows = f"κ(k_i, x) = {likeness}, a row u_i per key{_same_for_other_maps(others)}"
    return f"{W} {x} = Σ_i κ(k_i, x) u_i{divided}, {rows}"


def _normalizer(recipe: Recipe, i: str, x: str) -> str:
    """Return the divisor of a normalised read."""
    weight = "" if recipe.retention.decay is None else f"m_{i} "
    return f"Σ_{i} {weight}κ(k_{i}, {x})"


def _reading_maps(recipe: Recipe) -> list[str]:
    """Return the symbols of the maps that read features."""
    maps = recipe.memory.maps(1, 1) if isinstance(recipe.memory, Stack) else ()
    return [m.name for m in maps if m.reads_features] or [recipe.memory.weight_symbol]


def _same_for_other_maps(others: list[str]) -> str:
    return f", likewise for {', '.join(others)}" if others else ""


def _attention_rule(recipe: Recipe) -> str:
    if recipe.memory.degree:
        return "y_t = w"
    total = recipe.context.total("").rstrip()
    normalized = recipe.bias.is_affine and recipe.bias.sees_prediction
    return f"y_t = {total} v_i" + (f" / {total}" if normalized else "")


def legend(recipe: Recipe, *, full: bool = False) -> tuple[str, ...]:
    """Return descriptions of the symbols in the equations of `write_rule`."""
    notes = [note for part in recipe.members() for note in part.notes()]
    if full and recipe.algorithm.uses_normalized_steps and recipe.retention.link_lipschitz is None:
        notes.append("gain(G): effect on W of a step of A along G, ⟨G, J G⟩ with J = ∂W/∂A")
    algorithm = recipe.algorithm
    sums_batch = algorithm.reduction == "mean" or algorithm.update_every == "batch"
    notes += erasure_note(recipe, "s" if sums_batch else _index(recipe))
    decay = recipe.retention.decay
    if not recipe.nonparametric and not recipe.memory.linear:
        maps = ", ".join(map_names(recipe))
        if maps:
            notes.insert(0, f"W: {maps}, in order of application")
        if decay is not None and decay.per in ("key", "key_value"):
            notes.append("channels of keys decay in the first map, other maps decay by their mean")
        if decay is not None and decay.per in ("value", "key_value"):
            notes.append("channels of values decay in the last map, other maps decay by their mean")
        if recipe.algorithm.per_value:
            notes.append("rates of value channels act in the last map, other maps take their mean")
    return tuple(dict.fromkeys((*_step_symbols(recipe, full=full), *notes)))


def map_names(recipe: Recipe) -> list[str]:
    """Return the names of the maps of a deep memory; an empty list for other memories."""
    memory = recipe.memory
    return [m.name for m in memory.maps(1, 1)] if isinstance(memory, Stack) else []
