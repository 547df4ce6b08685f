"""The list of tasks: a seed makes each of them."""

from collections.abc import Callable

from benchmarks.defaults import functions, images, language, tabular, values
from benchmarks.defaults.task import Task

TASKS: dict[str, Callable[[int], Task]] = {
    "table-regression": tabular.friedman,
    "table-classes": tabular.many_classes,
    "digits-cnn": images.convolutional,
    "digits-deep-mlp": images.deep_perceptron,
    "digits-resnet": images.residual_plain,
    "digits-resnet-bn": images.residual_batchnorm,
    "gpt-characters": language.characters,
    "gpt-sorting": language.sorting,
    "q-learning": values.q_learning,
    "autoencoder": images.autoencoder,
    "vae": images.variational,
    "two-towers": images.contrastive,
    "siren": functions.coordinate_network,
    "pinn": functions.poisson,
    "smooth-function": functions.smooth_function,
    "signals": functions.signals,
}
QUICK = ("table-regression", "smooth-function")
