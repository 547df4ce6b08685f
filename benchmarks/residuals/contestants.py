"""Who takes part: each makes a function that trains a problem's network a little further.

The rivals' loss and its gradient are traced into one graph and compiled, which takes them a third to a half of the time
that they take eagerly. On a GPU they are a CUDA graph. Neither is made on the clock; ours makes its own CUDA graphs in
the first step, on the clock. First-order methods lower their rate to zero along a half cosine.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import consequent
from benchmarks.residuals.problems import Problem
from consequent.whole.cuda_graph import captured, copy_all

Advance = Callable[[float], None]  # trains further; told which part of the time is over
Settings = dict[str, float]


class Loss(nn.Module):
    """The weighted sum of the terms' mean squares."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.model, self.problem = problem.model, problem

    def forward(self, batches: dict[str, tuple[Tensor, ...]]) -> Tensor:
        """Of all samples."""
        total = self.problem.points.new_zeros(())
        for name, residual in self.problem.terms.items():
            values = vmap(lambda *sample, residual=residual: residual(self.model, *sample))(*batches[name])
            total = total + self.problem.weights.get(name, 1.0) * values.square().mean()
        return total


class Compiled:
    """Gradients and loss of one problem, compiled once for all seeds."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.leaves: list[Tensor] = []
        self.batches: dict[str, tuple[Tensor, ...]] = {}

    def closure(self, problem: Problem) -> Callable[[], Tensor]:
        """What sets the gradients of a problem's network, and returns the loss."""
        loss, parameters = Loss(problem), list(problem.model.parameters())

        def gradients(values: list[Tensor], batches: dict[str, tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
            named = {name: value for (name, _), value in zip(loss.named_parameters(), values, strict=True)}
            found = functional_call(loss, named, (batches,))
            return (*torch.autograd.grad(found, values), found)

        leaves = [p.detach().clone().requires_grad_() for p in parameters]
        if self.graph is None and parameters[0].is_cuda:
            traced, self.leaves, self.batches = make_fx(gradients)(leaves, problem.batches), leaves, problem.batches
            here = [leaf.detach() for leaf in leaves]
            self.graph = captured(lambda: traced(here, self.batches))
        elif self.graph is None:
            self.graph = torch.compile(make_fx(gradients)(leaves, problem.batches))
        if parameters[0].is_cuda:  # the graph's own memory becomes that of these parameters and samples
            for parameter, place in zip(parameters, self.leaves, strict=True):
                parameter.data = place.detach().copy_(parameter.detach())
            for name, batch in problem.batches.items():
                copy_all(batch, self.batches[name])

        def compute() -> tuple[Tensor, ...]:
            return self.graph(*() if parameters[0].is_cuda else ([p.detach() for p in parameters], problem.batches))

        def closure() -> Tensor:
            with torch.no_grad():
                *grads, value = compute()
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            return value

        closure()  # compiles, where that is still to be done
        return closure


def whole_network(problem: Problem, settings: Settings, compiled: Compiled) -> Advance:
    solver = consequent.WholeNetwork(
        problem.model,
        problem.terms.get("", problem.terms),
        weights=problem.weights,
        cuda_graph=problem.points.is_cuda,
    )
    draw = drawing(problem, settings)

    def advance(part: float) -> None:
        draw()
        solver.step(*problem.batches[""]) if "" in problem.terms else solver.step(**problem.batches)

    return advance


def drawing(problem: Problem, settings: Settings) -> Callable[[], None]:
    """What puts the next samples into a problem's batches: new ones, so many as the settings have, or all again."""
    everything, left = problem.batches, []  # of the samples, in a new order for each epoch

    def draw() -> None:
        if problem.draw is not None:
            problem.batches = problem.draw()
        for name, batch in everything.items() if "batch" in settings else ():
            if not left:
                order = torch.randperm(len(batch[0])).split(int(settings["batch"]))
                left.extend(one for one in order if len(one) == settings["batch"])
            chosen = left.pop()
            problem.batches = {name: tuple(one[chosen] for one in batch)}

    return draw


def first_order(make: Callable[[nn.Module, Settings], list[torch.optim.Optimizer]]) -> Any:
    def begin(problem: Problem, settings: Settings, compiled: Compiled) -> Advance:
        (draw := drawing(problem, settings))()
        return steps_of(make(problem.model, settings), compiled.closure(problem), draw=draw)

    return begin


def steps_of(
    optimizers: list[torch.optim.Optimizer],
    closure: Callable[[], Tensor],
    until: float = 1.0,
    draw: Callable[[], None] = lambda: None,
) -> Advance:
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]

    def advance(part: float) -> None:
        draw()
        closure()
        for optimizer, its in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, its, strict=True):
                group["lr"] = rate * (1 + math.cos(math.pi * min(part / until, 1))) / 2
            optimizer.step()

    return advance


def adam(model: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=settings["lr"], fused=True)]


def soap(model: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    from pytorch_optimizer import SOAP

    return [
        SOAP(model.parameters(), lr=settings["lr"], betas=(0.95, 0.95), weight_decay=0.0, precondition_frequency=10)
    ]


def muon(model: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """For the weights of hidden layers; Adam, with a tenth of the rate, for all others."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    hidden = weights[1:-1]
    others = [p for p in model.parameters() if all(p is not weight for weight in hidden)]
    return [
        torch.optim.Muon(hidden, lr=settings["lr"], weight_decay=0.0),
        torch.optim.Adam(others, lr=settings["lr"] / 10, fused=True),
    ]


def lbfgs_of(model: nn.Module, settings: Settings) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(
        model.parameters(),
        history_size=int(settings["history"]),
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=0,
    )


def lbfgs(problem: Problem, settings: Settings, compiled: Compiled) -> Advance:
    optimizer, closure = lbfgs_of(problem.model, settings), compiled.closure(problem)
    return lambda part: optimizer.step(closure)


def adam_then_lbfgs(problem: Problem, settings: Settings, compiled: Compiled) -> Advance:
    """Half of the time each."""
    closure = compiled.closure(problem)
    first = steps_of(adam(problem.model, settings), closure, until=0.5)
    second = lbfgs_of(problem.model, {"history": 50})
    return lambda part: first(part) if part < 0.5 else second.step(closure)


def c_adam(problem: Problem, settings: Settings, compiled: Compiled) -> Advance:
    """Of regressions alone: where gradients are differentiated, layers keep their plain gradient."""
    ((x, y),), model = problem.batches.values(), problem.model
    optimizers = adam(model, settings)
    consequent.attach(optimizers[0], model, loss_reduction=lambda n: n * y.shape[1] / 2)

    def closure() -> Tensor:
        optimizers[0].zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    return steps_of(optimizers, closure)


class OneResidual(nn.Module):
    """All terms as one residual of one sample ``[which, point, value]``, which is what the package takes."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.model, self.problem = problem.model, problem
        sizes = {name: len(batch[0]) for name, batch in problem.batches.items()}
        self.scales = [
            math.sqrt(problem.weights.get(name, 1.0) * sum(sizes.values()) / size) for name, size in sizes.items()
        ]

    def samples(self) -> Tensor:
        """Those of all terms."""
        found = []
        for number, (x, *values) in enumerate(self.problem.batches.values()):
            value = values[0] if values else torch.zeros(len(x), 1)
            found.append(torch.cat([torch.full((len(x), 1), float(number)), x, value], 1))
        return torch.cat(found)

    def forward(self, samples: Tensor) -> Tensor:
        """The residual of each, times the root of its weight."""

        def one(sample: Tensor) -> Tensor:
            interior, edge = list(self.problem.terms.values())[:2]
            equation = self.scales[0] * interior(self.model, sample[1:-1]).squeeze()
            scale = torch.where(sample[0] == 1, self.scales[1], self.scales[-1])
            return torch.where(sample[0] == 0, equation, scale * edge(self.model, sample[1:-1], sample[-1]).squeeze())

        return vmap(one)(samples)[:, None]


def torch_lm(problem: Problem, settings: Settings, compiled: Compiled) -> Advance:
    """The package torch-levenberg-marquardt."""
    import torch_levenberg_marquardt as tlm

    if "" in problem.terms:
        model, (x, y) = problem.model, problem.batches[""]
    else:
        model = OneResidual(problem)
        x = model.samples()
        y = torch.zeros(len(x), 1)
    draw = drawing(problem, settings)
    module = tlm.training.LevenbergMarquardtModule(
        model=model,
        loss_fn=tlm.loss.MSELoss(),
        attempts_per_step=10,
        solve_method="cholesky",
        damping_strategy=tlm.damping.StandardDampingStrategy(starting_value=settings["damping"]),
    )

    def advance(part: float) -> None:
        draw()
        module.training_step(x if problem.draw is None else model.samples(), y)

    return advance


def rates(*values: float) -> list[Settings]:
    return [{"lr": value} for value in values]


RATES = rates(1e-3, 3e-3, 1e-2, 3e-2)

# What makes each one, and the settings that it is tried with: four each, ours as it is.
CONTESTANTS: dict[str, tuple[Callable[[Problem, Settings, Compiled], Advance], list[Settings]]] = {
    "WholeNetwork": (whole_network, [{}]),
    "L-BFGS": (lbfgs, [{"history": 10}, {"history": 30}, {"history": 100}, {"history": 300}]),
    "Adam": (first_order(adam), RATES),
    "Adam, L-BFGS": (adam_then_lbfgs, RATES),
    "SOAP": (first_order(soap), RATES),
    "Muon": (first_order(muon), rates(3e-3, 1e-2, 3e-2, 1e-1)),
    "torch-levenberg-marquardt": (torch_lm, [{"damping": value} for value in (1e-3, 1e-1, 10.0, 1e3)]),
    "C-Adam": (c_adam, RATES),
}
