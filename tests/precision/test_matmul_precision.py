"""`choices.matmul_precision`: PyTorch's setting inside of the context, and after it."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.precision.setting import Watch

from recollect.choices import matmul_precision as module
from recollect.choices.matmul_precision import (
    active,
    check_precision_name,
    effective_eps,
    is_full_precision,
    matmul_precision,
)


def readings() -> list[Any]:
    """Return every readable value of the setting."""
    backends: Any = torch.backends
    values = [backends.fp32_precision, backends.cuda.matmul.fp32_precision]
    values += [backends.mkldnn.matmul.fp32_precision]
    for read in (torch.get_float32_matmul_precision, lambda: backends.cuda.matmul.allow_tf32):
        try:
            values.append(read())
        except RuntimeError:  # the old name has no value for the setting
            values.append("mixed")
    return values


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
    """Set the setting as a program may have left it."""
    backends: Any = torch.backends
    request.param()
    yield
    torch.set_float32_matmul_precision("highest")
    for place in (backends, backends.cuda.matmul, backends.mkldnn.matmul):
        place.fp32_precision = "none"


@pytest.mark.usefixtures("setting")
@pytest.mark.parametrize(
    ("precision", "device", "expected"),
    [
        ("tf32", "meta", {"tf32"}),
        ("float32", "meta", {"ieee", "none"}),
        ("tf32", "cpu", {"ieee", "none"}),
        ("float32", "cpu", {"ieee", "none"}),
    ],
)
def test_the_setting_is_changed_inside_only(
    precision: str, device: str, expected: set[str]
) -> None:
    """A device without numbers takes the place of one with TF32."""
    original, x = readings(), torch.ones(3, 3, device=device)
    with Watch() as watch, matmul_precision(precision, device):
        torch.mm(x, x)
        torch.bmm(x[None], x[None])
        assert is_full_precision(device) == (expected != {"tf32"})
    assert watch.forward and watch.forward <= expected
    assert readings() == original


@pytest.mark.usefixtures("setting")
def test_the_setting_is_restored_after_an_error() -> None:
    original = readings()
    with pytest.raises(ZeroDivisionError), matmul_precision("tf32", "cuda"):
        raise ZeroDivisionError
    assert readings() == original
    assert active.precision is None


@pytest.mark.usefixtures("setting")
def test_the_last_of_overlapping_threads_restores_the_setting() -> None:
    """Whichever leaves first, and a thread has its own active precision."""
    original, entered, released = readings(), threading.Event(), threading.Event()
    inside: list[object] = []

    def other() -> None:
        with matmul_precision("float32", "cuda"):
            inside.append(active.precision)
            entered.set()
            released.wait()
            inside.append(torch.backends.cuda.matmul.fp32_precision)

    thread = threading.Thread(target=other)
    with matmul_precision("tf32", "cuda"):
        thread.start()
        entered.wait()
        assert active.precision == "tf32"
    released.set()
    thread.join()
    assert inside[0] == "float32" and inside[1] in ("ieee", "none")
    assert readings() == original


def test_an_inherited_setting_stays_inherited() -> None:
    """It follows the setting for all of torch."""
    backends: Any = torch.backends
    try:
        backends.fp32_precision = "tf32"
        with matmul_precision("float32", "cuda"):
            assert backends.cuda.matmul.fp32_precision == "ieee"
        backends.fp32_precision = "ieee"
        assert backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        backends.fp32_precision = "none"


def test_the_inner_context_decides() -> None:
    matmul: Any = torch.backends.cuda.matmul
    with matmul_precision("tf32", "cuda"):
        assert effective_eps(torch.float32) == 2.0**-10
        assert effective_eps(torch.float64) == torch.finfo(torch.float64).eps
        with matmul_precision("float32", "cuda"):
            assert matmul.fp32_precision == "ieee"
            assert effective_eps(torch.float32) == torch.finfo(torch.float32).eps
        with matmul_precision(None, "cuda"):
            assert matmul.fp32_precision == "tf32"
        with suppress(ZeroDivisionError), matmul_precision("float32", "cuda"):
            raise ZeroDivisionError
        assert matmul.fp32_precision == "tf32"
    assert matmul.fp32_precision == "none"


def test_none_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def entered(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(module._Setting, "requested", entered)
    with matmul_precision(None, "cuda"):
        assert active.precision is None
    with pytest.raises(AssertionError), matmul_precision("tf32", "cuda"):
        pass


def test_invalid_names_are_refused() -> None:
    expected = "^precision must be 'float32' or 'tf32', or None for PyTorch's own setting, not "
    with pytest.raises(ValueError, match=f"{expected}'fp16'$"):
        check_precision_name("fp16")
    with pytest.raises(ValueError, match=f"{expected}'bf16': .* use autocast or a bfloat16 model"):
        check_precision_name("bf16")
