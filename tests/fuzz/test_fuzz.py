"""The library agrees with the reference on every one of these seeds, and a library that is a little wrong does not.

More seeds: ``python -m fuzz --loops 10000 --mode own`` (from ``tests``), for one that fails ``--seed 123 --shrink``.
"""

import pytest
import torch

import consequent
from fuzz.reference import Call
from fuzz.run import Case, IllegalError, run

CHUNK, QUICK, ALL = 100, 8, 30  # seeds in a test, and tests


@pytest.fixture(autouse=True)
def one_thread():
    """The matrices are tiny: a second thread would only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def failures(seeds, mode):
    """What is said of those seeds that fail."""
    found = []
    for seed in seeds:
        try:
            run(seed, mode)
        except AssertionError as error:
            found.append(f"seed {seed}: {error}")
        except IllegalError:
            pass
    return found


@pytest.mark.parametrize("mode", ["own", "averages"])
@pytest.mark.parametrize(
    "chunk", [*range(QUICK), *(pytest.param(n, marks=pytest.mark.slow) for n in range(QUICK, ALL))]
)
def test_seeds(chunk, mode):
    failed = failures(range(chunk * CHUNK, (chunk + 1) * CHUNK), mode)
    if failed:
        first_lines = "\n".join(message.splitlines()[0] for message in failed)
        pytest.fail(f"{len(failed)} of {CHUNK} seeds; the first:\n{failed[0]}\n\nall:\n{first_lines}", pytrace=False)


def check_found(is_concerned, mode):
    """Most seeds that a fault concerns find it; in some of them gradients are zero, say, or nothing is reached."""
    seeds = [seed for seed in range(300) if is_concerned(Case(seed, mode))][:20]
    assert len(seeds) > 10
    assert len(failures(seeds, mode)) > 0.5 * len(seeds)


def times(factor, *names):
    return lambda options: {name: factor * value if name in names else value for name, value in options.items()}


# What a wrong library would go by, and which cases it concerns.
WRONG_OPTIONS = {
    "own: more damping": (times(1.01, "damping", "relative_damping"), lambda case: case.damping is not None),
    "averages: more damping": (times(1.01, "damping", "relative_damping"), lambda case: case.damping is not None),
    "own: another divisor": (lambda options: options | {"loss_reduction": 3.21}, lambda case: True),
    "averages: another divisor": (lambda options: options | {"loss_reduction": 3.21}, lambda case: True),
    "own: a wider bound": (times(1.01, "bound"), lambda case: case.bound and case.lr > 0.1),
    "averages: a wider bound": (times(1.01, "bound"), lambda case: case.bound and case.lr > 0.1),
    "averages: a faster average": (times(0.99, "averaging"), lambda case: case.refresh == 1),
    "averages: fewer looks": (times(2, "refresh"), lambda case: case.refresh == 1),
}


@pytest.mark.parametrize("fault", WRONG_OPTIONS)
def test_wrong_options_are_found(monkeypatch, fault):
    (wrong, is_concerned), attach = WRONG_OPTIONS[fault], consequent.attach
    monkeypatch.setattr(consequent, "attach", lambda *args, **options: attach(*args, **wrong(options)))
    check_found(is_concerned, fault.split(":")[0])


@pytest.mark.parametrize("mode", ["own", "averages"])
def test_a_library_that_is_not_attached_is_found(monkeypatch, mode):
    monkeypatch.setattr(consequent, "attach", lambda *args, **options: None)
    check_found(lambda case: True, mode)


def test_a_state_that_is_not_loaded_is_found(monkeypatch):
    monkeypatch.setattr(consequent.Correction, "load_state_dict", lambda self, state: None)
    check_found(lambda case: case.steps[0].taken and any(step.reloaded for step in case.steps[1:]), "averages")


def test_a_correction_that_is_not_divided_by_the_number_of_calls_is_found(monkeypatch):
    monkeypatch.setattr(Call, "number_of_uses", 1)
    check_found(lambda case: case.net.kind == "recursive", "own")
