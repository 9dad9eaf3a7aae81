"""`choices.matmul_precision`: the functions it catches, gradients, the process's switch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.precision.dispatched import Unrounded, rounded
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from recollect.choices.matmul_precision import active, effective_eps, matmul_precision
from recollect.choices.products import check_precision_name

Shapes = tuple[tuple[int, ...], ...]


def einsum(equation: str) -> Callable[..., Tensor]:
    return lambda *x: torch.einsum(equation, *x)


def added(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.baddbmm(z, x, y, beta=0.5, alpha=-2)


def added_in_place(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return z.clone().baddbmm_(x, y, alpha=-1)


def written(x: Tensor, y: Tensor) -> Tensor:
    out = torch.full((x.shape[0], x.shape[1], y.shape[2]), torch.nan, dtype=x.dtype)
    with torch.no_grad():
        return torch.bmm(x.detach(), y.detach(), out=out)


def added_and_written(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    out = torch.full_like(z, torch.nan)
    with torch.no_grad():
        return torch.baddbmm(z.detach(), x.detach(), y.detach(), alpha=3, out=out)


CASES: dict[str, tuple[Callable[..., Tensor], Shapes]] = {
    "@": (lambda x, y: x @ y, ((3, 4), (4, 5))),
    "batch": (lambda x, y: x @ y, ((2, 3, 4), (2, 4, 5))),
    "repeated": (torch.matmul, ((2, 1, 3, 4), (6, 4, 5))),
    "matrix and batch": (torch.matmul, ((3, 4), (2, 4, 5))),
    "batch and matrix": (torch.matmul, ((2, 3, 3, 4), (4, 5))),
    "vector left": (torch.matmul, ((4,), (2, 4, 5))),
    "vector right": (torch.matmul, ((2, 3, 4), (4,))),
    "vectors": (torch.matmul, ((4,), (4,))),
    "transposed": (lambda x, y: x.mT @ y.mT, ((4, 3), (5, 4))),
    "nothing": (torch.matmul, ((2, 0, 4), (4, 5))),
    "sum of nothing": (torch.matmul, ((2, 3, 0), (2, 0, 5))),
    "linalg": (torch.linalg.matmul, ((2, 3, 4), (2, 4, 5))),
    "mm": (torch.mm, ((3, 4), (4, 5))),
    "bmm": (Tensor.bmm, ((2, 3, 4), (2, 4, 5))),
    "mv": (Tensor.mv, ((3, 4), (4,))),
    "dot": (torch.dot, ((4,), (4,))),
    "addmm": (torch.addmm, ((5,), (3, 4), (4, 5))),
    "addmv": (torch.addmv, ((3,), (3, 4), (4,))),
    "baddbmm": (added, ((2, 3, 5), (2, 3, 4), (2, 4, 5))),
    "baddbmm, z repeated": (added, ((5,), (2, 3, 4), (2, 4, 5))),
    "baddbmm_": (added_in_place, ((2, 3, 5), (2, 3, 4), (2, 4, 5))),
    "linear": (functional.linear, ((2, 3, 4), (5, 4), (5,))),
    "einsum": (einsum("bij,bkj->bik"), ((2, 3, 4), (2, 5, 4))),
    "einsum, implicit": (einsum("ij,jk"), ((3, 4), (4, 5))),
    "einsum, ellipsis": (einsum("...ij,...jk->...ki"), ((2, 1, 3, 4), (6, 4, 5))),
    "einsum, summed": (einsum("bthgk,bthk->bthg"), ((2, 3, 2, 2, 4), (2, 3, 2, 4))),
    "einsum, two sums": (einsum("abij,cij->abc"), ((2, 3, 4, 5), (6, 4, 5))),
}
WITHOUT_GRADIENT: dict[str, tuple[Callable[..., Tensor], Shapes]] = {
    "bmm out": (written, ((2, 3, 4), (2, 4, 5))),
    "baddbmm out": (added_and_written, ((2, 3, 5), (2, 3, 4), (2, 4, 5))),
}
SUMMED: dict[str, tuple[Callable[..., Tensor], Shapes]] = {
    # What is summed over one factor alone is summed before it is rounded.
    "one sided": (einsum("ijl,jk->k"), ((3, 4, 2), (4, 5))),
    "three factors": (
        einsum("...tak,...tik,...ibk->...taib"),
        ((2, 3, 2, 4), (2, 3, 3, 4), (3, 2, 4)),
    ),
    "nothing summed": (einsum("bi,bj->bij"), ((2, 3), (2, 4))),
    "traces": (einsum("ii,jj->"), ((3, 3), (4, 4))),
}


NOT_INTERCEPTED: dict[str, tuple[Callable[..., Tensor], Shapes]] = {
    "inner": (torch.inner, ((2, 3, 4), (5, 4))),
    "multi_dot": (lambda *x: torch.linalg.multi_dot(x), ((3, 4), (4, 5))),
    "tensordot": (torch.tensordot, ((2, 3, 4), (3, 4, 5))),
    "einsum of a diagonal": (einsum("iij,jk->ik"), ((3, 3, 4), (4, 5))),
}


def drawn(shapes: Shapes) -> list[Tensor]:
    g = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(*shape, generator=g) for shape in shapes]


def factors(name: str, given: list[Tensor]) -> list[Tensor]:
    """In float64, rounded where they are multiplied; what is only added keeps all of its bits."""
    plain = {0} if "add" in name else {2} if name == "linear" else set()
    return [(x if i in plain else rounded(x)).double() for i, x in enumerate(given)]


@pytest.mark.parametrize("name", [*CASES, *WITHOUT_GRADIENT])
def test_products_of_rounded_factors(name: str) -> None:
    """Torch's own function of the rounded numbers in float64 is the product that is meant."""
    function, shapes = (CASES | WITHOUT_GRADIENT)[name]
    given = drawn(shapes)
    kept = [x.clone() for x in given]
    with matmul_precision("bf16"):
        found = function(*given)
    assert all(torch.equal(x, y) for x, y in zip(given, kept, strict=True))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), function(*factors(name, kept)), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", NOT_INTERCEPTED)
def test_other_contractions_keep_the_precision_of_torch(name: str) -> None:
    function, shapes = NOT_INTERCEPTED[name]
    given = drawn(shapes)
    with matmul_precision("bf16"):
        found = function(*given)
    assert torch.equal(found, function(*given))


@pytest.mark.parametrize("name", [*CASES, *WITHOUT_GRADIENT, *SUMMED])
def test_products_of_all_bits(name: str) -> None:
    function, shapes = (CASES | WITHOUT_GRADIENT | SUMMED)[name]
    given = drawn(shapes)
    with matmul_precision("float32"):
        found = function(*given)
    torch.testing.assert_close(found, function(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_products_of_rounded_factors(name: str) -> None:
    """Of what is multiplied: the gradient from above is rounded as the other factor is."""
    function, shapes = CASES[name]
    given = [x.requires_grad_() for x in drawn(shapes)]
    exact = [x.detach().requires_grad_() for x in factors(name, given)]
    with matmul_precision("bf16"):
        y = function(*given)
    watch = Unrounded()
    above = rounded(torch.linspace(-1, 1, max(y.numel(), 1))[: y.numel()].view_as(y))
    with watch:
        found = torch.autograd.grad(y, given, above)
    assert not watch.found
    if "baddbmm" in name:
        return  # alpha times what is above has bits more
    meant = torch.autograd.grad(function(*exact), exact, above.double())
    for mine, theirs in zip(found, meant, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-6, atol=1e-5)


def test_gradients_of_gradients_are_such_products() -> None:
    x, y = (x.requires_grad_() for x in drawn(((3, 4), (4, 5))))
    with matmul_precision("bf16"):
        z = x @ y
    watch = Unrounded()
    with watch:
        (dx,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(dx.square().sum(), y)
    assert watch.products > 3
    assert not watch.found
    g = rounded(2 * (rounded(x) @ rounded(y)))
    torch.testing.assert_close(dx, g @ rounded(y).mT, rtol=1e-5, atol=1e-5)
    assert bool(bend.isfinite().all())


def test_of_other_types_nothing_is_said() -> None:
    """As of ``torch.set_float32_matmul_precision``: float64 stays, and bfloat16 is what it is."""
    for dtype in (torch.float64, torch.bfloat16, torch.complex64):
        x, y = (torch.randn(4, 4).to(dtype) for _ in "xy")
        with matmul_precision("bf16"):
            assert torch.equal(x @ y, (x @ y).to(dtype))
            inside = x @ y
        assert torch.equal(inside, x @ y)


def test_what_torch_refuses_it_refuses_itself() -> None:
    with (
        matmul_precision("bf16"),
        pytest.raises(RuntimeError, match=r"must match|cannot be multiplied"),
    ):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert active.mode is None


def test_attention_adds_its_mask_in_float32() -> None:
    """Decays may be −300 where bfloat16 knows even numbers alone."""
    q, k, v = drawn(((1, 2, 6, 8),) * 3)
    mask = (-torch.arange(6.0)[:, None] * 300.37 + torch.arange(6.0) * 300.37).tril()
    mask = mask.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    exact = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with matmul_precision("bf16"):
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=1e-2)


def test_of_two_the_inner_one_says_and_leaving_brings_back_the_outer() -> None:
    (x,) = drawn(((4, 4),))
    exact, low = x @ x, rounded(x) @ rounded(x)
    with matmul_precision("bf16"):
        with matmul_precision("float32"):
            assert torch.equal(x @ x, exact)
            assert effective_eps(torch.float32) == torch.finfo(torch.float32).eps
        with matmul_precision(None):
            assert torch.equal(x @ x, low)
        with suppress(ZeroDivisionError), matmul_precision("float32"):
            raise ZeroDivisionError
        assert torch.equal(x @ x, low)
        assert effective_eps(torch.float32) == torch.finfo(torch.bfloat16).eps
    assert torch.equal(x @ x, exact)


def test_other_threads_are_not_asked() -> None:
    (x,) = drawn(((4, 4),))
    found: list[Tensor] = []
    with matmul_precision("bf16"):
        thread = threading.Thread(target=lambda: found.append(x @ x))
        thread.start()
        thread.join()
    assert torch.equal(found[0], x @ x)


def test_modules_under_vmap() -> None:
    """As `rc.memory.Module` runs them: a batch of weights, and gradients through it."""
    w, x = (t.requires_grad_() for t in drawn(((3, 5, 4), (3, 2, 4))))
    with matmul_precision("bf16"):
        y = torch.vmap(functional.linear)(x, w)
    watch = Unrounded()
    with watch:
        y.square().sum().backward()
    assert watch.products
    assert not watch.found
    torch.testing.assert_close(y, rounded(x) @ rounded(w).mT, rtol=1e-6, atol=1e-6)


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(
        ValueError, match=r"^precision must be 'float32', 'tf32' or 'bf16', or None"
    ):
        check_precision_name("fp16")


class Overloads(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of the kernels that multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            self.seen.append(func._schema.name.rpartition("::")[2] + "." + func._overloadname)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(
    torch.__version__.startswith("2.9"),
    reason="torch 2.9 finds no shape of a product whose sum has a type of its own",
)
def test_a_gpu_adds_in_float32() -> None:
    """In shapes alone: its kernels take bfloat16 and give float32, sums in place too."""
    with FakeTensorMode(), Overloads() as watch, matmul_precision("bf16"):
        x, y = (torch.empty(2, *shape, device="cuda") for shape in ((3, 4), (4, 5)))
        z = torch.empty(2, 3, 5, device="cuda")
        m, n = (torch.empty(shape, device="cuda") for shape in ((3, 4), (4, 5)))
        found = [x @ y, m @ n, torch.baddbmm(z, x, y, beta=0.5), z.baddbmm_(x, y, alpha=-1)]
    assert {t.dtype for t in found} == {torch.float32}
    assert watch.seen == ["bmm.dtype", "mm.dtype", "bmm.dtype", "bmm.dtype"]


# -- the process's switch --------------------------------------------------------------------------


def said() -> list[Any]:
    """All that a program can know of the switch."""
    backends: Any = torch.backends
    found = [backends.fp32_precision, backends.cuda.matmul.fp32_precision]
    found += [backends.mkldnn.matmul.fp32_precision]
    for ask in (torch.get_float32_matmul_precision, lambda: backends.cuda.matmul.allow_tf32):
        try:
            found.append(ask())
        except RuntimeError:  # torch has no word for what it is set to
            found.append("mixed")
    return found


def untouched() -> None:
    pass


def for_all() -> None:
    torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]


def for_products() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def full() -> None:
    torch.backends.cuda.matmul.fp32_precision = "ieee"


def old_name() -> None:
    torch.set_float32_matmul_precision("medium")


def old_and_full() -> None:
    torch.set_float32_matmul_precision("highest")


SETTINGS = (untouched, for_all, for_products, full, old_name, old_and_full)


@pytest.fixture(params=SETTINGS, ids=lambda f: f.__name__)
def setting(request: pytest.FixtureRequest) -> Any:
    """The switch as somebody may have left it."""
    backends: Any = torch.backends
    request.param()
    yield
    torch.set_float32_matmul_precision("highest")
    for place in (backends, backends.cuda.matmul, backends.mkldnn.matmul):
        place.fp32_precision = "none"


class Switch(torch.utils._python_dispatch.TorchDispatchMode):
    """What the switch says while products run."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.seen, self.fails = set[str](), fails

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            backends: Any = torch.backends
            own = backends.cuda if args[0].device.type != "cpu" else backends.mkldnn
            self.seen.add(own.matmul.fp32_precision)
            if self.fails:
                raise ZeroDivisionError
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("setting")
@pytest.mark.parametrize(
    ("precision", "device", "switch"),
    [
        ("tf32", "meta", {"tf32"}),
        ("float32", "meta", {"ieee", "none"}),
        ("tf32", "cpu", {"ieee", "none"}),
        ("float32", "cpu", {"ieee", "none"}),
    ],
)
def test_the_switch_is_turned_for_products_alone(
    precision: str, device: str, switch: set[str]
) -> None:
    """Forward, backward and twice; a device without numbers stands for one that has TF32."""
    before = said()
    x = torch.ones(3, 3, device=device, requires_grad=True)
    z = torch.ones(2, 3, 3, device=device)
    with Switch() as watch:
        with matmul_precision(precision):
            y = torch.baddbmm(z, z, (x @ x).expand(2, 3, 3)).sum()
            inside = said()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        torch.autograd.grad(dx.sum(), x)
    assert watch.seen
    assert watch.seen <= switch
    assert inside == before
    assert said() == before


@pytest.mark.usefixtures("setting")
def test_the_switch_is_turned_back_where_a_product_fails() -> None:
    before, x = said(), torch.ones(3, 3, device="meta")
    with Switch(fails=True), matmul_precision("tf32"), pytest.raises(ZeroDivisionError):
        x @ x
    assert said() == before
    assert active.mode is None


def test_what_was_inherited_stays_so() -> None:
    """After a product the switch follows what is said for all of torch, as before it."""
    backends: Any = torch.backends
    x = torch.ones(3, 3, device="meta")
    try:
        backends.fp32_precision = "tf32"
        with matmul_precision("float32"):
            x @ x
        backends.fp32_precision = "ieee"
        assert backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        backends.fp32_precision = "none"
