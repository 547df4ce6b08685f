"""The statistic of units of several parameters by itself."""

import pytest
import torch
from torch import nn

from consequent.capture.use import Entry, JointUse
from consequent.layers.joint import Part, Piece
from consequent.layers.linear import Linear
from consequent.maths.damping import Damping
from consequent.statistics.joint import JointInputs

PARTS = (
    Part((Piece(0, 0, 4, 0, 3), Piece(1, 0, 4, 3, 5)), (Piece(2, 0, 4), Piece(3, 0, 4))),
    Part((Piece(0, 4, 6, 0, 3),), (Piece(2, 4, 6),)),
    Part((Piece(1, 4, 6, 3, 5),), (Piece(3, 4, 6),)),
)
DAMPINGS = [Damping(0.1), Damping(0.1, relative=True), Damping(0.0)]


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def use_of(parameters, *met, parts=PARTS):
    layer = nn.Identity()
    operation = Linear(1, 5, 6, (6, 5))
    use = JointUse(layer, operation, parameters[0], None, True, Entry(layer, 1, 1), len(met[0]), torch.float64)
    use.parameters, use.parts, use.met = parameters, parts, met
    return use


def parameters():
    return tuple(nn.Parameter(normal(*shape)) for shape in [(6, 3), (6, 2), (6,), (6,)])


def gradients():
    grads = [normal(*shape, seed=seed) for seed, shape in enumerate([(6, 3), (6, 2), (6,)])]
    return [*grads, grads[2]]


@pytest.mark.parametrize("damping", DAMPINGS, ids=str)
@pytest.mark.parametrize("rows", [2, 4, 5, 9])
def test_with_and_without_waiting(rows, damping):
    statistic = JointInputs.of(use_of(parameters(), normal(rows, 5))).reduced(damping)
    one = statistic.solve_for(gradients(), damping, may_wait=True)
    other = statistic.solve_for(gradients(), damping, may_wait=False)
    torch.testing.assert_close(one.gradients, other.gradients)
    assert bool(other.finite)
    assert one.side == ("samples" if rows < 3 else "features")


@pytest.mark.parametrize("damping", DAMPINGS, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (3, 6), (1, 3, 2)], ids=str)
def test_uses_add_up(sizes, damping):
    rows, mine = normal(sum(sizes), 5), parameters()
    whole = JointInputs.of(use_of(mine, rows)).reduced(damping)
    first, *others = rows.split(sizes)
    parts = JointInputs.of(use_of(mine, first)).reduced(damping)
    for other in others:
        parts = parts.add(use_of(mine, other)).reduced(damping)
    assert parts.rows == whole.rows
    one, other = (s.solve_for(gradients(), damping, may_wait=True).gradients for s in (whole, parts))
    torch.testing.assert_close(one, other)


def test_both_biases_move_their_sum_as_it_should():
    damping, rows = Damping(1e-3), normal(9, 5)
    new = JointInputs.of(use_of(parameters(), rows)).solve_for(gradients(), damping, may_wait=True).gradients
    X = torch.cat([rows, torch.ones(9, 1, dtype=rows.dtype)], dim=1)
    plain = gradients()
    G = torch.cat([plain[0][:4], plain[1][:4], plain[2][:4, None]], dim=1)
    expected = torch.linalg.solve(X.T @ X + 1e-3 * torch.eye(6, dtype=X.dtype), G.T).T
    torch.testing.assert_close(new[2][:4] + new[3][:4], expected[:, -1])
    torch.testing.assert_close(new[2][:4], new[3][:4])


def test_inputs_that_are_one_tensor_are_kept_once_until_they_differ():
    mine = (nn.Parameter(normal(4, 3)), None)
    parts = (Part((Piece(0, 0, 2, 0, 3),), (), 0), Part((Piece(0, 2, 4, 0, 3),), (), 1))
    x, y = normal(2, 3), normal(4, 3, seed=1)
    statistic = JointInputs.of(use_of(mine, x, x, parts=parts))
    assert (len(statistic.inputs), statistic.places) == (1, (0, 0))
    statistic = statistic.add(use_of(mine, x, y, parts=parts))
    assert (len(statistic.inputs), statistic.places) == (2, (0, 1))
    assert [one.rows for one in statistic.inputs] == [4, 6]
    G = normal(4, 3, seed=2)
    (new, _) = statistic.solve_for([G, None], Damping(0.1), may_wait=True).gradients
    for rows, X in ((slice(0, 2), torch.cat([x, x])), (slice(2, 4), torch.cat([x, y]))):
        moment = X.T @ X + 0.1 * torch.eye(3, dtype=X.dtype)
        torch.testing.assert_close(new[rows], torch.linalg.solve(moment, G[rows].T).T)
