"""Full precision where the user allows TF32: that it is kept out, still known of, and put back."""

from types import SimpleNamespace

import pytest
import torch

from consequent.capture.edits import rounding
from consequent.maths.precision import in_full_precision, tf32_is_allowed, tf32_products, without_autocast


@pytest.fixture
def on_gpu(monkeypatch):
    """As if there were a GPU: the flags are the same without one."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def flag():
    return torch.backends.cuda.matmul.fp32_precision


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("level", "allowed"), [("highest", False), ("high", True)])
def test_tf32_is_known_of_inside_of_full_precision(level, allowed):
    torch.set_float32_matmul_precision(level)
    seen = []

    @in_full_precision
    def look():
        seen.append((flag() == "tf32", tf32_is_allowed()))
        if tf32_is_allowed():
            with tf32_products():
                seen.append((flag() == "tf32", tf32_is_allowed()))
            seen.append((flag() == "tf32", tf32_is_allowed()))

    look()
    in_full_precision(look)()
    once = [(False, True), (True, True), (False, True)] if allowed else [(False, False)]
    assert seen == once * 2
    assert (flag() == "tf32", tf32_is_allowed()) == (allowed, allowed)
    assert torch.get_float32_matmul_precision() == level


@pytest.mark.usefixtures("on_gpu")
def test_flags_are_put_back_after_an_error():
    torch.set_float32_matmul_precision("high")

    @in_full_precision
    def fail():
        with tf32_products():
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert flag() == "tf32"
    torch.set_float32_matmul_precision("highest")
    assert not tf32_is_allowed()


@pytest.mark.usefixtures("on_gpu")
def test_gradients_of_tf32_products_are_compared_as_such():
    """The step is in full precision, but the backward pass was not: its rounding is no edit."""
    record = SimpleNamespace(first_use=SimpleNamespace(dtype=torch.float32), weight=SimpleNamespace(is_cuda=True))
    torch.set_float32_matmul_precision("high")
    assert in_full_precision(rounding)(record) == rounding(record) == 2e-3
    torch.set_float32_matmul_precision("highest")
    assert in_full_precision(rounding)(record) == rounding(record) < 1e-5


def test_without_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert without_autocast(lambda: torch.is_autocast_enabled("cpu"))() is False
        assert torch.is_autocast_enabled("cpu")
