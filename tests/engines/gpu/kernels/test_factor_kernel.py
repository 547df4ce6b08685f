import pytest
import torch
from dependent import longest_step

pytest.importorskip("triton", reason="triton is not installed")

from consequent.engines.gpu.kernels.factor import LARGEST, Team, factor_by, inverse_factor, plan_team

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the interpreter, about NaN
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"
EPS = torch.finfo(torch.float32).eps
SIZES = [1, 2, 17, 28, 31, 32, 33, 65, 145]
LARGE_SIZES = [289, 577, 600, 1000, LARGEST]


def moment_of(size, condition, seed=0):
    """A moment of the given condition number, in units far from 1."""
    generator = torch.Generator().manual_seed(size + seed)
    vectors, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    moment = 50 * (vectors * torch.logspace(0, -torch.tensor(float(condition)).log10(), size)) @ vectors.T
    return ((moment + moment.T) / 2).float().to(DEVICE)


def check_factor(moment, W, status, level):
    size = len(moment)
    assert W.shape == moment.shape
    assert W.is_contiguous()
    assert torch.equal(W, W.tril())
    W, moment, status = W.cpu().double(), moment.cpu().double(), status.cpu().double()
    damped = moment + level * torch.eye(size)
    eigenvalues = torch.linalg.eigvalsh(damped)
    condition = (eigenvalues[-1] / eigenvalues[0]).item()
    assert status[0].item() == pytest.approx(moment.trace().item(), rel=1e-5)
    assert status[1].item() == pytest.approx(level, rel=1e-5)
    assert status[2].item() == 1
    assert status[3].item() == 0

    unit = W @ damped @ W.T - torch.eye(size)
    assert torch.linalg.matrix_norm(unit, 2) <= 10 * EPS * condition + 10 * EPS
    gradient = torch.randn(5, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.linalg.solve(damped, gradient.T).T
    assert (gradient @ W.T @ W - expected).norm() <= (10 * EPS * condition + 10 * EPS) * expected.norm()


@pytest.mark.parametrize("size", SIZES)
def test_factor(size):
    moment = moment_of(size, 1e3)
    before = moment.clone()
    W, status = inverse_factor(moment, 0.01)
    check_factor(moment, W, status, 0.01)
    assert torch.equal(moment, before)


@pytest.mark.parametrize("size", [30, 70])
@pytest.mark.parametrize("condition", [1.0, 1e5])
def test_conditions(size, condition):
    moment = moment_of(size, condition)
    W, status = inverse_factor(moment, 0.0)
    check_factor(moment, W, status, 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too slow in the interpreter")
@pytest.mark.parametrize("size", LARGE_SIZES)
@pytest.mark.parametrize("condition", [10.0, 1e5])
def test_large_factor(size, condition):
    moment = moment_of(size, condition)
    W, status = inverse_factor(moment, 1e-4)
    check_factor(moment, W, status, 1e-4)
    for _ in range(20):  # a race would not show every time
        assert torch.equal(inverse_factor(moment, 1e-4)[0], W)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("members", [2, 3, 7, 20])
@pytest.mark.parametrize("size", [33, 64, 65, 145, 200, 289, 577])
def test_teams_of_any_size(size, members):
    moments = torch.stack([moment_of(size, 1e3, seed) for seed in range(5)])
    alone, _ = factor_by(Team(1), moments, 0.01)
    W, status = factor_by(Team(members), moments, 0.01)
    for each in range(5):
        check_factor(moments[each], W[each], status[each], 0.01)
    torch.testing.assert_close(W, alone, rtol=0, atol=1e-3 * alone.abs().max().item())
    for _ in range(50):  # a race would not show every time
        again, status_again = factor_by(Team(members), moments, 0.01)
        assert torch.equal(again, W)
        assert torch.equal(status_again, status)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_more_teams_than_the_device_can_run_at_once():
    moment = moment_of(200, 1e3)
    W, _ = inverse_factor(moment, 0.01)
    many, status = inverse_factor(moment.expand(300, 200, 200), 0.01)
    assert torch.equal(many, W.expand_as(many))
    assert (status[:, 2] == 1).all()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_several_streams_and_other_work_at_once():
    moments = [torch.stack([moment_of(size, 1e3, seed) for seed in range(8)]) for size in (577, 289, 145, 1000)]
    expected = [inverse_factor(each, 0.01)[0] for each in moments]
    streams = [torch.cuda.Stream() for _ in moments]
    work = torch.randn(4096, 4096, device=DEVICE)
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for stream, each in zip(streams, moments, strict=True):
            with torch.cuda.stream(stream):
                found.append(inverse_factor(each, 0.01)[0])
            work @ work
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_the_interpreter_runs_one_program_at_a_time():
    moment = torch.zeros(3, 200, 200)
    assert plan_team(moment) == Team(1)
    if not INTERPRETED:
        assert plan_team(moment.to(DEVICE)).members == 1 + 4


def test_large_factor_of_three_tiles():
    moment = moment_of(289, 1e4)
    W, status = inverse_factor(moment, 1e-3)
    check_factor(moment, W, status, 1e-3)


def test_relative_damping():
    moment = moment_of(33, 1e3)
    W, status = inverse_factor(moment, 0.1 / 40, of_trace=True)
    check_factor(moment, W, status, 0.1 / 40 * moment.trace().item())


def test_relative_damping_of_nothing_is_one():
    W, status = inverse_factor(torch.zeros(5, 5, device=DEVICE), 0.1 / 5, of_trace=True)
    assert torch.equal(W.cpu(), torch.eye(5))
    assert status.tolist() == [0, 1, 1, 0]


def test_several_matrices_at_once():
    moments = torch.stack([moment_of(37, 1e2, seed) for seed in range(3)])
    W, status = inverse_factor(moments, 0.5)
    for each in range(3):
        check_factor(moments[each], W[each], status[each], 0.5)


def test_strides_do_not_matter():
    moment = moment_of(20, 10)
    padded = torch.zeros(20, 30, device=DEVICE)
    padded[:, :20] = moment
    W, status = inverse_factor(padded[:, :20], 0.1)
    check_factor(moment, W, status, 0.1)


@pytest.mark.parametrize("place", [0, 20, 69])
def test_a_failure_is_told(place):
    moment = moment_of(70, 10)
    moment[place, place] = -1.0
    _, status = inverse_factor(moment, 0.0)
    assert status[2] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [(50, 50), (60, 3)])
def test_what_is_not_finite_is_told(bad, place):
    moment = moment_of(70, 10)
    moment[place] = moment[place[::-1]] = bad
    _, status = inverse_factor(moment, 0.1)
    assert status[2] == 0


def test_a_singular_moment_without_damping():
    """All but as many pivots as there are rows are rounding errors."""
    rows = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    W, status = inverse_factor(rows.T @ rows, 0.0)
    assert status[2:].tolist() == [1, 37]
    assert longest_step(rows, W) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("size", [17, 100])
@pytest.mark.parametrize("condition", [1.0, 1e5])
def test_the_floor_leaves_other_matrices_alone(size, condition):
    """Bit by bit what it is without a floor."""
    moment = moment_of(size, condition)
    W, status = inverse_factor(moment, 1e-4)
    without, status_without = factor_by(plan_team(moment), moment, 1e-4, floor=0.0)
    assert torch.equal(W, without)
    assert torch.equal(status, status_without)
    assert status[3] == 0


@pytest.mark.parametrize("place", [1, 15, 16, 31, 40, 63, 69])
def test_only_the_pivot_of_a_dependent_feature_is_raised(place):
    """As if its diagonal entry had been larger by what it has in common with the others: the exact factor of that."""
    inputs = torch.randn(200, 70, generator=torch.Generator().manual_seed(0))
    inputs[:, place] = inputs[:, 0] * 2 - inputs[:, place - 1]
    inputs = inputs.to(DEVICE)
    moment = inputs.T @ inputs
    W, status = inverse_factor(moment, 1e-6)
    assert status[2:].tolist() == [1, 1]
    raised = moment.double()
    raised.diagonal().add_(1e-6)
    raised[place, place] *= 2
    unit = W.double() @ raised @ W.double().T - torch.eye(70, device=DEVICE)
    assert torch.linalg.matrix_norm(unit, 2) < 1e-4


def test_pivots_are_judged_by_the_diagonal_that_is_given():
    """Of a part of a matrix: what is left of it may be small, the whole entry was not."""
    left = moment_of(40, 10)
    whole = left.diagonal() * 2**10
    assert factor_by(plan_team(left), left, 0.0, diagonal=whole)[1][2:].tolist() == [1, 0]
    whole[7] *= 2**10
    W, status = factor_by(plan_team(left), left, 0.0, diagonal=whole)
    assert status[2:].tolist() == [1, 1]
    assert W[7, 7].item() == pytest.approx(whole[7].item() ** -0.5, rel=1e-5)
    both = torch.stack([whole, left.diagonal()])
    _, status = factor_by(Team(1), torch.stack([left, left]), 0.0, diagonal=both)
    assert status[:, 2:].tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize("place", [1, 20, 50])
def test_what_no_rounding_explains_is_told(place):
    moment = torch.eye(70, device=DEVICE)
    moment[place, 0] = moment[0, place] = 1.1
    assert inverse_factor(moment, 0.0)[1][2] == 0
    moment[place, 0] = moment[0, place] = 1.0 + 1e-6
    assert inverse_factor(moment, 0.0)[1][2:].tolist() == [1, 1]


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="float64"):
        inverse_factor(torch.eye(2, dtype=torch.float64, device=DEVICE), 0.1)
    with pytest.raises(ValueError, match="not empty"):
        inverse_factor(torch.ones(2, 3, device=DEVICE), 0.1)
    with pytest.raises(ValueError, match="not empty"):
        inverse_factor(torch.ones(0, 0, device=DEVICE), 0.1)
    with pytest.raises(ValueError, match="too large"):
        inverse_factor(torch.eye(LARGEST + 1, device=DEVICE), 0.1)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_capture():
    moment = torch.stack([moment_of(145, 100, seed) for seed in range(2)])
    W, status = inverse_factor(moment, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_W, captured_status = inverse_factor(moment, 0.1)
    for _ in range(3):  # the counters have to start anew each time
        captured_W.zero_()
        graph.replay()
        assert torch.equal(W, captured_W)
        assert torch.equal(status, captured_status)
