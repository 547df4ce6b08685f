"""What could not be parsed beside other threads is tried again, and nothing half done is left behind."""

from concurrent.futures import Future

import pytest

pytest.importorskip("triton")

from consequent.engines.gpu.kernels import launch


class Function:
    """As much of a kernel as is looked at; its key cannot be made at first."""

    def __init__(self, failures=0, **names):
        self.hash = None
        self.failures = failures
        self.fn = type("Fn", (), {"__globals__": names})()

    @property
    def cache_key(self):
        if self.hash is None:
            self.hash = "recursion:it"
            for callee in self.fn.__globals__.values():
                callee.cache_key  # noqa: B018
            if self.failures:
                self.failures -= 1
                raise SystemError("AST constructor recursion depth mismatch (before=40, after=73)")
            self.hash = "whole"
        return self.hash


@pytest.fixture
def under_way(monkeypatch):
    waited = []

    class Compilation(Future):
        def exception(self, timeout=None):
            waited.append(self)

    monkeypatch.setattr(launch, "_being_compiled", {"a": Compilation(), "b": Compilation()})
    return waited


def test_it_waits_for_the_others_and_tries_again(under_way):
    callee = Function(failures=1)
    kernel = Function(callee=callee)
    assert launch._parsed(kernel, lambda: kernel.cache_key) == "whole"
    assert (kernel.hash, callee.hash) == ("whole", "whole")
    assert len(under_way) == 2


def test_what_fails_twice_is_an_error(under_way):
    kernel = Function(failures=2)
    with pytest.raises(SystemError, match="recursion depth"):
        launch._parsed(kernel, lambda: kernel.cache_key)


def test_nobody_is_waited_for_without_need(under_way):
    kernel = Function()
    assert launch._parsed(kernel, lambda: kernel.cache_key) == "whole"
    assert not under_way
