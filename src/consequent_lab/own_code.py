"""Models and data of the user's own, named on the command line as `module:function`.

A model's function is called as `function(shape, classes)`, or as `function()` if it needs nothing. `shape` is that of
one input (of an image: channels, height, width); `classes` is how many there are, or None if targets are numbers. It
returns an `nn.Module`; a class derived from it does, too.

A data set's function is called as `function()` and returns one of two:

- four tensors: training inputs, training targets, test inputs, test targets;
- two `torch.utils.data.Dataset`s, training and test, of pairs of an input and its target. They are read once, in order,
  and kept in memory.

Targets that are whole numbers from 0 on, `[N]`, are classes, learnt by cross-entropy. Targets that are floats, `[N]` or
`[N, …]`, are learnt by half of the squared error, summed over outputs. Images in bytes, `[N, channels, height, width]`,
are brought into the range that `--normalisation` says; all other inputs are taken as they are.

A run that goes on calls both functions again: they must return the same again, and data of another content are refused.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from consequent_lab.datasets import Dataset

PARTS = ("training inputs", "training targets", "test inputs", "test targets")
Maker = Callable[..., Any]


def function_named(option: str, name: str) -> Maker:
    """Imports a function that an option names as `module:function`; modules of the current folder are found.

    Raises:
        ValueError: if there is none; names what there is.
    """
    module_name, _, function_name = name.partition(":")
    if module_name.endswith(".py"):
        raise ValueError(f"--{option} {name}: name the module and not its file, {module_name[:-3]}:{function_name}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module itself needs
        raise ValueError(
            f"--{option} {name}: there is no module {module_name!r} in {here} or among the installed ones. Give the "
            "command in the folder that the module is in, or name that folder in PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        listed = f"it has {', '.join(own)}" if own else "it has none at all"
        raise ValueError(  # noqa: TRY004
            f"--{option} {name}: {module.__file__} has no function {function_name!r}; {listed}"
        )
    made: Maker = function
    return made


# ---- models ------------------------------------------------------------------------------------------------------


def own_model(name: str, dataset: Dataset) -> nn.Module:
    """Returns the model that a function makes, after a look at what it makes of two inputs.

    Raises:
        ValueError: if it is no model, or none of these data.
    """
    function = function_named("model", name)
    shape = tuple(dataset.train_images.shape[1:])
    model = function(*_arguments(function, name, (shape, dataset.classes)))
    if not isinstance(model, nn.Module):
        raise ValueError(  # noqa: TRY004
            f"--model {name} returned {_described(model)}: it must return an nn.Module"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"--model {name} returned a model without parameters that can be trained")
    _check_outputs(model, name, dataset)
    return model


def _arguments(function: Maker, name: str, offered: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns what the function is to be called with: nothing if it can do without, else all that is offered."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of something built in
        return offered
    for arguments in ((), offered):
        with suppress(TypeError):
            signature.bind(*arguments)
            return arguments
    raise ValueError(
        f"--model {name} needs {signature}: it is called as function(shape, classes), or as function() if it needs "
        "nothing"
    )


@torch.no_grad()
def _check_outputs(model: nn.Module, name: str, dataset: Dataset) -> None:
    inputs = dataset.train_images[:2]
    inputs = inputs.float() if inputs.dtype == torch.uint8 else inputs
    was_training = model.training
    model.eval()
    try:
        outputs = model(inputs)
    except Exception as error:
        raise ValueError(f"--model {name} fails with inputs of shape {list(inputs.shape)}: {error}") from error
    model.train(was_training)
    targets = dataset.train_labels[:2]
    wanted = [len(inputs), dataset.classes] if dataset.classes is not None else list(targets.shape)
    meaning = f"logits of {dataset.classes} classes" if dataset.classes is not None else "the targets"
    shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if shape != wanted:
        remedy = ": return targets[:, None] with the data, [N, 1]" if shape == [*wanted, 1] else ""
        raise ValueError(
            f"--model {name} makes {shape} of inputs {list(inputs.shape)}; {meaning} need a tensor of {wanted}{remedy}"
        )


# ---- data --------------------------------------------------------------------------------------------------------


def own_data(name: str) -> Dataset:
    """Returns the data set that a function makes.

    Raises:
        ValueError: if it returns anything but what is said above.
    """
    made = function_named("dataset", name)()
    parts = list(made) if isinstance(made, tuple | list) else []
    if len(parts) == 2 and not any(isinstance(part, Tensor) for part in parts):
        parts = [
            tensor for number, part in enumerate(parts) for tensor in _read(name, part, ("training", "test")[number])
        ]
    if len(parts) != 4 or not all(isinstance(part, Tensor) for part in parts):
        raise ValueError(
            f"--dataset {name} returned {_described(made)}: it must return {', '.join(PARTS)} as four tensors, or a "
            "training and a test set as two torch.utils.data.Datasets"
        )
    train_inputs, train_targets, test_inputs, test_targets = (_plain(part) for part in parts)
    classes = None
    for inputs, targets, split in ((train_inputs, train_targets, "training"), (test_inputs, test_targets, "test")):
        if not len(inputs) or len(inputs) != len(targets):
            raise ValueError(f"--dataset {name}: {len(inputs)} {split} inputs and {len(targets)} targets")
        for tensor, what in ((inputs, "inputs"), (targets, "targets")):
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(f"--dataset {name}: some {split} {what} are NaN or infinite; remove or replace them")
    for before, after, what in ((train_inputs, test_inputs, "inputs"), (train_targets, test_targets, "targets")):
        if before.shape[1:] != after.shape[1:] or before.dtype != after.dtype:
            raise ValueError(
                f"--dataset {name}: training {what} are {before.dtype} {list(before.shape)}, test {what} are "
                f"{after.dtype} {list(after.shape)}: they must agree up to their number"
            )
    if not train_targets.is_floating_point():
        lowest = min(int(train_targets.min()), int(test_targets.min()))
        if train_targets.ndim != 1 or lowest < 0:
            raise ValueError(
                f"--dataset {name}: targets of {train_targets.dtype} are classes, [N] and from 0 on; these are "
                f"{list(train_targets.shape)} and begin at {lowest}. Targets that are numbers must be floats"
            )
        classes = max(int(train_targets.max()), int(test_targets.max())) + 1
    return Dataset(name, train_inputs, train_targets, test_inputs, test_targets, classes)


def _read(name: str, dataset: Any, split: str) -> tuple[Tensor, Tensor]:
    try:
        inputs, targets = default_collate([dataset[number] for number in range(len(dataset))])
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ValueError(
            f"--dataset {name}: the {split} set, a {type(dataset).__name__}, cannot be read as pairs of an input and "
            f"its target of one shape each ({error})"
        ) from error
    return inputs, targets


def _plain(tensor: Tensor) -> Tensor:
    """On the CPU, in a type that can be learnt: classes as int64, numbers as float32."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point():
        return tensor.float()
    return tensor if tensor.dtype == torch.uint8 and tensor.ndim == 4 else tensor.long()


def _described(made: object) -> str:
    if isinstance(made, tuple | list):
        return f"{len(made)} of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return f"a value of type {type(made).__name__}"
