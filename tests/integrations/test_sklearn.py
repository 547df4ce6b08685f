"""The estimators are what scikit-learn expects of one, and learn."""

import pickle
import warnings

import numpy as np
import pytest
import reference
import torch
from models.expected import expected_backward
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

from consequent.integrations.sklearn import ConsequentialMLPClassifier, ConsequentialMLPRegressor


@pytest.fixture(autouse=True)
def _few_epochs_will_do():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


@parametrize_with_checks(
    [
        ConsequentialMLPClassifier((10,), max_iter=20, batch_size=100),
        ConsequentialMLPClassifier((10,), max_iter=20, batch_size=100, early_stopping=True, validation_fraction=0.3),
        ConsequentialMLPRegressor((10,), max_iter=20, batch_size=100),
    ]
)
def test_scikit_learn_approves(estimator, check):
    check(estimator)


def digits():
    X, y = load_digits(return_X_y=True)
    return train_test_split(X / 16, y, test_size=0.3, stratify=y, random_state=0)


def test_is_not_worse_than_scikit_learns_own_after_the_same_epochs():
    """Adam with its usual rate there, C-SGD with its usual rate here; what either could do when tuned is not asked."""
    X, X_test, y, y_test = digits()
    options = {"hidden_layer_sizes": (100,), "max_iter": 10, "batch_size": 32, "random_state": 0}
    theirs = MLPClassifier(**options).fit(X, y)
    ours = ConsequentialMLPClassifier(**options).fit(X, y)
    assert ours.score(X_test, y_test) > 0.95
    assert ours.score(X_test, y_test) >= theirs.score(X_test, y_test) - 0.01
    assert ours.loss_ < theirs.loss_


@pytest.mark.parametrize("damping", [0.1, ("relative", 0.3), None], ids=str)
def test_an_epoch_is_c_sgd_of_the_reference(damping):
    rng = np.random.RandomState(0)
    X, y = rng.randn(12, 4), rng.randint(0, 3, 12)
    options = {} if damping is None else reference.damping_options(damping)
    model = ConsequentialMLPClassifier((5,), batch_size=12, max_iter=1, random_state=0, **options)
    start = clone(model).set_params(learning_rate_init=1e-300).fit(X, y).module_
    trained = model.fit(X, y).module_

    def loss(module):
        return torch.nn.functional.cross_entropy(module(torch.tensor(X)), torch.tensor(y))

    before = [parameter.detach().clone() for parameter in start.parameters()]
    start.zero_grad()
    expected_backward(start, loss, 12, damping=reference.DEFAULT_DAMPING if damping is None else damping)
    for parameter, old, now in zip(start.parameters(), before, trained.parameters(), strict=True):
        torch.testing.assert_close(now, old - 0.1 * parameter.grad)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_computes_in_the_inputs_dtype(dtype):
    X, y = np.eye(6, dtype=dtype), np.arange(6) % 2
    model = ConsequentialMLPClassifier((3,), max_iter=2).fit(X, y)
    assert model.predict_proba(X).dtype == dtype
    assert ConsequentialMLPRegressor((3,), max_iter=2).fit(X, y).predict(X).dtype == dtype
    assert {parameter.dtype for parameter in model.module_.parameters()} == {torch.tensor(X).dtype}


@pytest.mark.parametrize(
    "labels", [np.array(["b", "a"]), np.array([True, False]), np.array([-3, 8]), np.array(["b", "a"], dtype=object)]
)
def test_labels_of_any_kind(labels):
    X = np.concatenate([np.eye(4) - 1, np.eye(4) + 1])
    y = labels.repeat(4)
    model = ConsequentialMLPClassifier((8,), max_iter=50, random_state=0).fit(X, y)
    assert list(model.predict(X)) == list(y)
    assert list(model.classes_) == sorted(set(y))
    np.testing.assert_allclose(model.predict_proba(X).sum(1), 1)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), model.predict_proba(X))


def test_several_targets():
    X = np.random.RandomState(0).randn(60, 3)
    Y = np.stack([X[:, 0], X[:, 1] - X[:, 2]], axis=1)
    model = ConsequentialMLPRegressor((20,), random_state=0).fit(X, Y)
    assert model.predict(X).shape == Y.shape
    assert model.score(X, Y) > 0.95


def test_partial_fit_goes_on_where_fit_stopped():
    """Three passes are three epochs: the same batches in the same order."""
    X, _, y, _ = digits()
    whole = ConsequentialMLPClassifier((20,), max_iter=3, random_state=0).fit(X, y)
    parts = ConsequentialMLPClassifier((20,), random_state=0)
    for _ in range(3):
        parts = pickle.loads(pickle.dumps(parts)).partial_fit(X, y, classes=np.arange(10))
    assert parts.loss_curve_ == whole.loss_curve_
    np.testing.assert_array_equal(parts.predict_proba(X), whole.predict_proba(X))
    assert parts.n_iter_ == 3


def test_partial_fit_refuses_unknown_labels():
    X, y = np.eye(4), np.array([0, 1, 0, 2])
    with pytest.raises(ValueError, match="classes must be passed"):
        ConsequentialMLPClassifier().partial_fit(X, y)
    with pytest.raises(ValueError, match=r"labels \[2\], which are not among"):
        ConsequentialMLPClassifier().partial_fit(X, y, classes=[0, 1])
    model = ConsequentialMLPClassifier().partial_fit(X, y, classes=[0, 1, 2])
    with pytest.raises(ValueError, match="not the same as on the last call"):
        model.partial_fit(X, y, classes=[0, 1])


def test_training_ends_when_it_makes_no_progress():
    X, y = np.eye(4), np.array([0.0, 1.0, 0.0, 1.0])
    model = ConsequentialMLPRegressor((20,), max_iter=500, n_iter_no_change=3, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        model.fit(X, y)
    losses = model.loss_curve_
    assert model.n_iter_ == len(losses) < 500
    progress = -np.diff(losses)
    assert max(progress[-3:]) <= model.tol < progress[-4]
    with pytest.warns(ConvergenceWarning, match="max_iter=2"):
        model.set_params(max_iter=2).fit(X, y)


def test_early_stopping_keeps_the_best_weights():
    X, X_test, y, y_test = digits()
    model = ConsequentialMLPClassifier((30,), max_iter=6, early_stopping=True, random_state=0).fit(X[:400], y[:400])
    assert len(model.validation_scores_) == model.n_iter_
    held_out = train_test_split(X[:400], y[:400], test_size=0.1, stratify=y[:400], random_state=_after_start())
    assert model.score(held_out[1], held_out[3]) == max(model.validation_scores_)
    assert model.score(X_test, y_test) > 0.9


def _after_start():
    """The state of the estimator's random numbers once the network is there."""
    random = np.random.RandomState(0)
    random.randint(2**31 - 1)
    return random


def test_nothing_stays_attached_and_the_users_random_numbers_stay():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = ConsequentialMLPClassifier((3,), max_iter=2).fit(np.eye(4), [0, 1, 0, 1])
    assert torch.equal(torch.rand(3), expected)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.module_.modules())


def test_can_be_searched_over():
    X, _, y, _ = digits()
    search = GridSearchCV(
        ConsequentialMLPClassifier((10,), max_iter=2, random_state=0), {"learning_rate_init": [1e-5, 0.1]}, cv=2
    )
    assert search.fit(X[:200], y[:200]).best_params_ == {"learning_rate_init": 0.1}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"hidden_layer_sizes": (5, 0)}, "hidden_layer_sizes"),
        ({"hidden_layer_sizes": 2.5}, "hidden_layer_sizes"),
        ({"learning_rate_init": 0}, "learning_rate_init"),
        ({"damping": -1.0}, "damping"),
        ({"relative_damping": -1.0}, "relative_damping"),
        ({"damping": 0.2, "relative_damping": 0.3}, "damping=0.2 and relative_damping=0.3"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_iter": 0}, "max_iter"),
    ],
)
def test_bad_parameters_are_named(parameters, message):
    with pytest.raises(ValueError, match=message):
        ConsequentialMLPClassifier(**parameters).fit(np.eye(4), [0, 1, 0, 1])


@pytest.mark.filterwarnings("ignore::consequent.ConsequentWarning")
def test_a_diverging_training_says_what_to_do():
    X = np.random.RandomState(0).randn(50, 3)
    model = ConsequentialMLPRegressor((20, 20), learning_rate_init=1e6, random_state=0)
    with pytest.raises(ValueError, match=r"lower learning_rate_init=1000000\.0 or raise relative_damping="):
        model.fit(X, X[:, 0] * 1e6)
