"""What engines rely on: the structure that a member declares, held to its own code.

Engines never ask who a member is. They ask whether its error is affine, its memory linear, its link
the identity, and run what the answer says instead of the member's code; so an answer that is not
true is a wrong number. Each check raises AssertionError with one sentence that names the member and
the false claim.
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
from recollect.testing.compare import label, require
from recollect.testing.contexts import check_context
from recollect.testing.declared import normal, off
from recollect.testing.inputs import draw_param
from recollect.testing.memories import check_memory
from recollect.testing.user_code import check_user_code, sample_numbers

__all__ = [
    "CHECKS",
    "LINK_SIZES",
    "check_context",
    "check_structure",
    "lift",
]


def check_structure(instance: Member) -> list[tuple[str, str | None]]:
    """Check that the declarations of a member are true.

    Returns:
        The name of each check in `CHECKS` that applies, and the reason if it was skipped.

    Raises:
        AssertionError: the member and the claim that is false.
    """
    return [
        (label(check), check(instance))
        for kind, checks in CHECKS.items()
        if isinstance(instance, kind)
        for check in checks
    ]


# -- bias --------------------------------------------------------------------------------------


def check_bias_gradients(bias: Bias) -> str | None:
    """`error` is autograd's gradient of `loss`, and both are the central finite difference."""
    count, V, h = 40, 3, 1e-6
    p, v = normal(count, V, seed=1), normal(count, V, seed=2)
    gates = sample_numbers(bias, (count,), V, 3)
    found = bias.error(p, v, gates)
    if not bias.defines_loss:
        require(torch.isfinite(found).all(), f"{bias.title}: error is not finite")
        return "it defines no loss to compare error with"
    point = p.clone().requires_grad_()
    (slope,) = torch.autograd.grad(bias.loss(point, v, gates).sum(), point)
    wrong = off(found, slope)
    require(not wrong, f"{bias.title}: error is not the gradient of loss, but {wrong:.1e} off")
    for j in range(V):
        step = h * torch.eye(V).double()[j]
        ratio = (bias.loss(p + step, v, gates) - bias.loss(p - step, v, gates)) / (2 * h)
        # Central differences err by h² f''' and by rounding/h ≈ 1e-10; kinks of measure zero (a
        # threshold, a sign) are not hit by these draws, but e near 0 with p < 2 is steep.
        near = (p - v)[:, j].abs() > 1e-3
        wrong = off(found[near, j], ratio[near], 1e-5)
        require(not wrong, f"{bias.title}: error is not the slope of loss, but {wrong:.1e} off")
    return None


def check_affinity(bias: Bias) -> str | None:
    """``affine`` is true of `error`."""
    if bias.affine is None:
        return "it declares affine=None"
    p, v, gates = normal(20, 3, seed=1), normal(20, 3, seed=2), sample_numbers(bias, (20,), 3, 3)
    found = bias.error(p, v, gates)
    a, b = bias.affine
    wrong = off(found, a * p - b * v)
    require(
        not wrong,
        f"{bias.title} declares affine=({a:g}, {b:g}), and its error is not "
        f"{a:g}·prediction − {b:g}·value, but {wrong:.1e} off",
    )
    return None


def check_target(bias: Bias) -> str | None:
    """``target`` is where the loss is least: no error points away from it."""
    if bias.target is None:
        return "it declares no target"
    p, v = normal(60, 3, seed=1), normal(60, 3, seed=2)
    error = bias.error(p, v, sample_numbers(bias, (60,), 3, 3))
    least = float(((p - bias.target * v) * error).sum(-1).detach().min())
    require(
        least >= -1e-12,
        f"{bias.title} declares target={bias.target:g}, and an error points away from "
        f"{bias.target:g}·value: ⟨prediction − {bias.target:g}·value, error⟩ = {least:.1e}",
    )
    return None


def check_perfect_prediction(bias: Bias) -> None:
    """e = 0: the error is finite, and so is its outer gradient."""
    v, gates = normal(4, 3, seed=2), sample_numbers(bias, (4,), 3, 3)
    point = v.clone().requires_grad_()
    found = bias.error(point, v, gates)
    where = "where the prediction is the value"
    require(torch.isfinite(found).all(), f"{bias.title}: error is not finite {where}")
    if found.requires_grad:
        (slope,) = torch.autograd.grad(found.sum(), point)
        require(torch.isfinite(slope).all(), f"{bias.title}: error has no finite slope {where}")


# -- retention ---------------------------------------------------------------------------------


def _link_gates(made: Retention) -> dict[str, Tensor]:
    """Numbers of the step as a link sees them, ``[..., 1, 1]``."""
    found = {name: torch.full((1, 1), x).double() for name, x in made.constants().items()}
    for item in (*made.gates(), *made.params()):
        found[item.name] = torch.full((1, 1), 0.3 + (item.range.low or 0.0)).double()
    return found


def check_link(retention: Retention, size: float = 1.0) -> None:
    """The link is finite and differentiable, and the identity where `has_link` is false.

    Args:
        retention: the member.
        size: of the entries of A.
    """
    A = (size * normal(2, 3, 4, seed=1)).requires_grad_()
    W = retention.link(A, _link_gates(retention))
    at = f"{retention.title}: link(A) of entries of size {size:g}"
    require(W.shape == A.shape, f"{at} has another shape than A")
    require(torch.isfinite(W).all(), f"{at} is not finite")
    (slope,) = torch.autograd.grad(W.square().sum() + W.sum(), A)
    require(torch.isfinite(slope).all(), f"{at} has no finite gradient")
    if not retention.has_link:
        wrong = float((W - A).detach().abs().max())
        require(
            torch.equal(W, A),
            f"{retention.title} declares has_link=False, which is W = A, and its link is not the "
            f"identity, but {wrong:.1e} off",
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
    up, down = (retention.link(A + s * h * direction, gates) for s in (1, -1))
    ratio, found = float(((up - down) * out).sum() / (2 * h)), float((slope * direction).sum())
    # h² f''' + rounding/h ≈ 1e-9 times the slopes' size.
    close = abs(found - ratio) <= max(1e-6, 1e-5 * abs(ratio))
    require(close, f"{retention.title}: link has gradient {found:.8g} and slope {ratio:.8g}")


def check_gain(retention: Retention) -> str | None:
    """`link_lipschitz` bounds the link's slope; both forms of `step_gain` agree."""
    if retention.link_lipschitz is None and not retention.is_additive:
        return "it declares neither link_lipschitz nor is_additive"
    title, gates, L = retention.title, _link_gates(retention), retention.link_lipschitz
    A, B = normal(20, 3, 4, seed=1), normal(20, 3, 4, seed=2)
    if L is not None:
        moved = (retention.link(A, gates) - retention.link(B, gates)).flatten(1).norm(dim=1)
        ratio = float((moved / (A - B).flatten(1).norm(dim=1)).max())
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
    sane = gains.shape == (5,) and bool(torch.isfinite(gains).all())
    require(sane, f"{title}: step_gain is not one finite number per association")
    fast = retention.rank_one_step_gain(A[0], h, delta, gates)
    wrong = 0.0 if fast is None else off(fast, gains)
    require(
        not wrong,
        f"{title}: rank_one_step_gain of δ and h is not the step_gain of δhᵀ, {wrong:.1e} off",
    )
    return None


def check_advance(retention: Retention) -> str | None:
    """`advance` is α A + step if `is_additive` is declared."""
    if not retention.is_additive:
        return "it declares is_additive=False"
    A, step, decay = normal(2, 3, 4, seed=1), normal(2, 3, 4, seed=2), -normal(2, 1, 1).abs()
    for log_decay, kept in ((None, A), (decay, decay.exp() * A)):
        wrong = off(retention.advance(A, step, log_decay, _link_gates(retention)), kept + step)
        require(
            not wrong,
            f"{retention.title} declares is_additive, which is A_t = α A_(t−1) + step, and its "
            f"advance is {wrong:.1e} off",
        )
    return None


# -- algorithm ---------------------------------------------------------------------------------


def check_recursion(algorithm: Algorithm) -> str | None:
    """`recursion` is the linear recursion that `update` takes, on the slots that it declares."""
    title, of = algorithm.title, algorithm.recursion
    if algorithm.inverse is not None or algorithm.solves:
        return "it solves in closed form"
    g, write = normal(1, 1, 3, 4, seed=1), normal(1, 1, 3, 4, seed=2)
    old = {
        name: normal(1, 1, *algorithm.slot_shape(name, (3, 4)), seed=3).abs()
        for name in algorithm.slots
    }
    lr, theta = torch.full((1, 1, 1, 1), 0.7).double(), torch.full((1, 1, 1, 1), 0.6).double()
    one = torch.ones_like(lr)
    asked = Step(gradient=g, write=write, lr=lr, momentum=theta, count=one)
    new, step = algorithm.update(old, asked)
    shapes = {name: x.shape for name, x in new.items()}
    kept = {name: x.shape for name, x in old.items()}
    require(shapes == kept, f"{title}: update gives other slots than {algorithm.slots} declares")
    require(step.shape == g.shape, f"{title}: update gives a step of another shape than gradients")
    if of is None:
        return "it declares recursion=None, so only shapes were compared"
    require(algorithm.linear, f"{title} declares recursion={of!r} and linear=False")
    if of == "none":
        wrong, how = off(step, -lr * g), "−η g"
        require(not new, f"{title} declares recursion='none' and moves slots")
    else:
        S = theta * old["momentum"] - lr * (g if of == "gradient" else write)
        wrong = off(new["momentum"], S)
        how = "S = θ S − η g" if of == "gradient" else "S = θ S − η g of the write only"
        wrong = max(wrong, off(step, S if of == "gradient" else S - lr * (g - write)))
    require(
        not wrong,
        f"{title} declares recursion={of!r}, which is {how}, and its update is {wrong:.1e} off",
    )
    return None


# -- features ----------------------------------------------------------------------------------


def lift(features: Features, x: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """φ of keys ``[N, K]``, ``[N, F]``, for one head at position 0."""
    lifted = features.phi(
        x.view(1, 1, 1, *x.shape), params, "key", torch.zeros(1, 1, dtype=torch.long)
    )
    return lifted[0, 0, 0]


def check_kernel(kernel: Kernel) -> None:
    """``is_positive_definite``, ``positive`` and ``exponent`` are true of `kappa`."""
    q, k = normal(5, 4, seed=1), normal(6, 4, seed=2)
    title, both = kernel.title, torch.cat([q, k])
    require(not kernel.finite, f"{title} is a kernel and declares finite")
    gram = kernel.kappa(both, both)
    require(not off(gram, gram.T, 1e-7), f"{title}: κ(q, k) is not κ(k, q)")
    if kernel.is_positive_definite:
        least = float(torch.linalg.eigvalsh(gram).min() / gram.abs().max())
        require(
            least > -1e-9,
            f"{title} declares is_positive_definite, and κ has the eigenvalue {least:.1e}",
        )
    if kernel.nonnegative:
        require(
            (gram >= 0).all(), f"{title} declares nonnegative, and κ is {float(gram.min()):.1e}"
        )
    if kernel.positive:
        require((gram > 0).all(), f"{title} declares positive, and κ is {float(gram.min()):.1e}")
        wrong = off(kernel.log_kappa(q, k).exp() / kernel.kappa(q, k), torch.ones(5, 6).double())
        require(not wrong, f"{title}: log_kappa is not the logarithm of kappa")
    exponent = kernel.exponent(4)
    if exponent is not None:
        a, b = exponent
        lengths = q.square().sum(-1).unsqueeze(-1) + k.square().sum(-1).unsqueeze(-2)
        wrong = off(kernel.log_kappa(q, k), a * q @ k.T + b * lengths, 1e-11)
        require(
            not wrong,
            f"{title} declares exponent=({a:g}, {b:g}), which is log κ = {a:g} q·k + "
            f"{b:g} (‖q‖² + ‖k‖²), and is {wrong:.1e} off",
        )


def check_features(features: Features) -> None:
    """φ has ``dim`` features, and φ(q)·φ(k) is `kappa` where that is stated; kernels see above."""
    if isinstance(features, Kernel):
        check_kernel(features)
        return
    K, title = 4, features.title
    q, k = normal(5, K, seed=1), normal(6, K, seed=2)
    axes = Recipe(features=features).axes(K, K)
    g = torch.Generator().manual_seed(0)
    params = {p.name: draw_param(p, (1, *(axes[a] for a in p.axes)), g) for p in features.params()}
    lifted, width = lift(features, k, params), features.dim(K)
    require(
        lifted.shape == (6, width),
        f"{title} declares dim({K}) = {width}, and phi gives {lifted.shape[-1]} features",
    )
    require(lifted.dtype == torch.float64, f"{title}: phi of float64 gives {lifted.dtype}")
    if type(features).kappa is not Features.kappa:
        wrong = off(lift(features, q, params) @ lifted.T, features.kappa(q, k))
        require(not wrong, f"{title} states kappa, and φ(q)·φ(k) is {wrong:.1e} off")


LINK_SIZES = (0.0, 1e-8, 1.0, 30.0)

CHECKS: dict[type[Member], tuple[Callable[[Any], str | None], ...]] = {
    Member: (check_user_code,),
    Bias: (check_bias_gradients, check_affinity, check_target, check_perfect_prediction),
    Retention: (
        check_links,
        check_link_gradients,
        check_gain,
        check_advance,
    ),
    Memory: (check_memory,),
    Algorithm: (check_recursion,),
    Features: (check_features,),
    Context: (check_context,),
}
"""What is asked of the members of each choice."""
