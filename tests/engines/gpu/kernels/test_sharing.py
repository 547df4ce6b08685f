"""Whether other processes' kernels run beside ours, asked of a driver that is made up here."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from consequent.engines.gpu.kernels import sharing


@pytest.fixture(autouse=True)
def _ask_anew():
    sharing.is_shared.cache_clear()
    yield
    sharing.is_shared.cache_clear()


def driver(*, shared, statuses=(0, 0)):
    """A CUDA driver whose second device, number 7 to itself, is shared or not."""

    def get(device, index):
        device._obj.value = {0: 3, 1: 7}[index]
        return statuses[0]

    def attribute(value, which, device):
        assert which == 133
        value._obj.value = int(shared and device.value == 7)
        return statuses[1]

    return SimpleNamespace(cuDeviceGet=get, cuDeviceGetAttribute=attribute)


@pytest.mark.parametrize("shared", [True, False])
def test_the_driver_is_asked_about_the_device(shared, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver(shared=shared))
    assert sharing.is_shared(1) is shared
    assert sharing.is_shared(0) is False


@pytest.mark.parametrize("statuses", [(100, 0), (0, 1)])
def test_a_driver_that_cannot_tell_counts_as_not_shared(statuses, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver(shared=True, statuses=statuses))
    assert sharing.is_shared(1) is False


def test_without_a_driver_nothing_is_shared(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert sharing.is_shared(0) is False


def test_nobody_waits_for_others_on_a_shared_gpu(monkeypatch):
    factor = pytest.importorskip("consequent.engines.gpu.kernels.factor", reason="triton is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    moment = SimpleNamespace(shape=(577, 577), device=torch.device("cuda", 0), get_device=lambda: 0)
    for shared, members in ((True, 1), (False, 1 + 10)):
        monkeypatch.setattr(factor, "is_shared", lambda index, shared=shared: shared)
        assert factor.plan_team(moment).members == members
