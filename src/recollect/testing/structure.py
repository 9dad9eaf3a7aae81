"""Checks of the structure that members declare against their code.

Engines run the declared structure (an affine error, a linear memory, no link) in place of the
member's code, so a false declaration gives wrong results. Each check raises AssertionError with one
sentence that names the member and the false claim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from recollect.choices.algorithm.base import Algorithm, Step
from recollect.choices.bias.base import Bias
from recollect.choices.context.base import Context
from recollect.choices.features.base import Features, Kernel
from recollect.choices.member import Member
from recollect.choices.memory.base import Memory
from recollect.choices.retention.base import Retention
from recollect.recipe.recipe import Recipe
from recollect.testing.compare import describe_check, require
from recollect.testing.contexts import check_context
from recollect.testing.declared import normal, require_equal
from recollect.testing.inputs import draw_params
from recollect.testing.memories import check_memory
from recollect.testing.user_code import check_user_code, sample_numbers

__all__ = [
    "CHECKS",
    "LINK_SIZES",
    "apply_features",
    "check_structure",
]


def check_structure(instance: Member) -> list[tuple[str, str | None]]:
    """Check that the declarations of a member are true.

    Returns:
        The name of each check in `CHECKS` that applies, and the reason if it was skipped.

    Raises:
        AssertionError: the member and the claim that is false.
    """
    return [
        (describe_check(check), check(instance))
        for kind, checks in CHECKS.items()
        if isinstance(instance, kind)
        for check in checks
    ]


# -- bias --------------------------------------------------------------------------------------


def check_bias_gradients(bias: Bias) -> str | None:
    """`error` is autograd's gradient of `loss`, and both are the central finite difference."""
    count, V, h, title = 40, 3, 1e-6, bias.title
    p, v = normal(count, V, seed=1), normal(count, V, seed=2)
    gates = sample_numbers(bias, (count,), V, 3)
    error = bias.error(p, v, gates)
    if not bias.defines_loss:
        require(torch.isfinite(error).all(), f"{title}: error is not finite")
        return "it defines no loss to compare error with"
    point = p.clone().requires_grad_()
    (slope,) = torch.autograd.grad(bias.loss(point, v, gates).sum(), point)
    require_equal(error, slope, f"{title}: error is not the gradient of loss, but {{error}} off")
    for j in range(V):
        step = h * torch.eye(V).double()[j]
        quotient = (bias.loss(p + step, v, gates) - bias.loss(p - step, v, gates)) / (2 * h)
        # Central differences err by h² f⁽³⁾ and by rounding/h ≈ 1e-10. These draws do not hit kinks
        # (a threshold, a sign), but losses with p < 2 are steep near e = 0.
        is_smooth = (p - v)[:, j].abs() > 1e-3
        sentence = f"{title}: error is not the slope of loss, but {{error}} off"
        require_equal(error[is_smooth, j], quotient[is_smooth], sentence, 1e-5)
    return None


def check_affinity(bias: Bias) -> str | None:
    """``affine`` is true of `error`."""
    if bias.affine is None:
        return "it declares affine=None"
    p, v, gates = normal(20, 3, seed=1), normal(20, 3, seed=2), sample_numbers(bias, (20,), 3, 3)
    a, b = bias.affine
    require_equal(
        bias.error(p, v, gates),
        a * p - b * v,
        f"{bias.title} declares affine=({a:g}, {b:g}), and its error is not "
        f"{a:g}·prediction − {b:g}·value, but {{error}} off",
    )
    return None


def check_target(bias: Bias) -> str | None:
    """``target`` minimises the loss: no error points away from it."""
    if bias.target is None:
        return "it declares no target"
    p, v = normal(60, 3, seed=1), normal(60, 3, seed=2)
    error = bias.error(p, v, sample_numbers(bias, (60,), 3, 3))
    minimum = float(((p - bias.target * v) * error).sum(-1).detach().min())
    require(
        minimum >= -1e-12,
        f"{bias.title} declares target={bias.target:g}, and an error points away from "
        f"{bias.target:g}·value: ⟨prediction − {bias.target:g}·value, error⟩ = {minimum:.1e}",
    )
    return None


def check_perfect_prediction(bias: Bias) -> None:
    """If the prediction is the value, the error and its outer gradient are finite."""
    v, gates = normal(4, 3, seed=2), sample_numbers(bias, (4,), 3, 3)
    point = v.clone().requires_grad_()
    error = bias.error(point, v, gates)
    case = "where the prediction is the value"
    require(torch.isfinite(error).all(), f"{bias.title}: error is not finite {case}")
    if error.requires_grad:
        (slope,) = torch.autograd.grad(error.sum(), point)
        require(torch.isfinite(slope).all(), f"{bias.title}: error has no finite slope {case}")


# -- retention ---------------------------------------------------------------------------------


def _link_gates(retention: Retention) -> dict[str, Tensor]:
    """Return quantities of a link, ``[..., 1, 1]``."""
    gates = {name: torch.full((1, 1), x).double() for name, x in retention.constants().items()}
    for item in (*retention.gates(), *retention.params()):
        gates[item.name] = torch.full((1, 1), 0.3 + (item.range.low or 0.0)).double()
    return gates


def check_link(retention: Retention, size: float = 1.0) -> None:
    """The link is finite and differentiable, and the identity if `has_link` is false.

    ``size`` is the scale of the entries of A.
    """
    A = (size * normal(2, 3, 4, seed=1)).requires_grad_()
    W = retention.link(A, _link_gates(retention))
    at = f"{retention.title}: link(A) of entries of size {size:g}"
    require(W.shape == A.shape, f"{at} has another shape than A")
    require(torch.isfinite(W).all(), f"{at} is not finite")
    (slope,) = torch.autograd.grad(W.square().sum() + W.sum(), A)
    require(torch.isfinite(slope).all(), f"{at} has no finite gradient")
    if not retention.has_link:
        error = float((W - A).detach().abs().max())
        require(
            torch.equal(W, A),
            f"{retention.title} declares has_link=False, which is W = A, and its link is not the "
            f"identity, but {error:.1e} off",
        )


def check_links(retention: Retention) -> None:
    """The link is finite and differentiable for small and large entries, and A if not linked."""
    for size in LINK_SIZES:
        check_link(retention, size)


def check_link_gradients(retention: Retention) -> None:
    """The link's gradient is its slope."""
    A, direction, h = normal(3, 4, seed=1), normal(3, 4, seed=2), 1e-6
    gates = _link_gates(retention)
    point = A.clone().requires_grad_()
    out = normal(3, 4, seed=3)
    (slope,) = torch.autograd.grad((retention.link(point, gates) * out).sum(), point)
    plus, minus = (retention.link(A + s * h * direction, gates) for s in (1, -1))
    quotient = float(((plus - minus) * out).sum() / (2 * h))
    gradient = float((slope * direction).sum())
    # h² f⁽³⁾ + rounding/h ≈ 1e-9 times the slopes' size.
    is_close = abs(gradient - quotient) <= max(1e-6, 1e-5 * abs(quotient))
    sentence = f"{retention.title}: link has gradient {gradient:.8g} and slope {quotient:.8g}"
    require(is_close, sentence)


def check_link_gain(retention: Retention) -> str | None:
    """`link_lipschitz` bounds the link's slope; both forms of `step_gain` agree."""
    if retention.link_lipschitz is None and not retention.is_additive:
        return "it declares neither link_lipschitz nor is_additive"
    title, gates, L = retention.title, _link_gates(retention), retention.link_lipschitz
    A, B = normal(20, 3, 4, seed=1), normal(20, 3, 4, seed=2)
    if L is not None:
        change = (retention.link(A, gates) - retention.link(B, gates)).flatten(1).norm(dim=1)
        ratio = float((change / (A - B).flatten(1).norm(dim=1)).max())
        require(
            ratio <= L + 1e-9,
            f"{title} declares link_lipschitz={L:g}, and its link moves W {ratio:.3g} times as far "
            "as A",
        )
    if not retention.is_additive:
        return None
    h, delta = normal(5, 4, seed=3), normal(5, 3, seed=4)
    G = delta.unsqueeze(-1) * h.unsqueeze(-2)
    gains = retention.step_gain(A[0], G, gates)
    is_valid = gains.shape == (5,) and bool(torch.isfinite(gains).all())
    require(is_valid, f"{title}: step_gain is not one finite number per association")
    rank_one = retention.rank_one_step_gain(A[0], h, delta, gates)
    if rank_one is not None:
        sentence = "rank_one_step_gain of δ and h is not the step_gain of δhᵀ, {error} off"
        require_equal(rank_one, gains, f"{title}: {sentence}")
    return None


def check_advance(retention: Retention) -> str | None:
    """`advance` is α A + step if `is_additive` is declared."""
    if not retention.is_additive:
        return "it declares is_additive=False"
    A, step, decay = normal(2, 3, 4, seed=1), normal(2, 3, 4, seed=2), -normal(2, 1, 1).abs()
    gates = _link_gates(retention)
    for log_decay, decayed in ((None, A), (decay, decay.exp() * A)):
        require_equal(
            retention.advance(A, step, log_decay, gates),
            decayed + step,
            f"{retention.title} declares is_additive, which is A_t = α A_(t−1) + step, and its "
            "advance is {error} off",
        )
    return None


# -- algorithm ---------------------------------------------------------------------------------


def check_recursion(algorithm: Algorithm) -> str | None:
    """`recursion` is the linear recursion that `update` takes, on the slots that it declares."""
    title, recursion = algorithm.title, algorithm.recursion
    if algorithm.inverse is not None or algorithm.solves:
        return "it solves in closed form"
    g, write = normal(1, 1, 3, 4, seed=1), normal(1, 1, 3, 4, seed=2)
    slots = {
        name: normal(1, 1, *algorithm.slot_shape(name, (3, 4)), seed=3).abs()
        for name in algorithm.slots
    }
    lr, theta = torch.full((1, 1, 1, 1), 0.7).double(), torch.full((1, 1, 1, 1), 0.6).double()
    beta = torch.full((1, 1, 1, 1), 0.8).double() if "outer_lr" in algorithm.quantity_axes else 1.0
    one = torch.ones_like(lr)
    inputs = Step(gradient=g, write=write, lr=lr, momentum=theta, count=one, outer_lr=beta)
    new, step = algorithm.update(slots, inputs)
    declared, shapes = ({name: x.shape for name, x in values.items()} for values in (slots, new))
    has_slots = shapes == declared
    require(has_slots, f"{title}: update gives other slots than {algorithm.slots} declares")
    require(step.shape == g.shape, f"{title}: update gives a step of another shape than gradients")
    if recursion is None:
        return "it declares recursion=None, so only shapes were compared"
    require(algorithm.linear, f"{title} declares recursion={recursion!r} and linear=False")
    if recursion == "none":
        require(not new, f"{title} declares recursion='none' and moves slots")
        equation, results, expected = "−η g", [step], [-lr * g]
    else:
        of_gradient = recursion == "gradient"
        equation = "S = θ S − η g" if of_gradient else "S = θ S − η g of the write only"
        equation += ", and adds β S"
        S = theta * slots["momentum"] - lr * (g if of_gradient else write)
        moved = beta * S if of_gradient else beta * S - lr * (g - write)
        results, expected = [new["momentum"], step], [S, moved]
    require_equal(
        torch.cat(results),
        torch.cat(expected),
        f"{title} declares recursion={recursion!r}, which is {equation}, and its update is "
        "{error} off",
    )
    return None


# -- features ----------------------------------------------------------------------------------


def apply_features(features: Features, x: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """Return φ of keys ``[N, K]`` as ``[N, F]``, for one head at position 0."""
    position = torch.zeros(1, 1, dtype=torch.long)
    return features.phi(x.view(1, 1, 1, *x.shape), params, "key", position)[0, 0, 0]


def check_kernel(kernel: Kernel) -> None:
    """``is_positive_definite``, ``positive`` and ``exponent`` are true of `kappa`."""
    q, k = normal(5, 4, seed=1), normal(6, 4, seed=2)
    title, points = kernel.title, torch.cat([q, k])
    require(not kernel.finite, f"{title} is a kernel and declares finite")
    gram = kernel.kappa(points, points)
    minimum = float(gram.min())
    require_equal(gram, gram.T, f"{title}: κ(q, k) is not κ(k, q)", 1e-7)
    if kernel.is_positive_definite:
        eigenvalue = float(torch.linalg.eigvalsh(gram).min() / gram.abs().max())
        require(
            eigenvalue > -1e-9,
            f"{title} declares is_positive_definite, and κ has the eigenvalue {eigenvalue:.1e}",
        )
    if kernel.nonnegative:
        require(minimum >= 0, f"{title} declares nonnegative, and κ is {minimum:.1e}")
    if kernel.positive:
        require(minimum > 0, f"{title} declares positive, and κ is {minimum:.1e}")
        ratio = kernel.log_kappa(q, k).exp() / kernel.kappa(q, k)
        sentence = f"{title}: log_kappa is not the logarithm of kappa"
        require_equal(ratio, torch.ones_like(ratio), sentence)
    exponent = kernel.exponent(4)
    if exponent is not None:
        a, b = exponent
        lengths = q.square().sum(-1).unsqueeze(-1) + k.square().sum(-1).unsqueeze(-2)
        require_equal(
            kernel.log_kappa(q, k),
            a * q @ k.T + b * lengths,
            f"{title} declares exponent=({a:g}, {b:g}), which is log κ = {a:g} q·k + "
            f"{b:g} (‖q‖² + ‖k‖²), and is {{error}} off",
            1e-11,
        )


def check_features(features: Features) -> None:
    """φ has ``dim`` features, and φ(q)·φ(k) is `kappa` if that is defined; kernels see above."""
    if isinstance(features, Kernel):
        check_kernel(features)
        return
    K, title = 4, features.title
    q, k = normal(5, K, seed=1), normal(6, K, seed=2)
    axes = Recipe(features=features).axes(K, K)
    g = torch.Generator().manual_seed(0)
    params = draw_params(features, axes, g)
    phi, width = apply_features(features, k, params), features.dim(K)
    require(
        phi.shape == (6, width),
        f"{title} declares dim({K}) = {width}, and phi gives {phi.shape[-1]} features",
    )
    require(phi.dtype == torch.float64, f"{title}: phi of float64 gives {phi.dtype}")
    if type(features).kappa is not Features.kappa:
        products = apply_features(features, q, params) @ phi.T
        sentence = f"{title} states kappa, and φ(q)·φ(k) is {{error}} off"
        require_equal(products, features.kappa(q, k), sentence)


LINK_SIZES = (0.0, 1e-8, 1.0, 30.0)

CHECKS: dict[type[Member], tuple[Callable[[Any], str | None], ...]] = {
    Member: (check_user_code,),
    Bias: (check_bias_gradients, check_affinity, check_target, check_perfect_prediction),
    Retention: (check_links, check_link_gradients, check_link_gain, check_advance),
    Memory: (check_memory,),
    Algorithm: (check_recursion,),
    Features: (check_features,),
    Context: (check_context,),
}
"""Checks of the members of each choice."""
