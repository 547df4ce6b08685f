"""scikit-learn: multi-layer perceptrons that are trained with C-SGD, as estimators."""

import warnings
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state, check_scalar
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from consequent.maths.damping import DEFAULT, Damping
from consequent.optimizers import CSGD

__all__ = ["ConsequentialMLPClassifier", "ConsequentialMLPRegressor"]

FLOATS = (np.float64, np.float32)  # what is computed in: the inputs' own dtype, or the first of these


class _ConsequentialMLP(BaseEstimator):
    """What classifier and regressor share: the network and its training."""

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (100,),
        *,
        learning_rate_init: float = 0.1,
        damping: float | None = None,
        relative_damping: float | None = None,
        batch_size: int = 32,
        max_iter: int = 200,
        tol: float = 1e-4,
        n_iter_no_change: int = 10,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        random_state: Any = None,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.learning_rate_init = learning_rate_init
        self.damping = damping
        self.relative_damping = relative_damping
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    # ---- what the two differ in ---------------------------------------------------------------------------------

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A mean over samples."""
        raise NotImplementedError

    def _targets(self, y: NDArray[Any], dtype: torch.dtype) -> Tensor:
        """What the outputs are compared with."""
        raise NotImplementedError

    def _score(self, outputs: Tensor, targets: Tensor) -> float:
        """What ``score`` computes."""
        raise NotImplementedError

    def _stratify(self, y: NDArray[Any]) -> NDArray[Any] | None:
        """By what the samples are divided evenly when some are held out."""
        raise NotImplementedError

    # ---- training -----------------------------------------------------------------------------------------------

    def _start(self, X: NDArray[Any], outputs: int) -> None:
        """A new network that computes in the inputs' dtype."""
        self._check_parameters()
        sizes = _hidden_sizes(self.hidden_layer_sizes)
        self._random = check_random_state(self.random_state)
        widths = [self.n_features_in_, *sizes, outputs]
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):  # the user's own random numbers stay as they are
            torch.manual_seed(int(self._random.randint(2**31 - 1)))
            for inside, outside in pairwise(widths):
                layers += [nn.Linear(inside, outside, dtype=torch.tensor(X[:0]).dtype), nn.ReLU()]
        self.module_ = nn.Sequential(*layers[:-1])
        self.loss_curve_: list[float] = []
        self.n_iter_ = 0

    def _fit(self, X: NDArray[Any], y: NDArray[Any], outputs: int) -> None:
        self._start(X, outputs)
        inputs = torch.tensor(X)
        targets = self._targets(y, inputs.dtype)
        held_out: NDArray[Any] | None = None
        training = np.arange(len(X))
        if self.early_stopping:
            training, held_out = train_test_split(
                training, test_size=self.validation_fraction, stratify=self._stratify(y), random_state=self._random
            )
            self.validation_scores_: list[float] = []
        best, best_state, waited = -np.inf, None, 0
        for _ in range(self.max_iter):
            self._epoch(inputs[training], targets[training])
            merit = -self.loss_
            if held_out is not None:
                with torch.no_grad():
                    merit = self._score(self.module_(inputs[held_out]), targets[held_out])
                self.validation_scores_.append(merit)
            waited = 0 if merit > best + self.tol else waited + 1
            if merit > best:
                best, best_state = merit, deepcopy(self.module_.state_dict()) if self.early_stopping else None
            if waited >= self.n_iter_no_change:
                break
        else:
            warnings.warn(
                f"max_iter={self.max_iter} epochs are over and the training has not converged; raise max_iter or tol",
                ConvergenceWarning,
                stacklevel=3,
            )
        if best_state is not None:
            self.module_.load_state_dict(best_state)

    def _pass(self, X: NDArray[Any], y: NDArray[Any]) -> None:
        self._epoch(torch.tensor(X, dtype=self._dtype), self._targets(y, self._dtype))

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.module_.parameters()).dtype

    def _epoch(self, inputs: Tensor, targets: Tensor) -> None:
        """Once through the data, in random order. C-SGD without momentum has no state to keep between epochs."""
        optimizer = CSGD(
            self.module_,
            lr=float(self.learning_rate_init),
            damping=self.damping,
            relative_damping=self.relative_damping,
        )
        total = 0.0
        try:
            for batch in torch.from_numpy(self._random.permutation(len(inputs))).split(self.batch_size):
                loss = self._loss(self.module_(inputs[batch]), targets[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(batch)
        finally:
            optimizer.correction.detach()
            self.module_.zero_grad()
        if not np.isfinite(total):
            raise ValueError(
                f"the loss became {total}: lower learning_rate_init={self.learning_rate_init} or raise "
                f"{self._chosen_damping()}, and scale the inputs and targets"
            )
        self.loss_curve_.append(total / len(inputs))
        self.loss_ = self.loss_curve_[-1]
        self.n_iter_ += 1

    def _check_parameters(self) -> None:
        check_scalar(self.learning_rate_init, "learning_rate_init", Real, min_val=0, include_boundaries="neither")
        for name in ("damping", "relative_damping"):
            if getattr(self, name) is not None:
                check_scalar(getattr(self, name), name, Real, min_val=0)
        self._chosen_damping()
        check_scalar(self.batch_size, "batch_size", Integral, min_val=1)
        check_scalar(self.max_iter, "max_iter", Integral, min_val=1)
        check_scalar(self.tol, "tol", Real, min_val=0)
        check_scalar(self.n_iter_no_change, "n_iter_no_change", Integral, min_val=1)

    def _chosen_damping(self) -> Damping:
        return Damping.chosen(self.damping, self.relative_damping) or DEFAULT

    @torch.no_grad()
    def _outputs(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        inputs = validate_data(self, X, dtype=FLOATS, reset=False)
        outputs: Tensor = self.module_(torch.tensor(inputs, dtype=self._dtype))
        return outputs


class ConsequentialMLPClassifier(ClassifierMixin, _ConsequentialMLP):
    """A multi-layer perceptron with softmax cross-entropy, trained with C-SGD on the CPU.

    Args:
        hidden_layer_sizes: how wide each hidden layer is; they are followed by ReLU.
        learning_rate_init: μ, with the paper's meaning: look between 0.03 and 0.3. It stays the same.
        damping: λ, added to the un-normalised Gram matrix, if it is not to be relative.
        relative_damping: λ as a fraction of the inputs' mean eigenvalue (see :class:`consequent.Consequentialism`);
            without either of the two the library's default.
        batch_size: samples in a mini-batch.
        max_iter: epochs at most.
        tol: training ends when the loss has not become smaller by this, or with ``early_stopping`` the score greater,
        n_iter_no_change: for so many epochs in a row.
        early_stopping: hold out ``validation_fraction`` of the samples, and keep the weights that score best on them.
        validation_fraction: how many, from 0 to 1.
        random_state: for the first weights, the order of samples and those held out.

    Attributes:
        classes_: the labels.
        module_: the network, a :class:`torch.nn.Sequential`.
        loss_curve_: the mean training loss of each epoch; ``loss_`` is the last one.
        validation_scores_: the accuracy on the held-out samples after each epoch, with ``early_stopping``.
        n_iter_: epochs.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.pipeline import make_pipeline
        >>> from sklearn.preprocessing import StandardScaler
        >>> X, y = load_iris(return_X_y=True)
        >>> model = make_pipeline(StandardScaler(), ConsequentialMLPClassifier((20,), max_iter=100, random_state=0))
        >>> bool(model.fit(X, y).score(X, y) > 0.95)
        True
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train a new network.

        Args:
            X: ``[samples, features]``.
            y: a label of any kind for each sample.
        """
        inputs, targets = validate_data(self, X, y, dtype=FLOATS)
        check_classification_targets(targets)
        self.classes_, indices = np.unique(targets, return_inverse=True)
        self._fit(inputs, indices, len(self.classes_))
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None) -> Self:
        """Go once through these samples, with the network as it is.

        Args:
            X: ``[samples, features]``.
            y: their labels.
            classes: all labels that will ever occur; needed in the first call.
        """
        is_first = not hasattr(self, "module_")
        inputs, targets = validate_data(self, X, y, dtype=FLOATS, reset=is_first)
        check_classification_targets(targets)
        if is_first:
            if classes is None:
                raise ValueError("classes must be passed on the first call to partial_fit: all labels that will occur")
            self.classes_ = unique_labels(classes)
            self._start(inputs, len(self.classes_))
        elif classes is not None and not np.array_equal(self.classes_, unique_labels(classes)):
            raise ValueError(f"classes={classes!r} is not the same as on the last call to partial_fit: {self.classes_}")
        unknown = np.setdiff1d(targets, self.classes_)
        if len(unknown):
            raise ValueError(f"y holds the labels {unknown}, which are not among classes={self.classes_}")
        self._pass(inputs, np.searchsorted(self.classes_, targets))
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[Any]:
        """The probability of each class, ``[samples, classes]``."""
        return self._outputs(X).softmax(-1).numpy()

    def predict_log_proba(self, X: ArrayLike) -> NDArray[Any]:
        """The logarithm of the probabilities."""
        return self._outputs(X).log_softmax(-1).numpy()

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable label of each sample."""
        indices = self._outputs(X).argmax(-1).numpy()
        labels: NDArray[Any] = self.classes_[indices]
        return labels

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets)

    def _score(self, outputs: Tensor, targets: Tensor) -> float:
        return float(accuracy_score(targets, outputs.argmax(-1)))

    def _targets(self, y: NDArray[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(y)

    def _stratify(self, y: NDArray[Any]) -> NDArray[Any] | None:
        return y


class ConsequentialMLPRegressor(MultiOutputMixin, RegressorMixin, _ConsequentialMLP):
    """A multi-layer perceptron with half the squared error, trained with C-SGD on the CPU. Scale the targets to ≈ 1.

    Args:
        hidden_layer_sizes: and all further parameters: as for :class:`ConsequentialMLPClassifier`.
        learning_rate_init: μ.
        damping: λ.
        relative_damping: λ as a fraction.
        batch_size: samples in a mini-batch.
        max_iter: epochs at most.
        tol: the least progress.
        n_iter_no_change: epochs without it.
        early_stopping: whether to hold out samples.
        validation_fraction: how many.
        random_state: for all that is random.

    Attributes:
        module_: the network, a :class:`torch.nn.Sequential`.
        loss_curve_: the mean training loss of each epoch; ``loss_`` is the last one.
        validation_scores_: R² on the held-out samples after each epoch, with ``early_stopping``.
        n_iter_: epochs.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 200)[:, None]
        >>> model = ConsequentialMLPRegressor((50,), random_state=0).fit(X, np.sin(3 * X[:, 0]))
        >>> bool(model.score(X, np.sin(3 * X[:, 0])) > 0.98)
        True
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train a new network.

        Args:
            X: ``[samples, features]``.
            y: ``[samples]`` or ``[samples, targets]``.
        """
        inputs, targets = validate_data(self, X, y, dtype=FLOATS, multi_output=True, y_numeric=True)
        self._one_dimensional = targets.ndim == 1
        self._fit(inputs, targets, 1 if targets.ndim == 1 else targets.shape[1])
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Go once through these samples, with the network as it is.

        Args:
            X: ``[samples, features]``.
            y: ``[samples]`` or ``[samples, targets]``.
        """
        is_first = not hasattr(self, "module_")
        inputs, targets = validate_data(self, X, y, dtype=FLOATS, multi_output=True, y_numeric=True, reset=is_first)
        if is_first:
            self._one_dimensional = targets.ndim == 1
            self._start(inputs, 1 if targets.ndim == 1 else targets.shape[1])
        self._pass(inputs, targets)
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """``[samples]`` or ``[samples, targets]``, as ``y`` was."""
        outputs = self._outputs(X).numpy()
        return outputs[:, 0] if self._one_dimensional else outputs

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs - targets).square().sum(1).mean()

    def _score(self, outputs: Tensor, targets: Tensor) -> float:
        return float(r2_score(targets, outputs))

    def _targets(self, y: NDArray[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(y, dtype=dtype).reshape(len(y), -1)

    def _stratify(self, y: NDArray[Any]) -> NDArray[Any] | None:
        return None


def _hidden_sizes(sizes: int | Sequence[int]) -> list[int]:
    widths = list(sizes) if isinstance(sizes, Sequence | np.ndarray) else [sizes]
    for width in widths:
        if not isinstance(width, Integral) or isinstance(width, bool) or width < 1:
            raise ValueError(f"hidden_layer_sizes must be whole numbers > 0, got {sizes!r}")
    return [int(width) for width in widths]
