"""Functions of other tests with every factorisation shared out, however small: what the cost model would not choose."""

from contextlib import ExitStack
from unittest import mock

import torch

from consequent.engines import step as rewrite
from consequent.ranks import exchange, plans
from consequent.ranks.factor_exchange import FactorExchange
from consequent.ranks.ownership import Division, balanced


def everything_shared(matrices, ranks, rates):
    owned = balanced([matrix.operations for matrix in matrices], ranks)
    return Division(tuple(owned), repeated=1.0, shared=0.0)


def refuse(*_):
    raise AssertionError("a host looked at a device's numbers")


def shared(function, *args, busy=False):
    """What the function returns on this rank, and the owners of all matrices of its last step that had any.

    Args:
        function: of another test.
        args: its arguments.
        busy: treat the CPU like a GPU that must not be waited for.
    """
    found = []

    class Watched(FactorExchange):
        def __init__(self, ranks, jobs, may_wait):
            jobs = list(jobs)
            found.append([job.owner for job in jobs])
            super().__init__(ranks, jobs, may_wait)

        def factorise(self):
            with not_looking(busy):
                super().factorise()

        def finish(self):
            with not_looking(busy):
                super().finish()

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(plans, "divided", everything_shared))
        patches.enter_context(mock.patch.object(exchange, "FactorExchange", Watched))
        if busy:
            patches.enter_context(mock.patch.object(rewrite, "answers_at_once", return_value=False))
        result = function(*args)
    return result, next((of_step for of_step in reversed(found) if of_step), [])


def not_looking(busy):
    patches = ExitStack()
    for name in ("item", "tolist", "__bool__", "cpu") if busy else ():
        patches.enter_context(mock.patch.object(torch.Tensor, name, refuse))
    return patches


def busily(function, *args):
    return shared(function, *args, busy=True)
