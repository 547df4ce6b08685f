"""Refusing what would be silently wrong: gradients that no backward pass explains, or that were corrected before."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from consequent.capture.at_step import StepCorrector
from consequent.capture.capture import Capture
from consequent.capture.records import Record
from consequent.capture.torch_internals import divide_factor_of, graph_is_being_captured
from consequent.options.parameter_groups import parameters_of
from consequent.ranks.sharded_tensors import is_nonzero
from consequent.reports.errors import CAPTURED_TOO_EARLY
from consequent.reports.reports import shown


def _checked(optimizer: object) -> Optimizer:
    """The optimiser that makes the step, if it is one that can be made consequentialist."""
    if isinstance(optimizer, nn.Module):
        raise TypeError(f"got the model {type(optimizer).__name__} first: the order is attach(optimizer, model)")
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        name = optimizer.__name__
        raise TypeError(f"got the class {name}; make an instance: {name}(model.parameters(), lr=…)")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    optimizer = _unwrapped(optimizer)
    if isinstance(optimizer, LBFGS):
        raise TypeError(
            "LBFGS cannot be made consequentialist: its line search and its curvature estimate need the gradient of "
            "the loss, and a corrected gradient is not one. Use SGD, Adam or another first-order optimiser."
        )
    return optimizer


def checked_optimizers(optimizers: object) -> list[Optimizer]:
    """The optimisers that make the steps, of one or a list of several. Raises unless all can be corrected."""
    given = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    if not given:
        raise ValueError("got an empty list of optimisers: there is no step to correct the gradients at")
    inner = [_checked(optimizer) for optimizer in given]
    twice = [type(one).__name__ for place, one in enumerate(inner) if any(one is other for other in inner[:place])]
    if twice:
        raise ValueError(f"the same {twice[0]} is there twice among the optimisers: name each once")
    return inner


def refuse_parameters_in_two(layers: Mapping[str, Sequence[Tensor]], optimizers: Sequence[Optimizer]) -> None:
    """Raise if a parameter of a corrected layer lies in two optimisers.

    Args:
        layers: the parameters of each, by its name.
        optimizers: all that are attached together.
    """
    holder: dict[Tensor, str] = {}
    of_layer = {parameter: name for name, parameters in layers.items() for parameter in parameters}
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            if parameter in holder and parameter in of_layer:
                raise ValueError(
                    f"{shown(of_layer[parameter])}: {holder[parameter]} and {type(optimizer).__name__} both hold its "
                    f"parameter of shape {list(parameter.shape)}, which would be stepped twice. Take it out of one."
                )
            holder[parameter] = type(optimizer).__name__


def refuse_split_layers(
    mine: Mapping[nn.Module, set[Tensor]], theirs: Mapping[nn.Module, set[Tensor]], names: Mapping[nn.Module, str]
) -> None:
    """Raise if two corrections would each solve for a part of a layer, whose weight and bias belong together.

    Args:
        mine: of each layer, the parameters that the optimisers of one correction hold,
        theirs: and those of the other one's.
        names: of the layers.
    """
    for layer, held in mine.items():
        other = theirs.get(layer, set())
        if held - other and other - held:
            raise RuntimeError(
                f"{shown(names[layer])}: its weight and its bias lie in two optimisers that are attached separately, "
                "and each would be corrected as if the other stood still. Attach both at once, with one correction: "
                "consequent.attach([first_optimizer, second_optimizer], model); or detach() the other correction."
            )


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimiser that makes the step, inside of those that Accelerate and Lightning put around it."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def refuse_corrected_before(records: Iterable[Record], capture: Capture, others: Iterable[StepCorrector]) -> None:
    """Raise if a gradient is, or contains, one that a correction has rewritten already."""
    others = [other for other in others if other.records]

    def name_of(record: Record) -> str:
        return shown(capture.names[record.first_use.layer])

    for record in records:
        if record.accumulated_on_corrected:
            raise RuntimeError(
                f"{name_of(record)}: this backward pass was added to a gradient that had been corrected already. "
                "Call zero_grad() of every optimiser, or of the model, between a step and the next backward pass."
            )
        if record.was_zeroed_in_part:
            raise RuntimeError(
                f"{name_of(record)}: between two backward passes some of its gradients were emptied (zero_grad() of "
                "one optimiser?) and others were not, so that they are of different samples. Zero all of them there "
                'or none, or attach with at="backward".'
            )
        for other in others:
            theirs = other.records.get(record.weight)
            if theirs is None or not any(map(theirs.has_just_corrected, record.members)):
                continue
            raise RuntimeError(
                f"{name_of(record)}: its gradient was corrected just now by another Consequentialism on the same "
                "model, and would be corrected twice. Keep one of them and detach() the other."
            )


def refuse_step_in_backward(corrector: StepCorrector) -> None:
    """Raise if an optimiser steps while a backward pass is under way: not all gradients are there."""
    if corrector.is_in_a_pass:
        raise RuntimeError(
            "an optimiser stepped in the midst of a backward pass (in a gradient hook?), whose gradients are corrected "
            'together once all of them are there. Attach with at="backward", or step after backward().'
        )


def refuse_capture_before_first_step(steps: int) -> None:
    """Raise if a CUDA graph is being captured before the first step, which compiles kernels."""
    if graph_is_being_captured() and steps == 0:
        raise RuntimeError(CAPTURED_TOO_EARLY)


def refuse_capture_of_averages() -> None:
    """Raise if a CUDA graph is being captured: whether a step refreshes its averages is decided by the host."""
    if graph_is_being_captured():
        raise RuntimeError(
            "a step with averaging= or refresh= cannot be captured in a CUDA graph, which would do the same at every "
            "step. Capture the forward and backward pass, and call optimizer.step() outside of the graph."
        )


def refuse_capture_of_ranks() -> None:
    """Raise if a CUDA graph is being captured: at every step the hosts of all ranks tell each other what they have."""
    if graph_is_being_captured():
        raise RuntimeError(
            "a step of several ranks cannot be captured in a CUDA graph: their hosts talk to each other at every step. "
            "Capture the forward and backward pass, and call optimizer.step() outside of the graph."
        )


def refuse_promise_by_hand(promise: float | None) -> None:
    """Raise if a step's promise is limited, and gradients are corrected before that step.

    Args:
        promise: π.
    """
    if promise is not None:
        raise RuntimeError(
            f"promise={promise:g} is kept in optimizer.step(), and what becomes of gradients between correction.step() "
            "and that is not known: leave correction.step() out, and clip before (optimizer.step() corrects then), or "
            "leave promise= out"
        )


def refuse_promise_of_ranks(promise: float | None, model: nn.Module, *, by_hand: bool) -> None:
    """Raise if a step's promise is limited, on several ranks whose gradients no wrapper averages.

    Args:
        promise: π.
        model: what is trained.
        by_hand: whether the user averages them.
    """
    if promise is None:
        return
    if by_hand:
        raise RuntimeError(
            f"promise={promise:g} asks what becomes of gradients between the backward pass and the step, and with "
            "process_group= they are averaged by hand: wrap the model in DistributedDataParallel, or leave promise= out"
        )
    factor = divide_factor_of(model)
    if factor is not None:
        raise RuntimeError(
            f"promise={promise:g} takes the gradients for those of the mean of all ranks' losses, and "
            f"set_gradient_divide_factor({factor:g}) was called: leave out one of the two"
        )


def refuse_uncaptured(
    capture: Capture, corrector: StepCorrector, owns: Callable[[Tensor], bool], listed: Container[str]
) -> None:
    """Raise if there are gradients although no backward pass was seen, unless they were corrected before.

    Args:
        capture: the layers.
        corrector: their records.
        owns: whether the optimiser holds a parameter.
        listed: layers of which it is known, and told, that they stay plain.
    """
    for name, layer in capture.layers.items():
        if layer in capture.misbehaving or name in listed:
            continue
        for parameter, record in [
            (p, corrector.records.get(unit[0])) for unit in capture.units_of(layer) for p in unit
        ]:
            if parameter.grad is None or not owns(parameter):
                continue
            if record is not None and (record.was_corrected(parameter) or parameter in record.beside.others):
                continue
            if has_gradient(parameter):
                raise RuntimeError(
                    f"{shown(name)} has a gradient, but no forward and backward pass through the attached model was "
                    "seen for it. Was backward() called before attaching (zero_grad() and go on), is it a copy of the "
                    "attached model, or was .grad set by hand (use consequential_gradient, or detach)?"
                )


def uncaptured_layers(
    solved: Container[int], capture: Capture, corrector: StepCorrector, owns: Callable[[Tensor], bool]
) -> Iterator[str]:
    """Names of layers whose weight got a gradient although none of their own products was reached.

    Args:
        solved: the ids of weights of which one was.
        capture: the layers.
        corrector: their records.
        owns: whether the optimiser holds a parameter.
    """
    for name, layer in capture.layers.items():
        for weight in [unit[0] for unit in capture.units_of(layer)]:
            if id(weight) in solved or layer in capture.misbehaving or not owns(weight) or weight.grad is None:
                continue
            record = corrector.records.get(weight)
            if (record is None or not record.was_corrected(weight)) and has_gradient(weight):
                yield name  # otherwise nobody zeroed it since the last step


def has_gradient(parameter: Tensor) -> bool:
    """Whether there is a gradient that is not all zeros, as ``zero_grad(set_to_none=False)`` leaves it."""
    return parameter.grad is not None and is_nonzero(parameter.grad)
