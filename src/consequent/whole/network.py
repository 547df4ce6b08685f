"""``WholeNetwork``: an optimiser of residual problems, whose steps foresee the outputs of the whole network."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from consequent.maths.checks import check_nonnegative, check_positive
from consequent.whole.cuda_graph import copy_all
from consequent.whole.first_look import FEW, Sample, look, pieces
from consequent.whole.local_model import LocalModel, Terms
from consequent.whole.residuals import Batch, Residual

ENOUGH = 0.1  # of the predicted decrease, so much must come; with less, a step may saturate a deep network
GOOD = 0.25  # from here on λ is lowered
FIRST = 1e-2  # λ of the first step, in units of the mean diagonal element of J Jᵀ
TRIES = 12  # of one step, each with a higher λ: up to 2⁶⁶ times the first


class Step(NamedTuple):
    """What a step did to the loss of its own samples, the decrease it predicted, its λ, and how often it was tried."""

    loss: float
    new_loss: float
    predicted: float
    damping: float
    tries: int

    def __str__(self) -> str:
        came = f"{self.loss - self.new_loss:.2e} of {self.predicted:.2e} predicted"
        came = came if self.predicted else "nothing to gain"
        return f"loss {self.loss:.3e} → {self.new_loss:.3e} ({came}), damping {self.damping:.1e}, tries {self.tries}"


class WholeNetwork(Optimizer):
    """Move the outputs of the whole network, not each layer's, straight toward their targets.

    With the residuals r of the samples and their Jacobian J by all parameters, a step is
    ``Δθ = −Jᵀ (J Jᵀ + λI)⁻¹ (r + r''/2)``, or the same by ``JᵀJ`` where there are fewer parameters than residuals. r''
    is the second derivative of the residuals along the step: how its consequences bend (geodesic acceleration). The
    decrease of the loss is compared with the predicted one. λ follows from that; a step that fails is taken back, and
    tried again with a higher λ. The loss is the mean square of the residuals, of several terms the
    weighted sum.

    Args:
        model: the network. All its parameters that require gradients are trained.
        residual: ``residual(model, *sample)``, the residual of one sample: a number or a vector, with derivatives by
            ``torch.func``. Several terms by name: ``{"interior": …, "boundary": …}``.
        weights: of terms, by name; 1 for the others.
        damping: λ of the first step. None: a hundredth of the mean diagonal element of ``J Jᵀ``.
        batched: residuals are written for a batch, with derivatives by ``torch.autograd.grad``; parameters may be used
            in linear layers alone.
        memory: the bytes that a step may take. None: what the machine or the GPU has.
        progress: print a line at every so many steps; 0: none.
        cuda_graph: on a GPU, launch a step at once, by CUDA graphs of the first one with samples of these shapes. The
            Python of a residual runs in that step alone, and what it reads must be tensors that stay.

    Example:
        >>> import torch, consequent
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)).double()
        >>> x = torch.linspace(-3, 3, 50).double()[:, None]
        >>> solver = consequent.WholeNetwork(model, lambda model, x, y: model(x) - y)
        >>> for _ in range(30):
        ...     loss = solver.step(x, x.sin())
        >>> loss < 1e-8
        True
    """

    def __init__(
        self,
        model: nn.Module,
        residual: Callable[..., Tensor] | Mapping[str, Callable[..., Tensor]],
        *,
        weights: Mapping[str, float] | None = None,
        damping: float | None = None,  # λ
        batched: bool = False,
        memory: float | None = None,
        progress: int = 0,
        cuda_graph: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}; WholeNetwork(model, residual)")
        terms = dict(residual) if isinstance(residual, Mapping) else {"": residual}
        if not terms or not all(map(callable, terms.values())):
            raise TypeError(f"residual must be a function, or a dict of functions by name, got {residual!r}")
        if not isinstance(weights, Mapping | None) or set(weights or ()) - set(terms):
            names = list(filter(None, terms)) or "none: residual is one function, and no dict"
            raise ValueError(f"weights must be a dict of numbers by the names of terms, {names}; got {weights!r}")
        self.weights = dict.fromkeys(terms, 1.0) | dict(weights or {})
        for name, weight in self.weights.items():
            check_positive(f"the weight of {name!r}", weight, "leave out a term that is not to count")
        check_positive("damping", 1 if damping is None else damping, "None lets the first step choose")
        check_positive("memory", 1 if memory is None else memory, "it is in bytes, as 4e9")
        check_nonnegative("progress", progress, "1 prints a line at each step")
        self.model, self.memory, self.progress, self.cuda_graph = model, memory, progress, cuda_graph
        self.residuals = {name: Residual(name, one, model, batched) for name, one in terms.items()}
        self.last: Step | None = None
        self._known: dict[Any, Sample] = {}
        self._graph: tuple[Any, list[Tensor], LocalModel] | None = None
        super().__init__(model.parameters(), {"damping": damping, "steps": 0})

    @torch.no_grad()
    def step(self, *batch: Any, **batches: Any) -> float:  # type: ignore[override]
        """Take a step, and return the loss before it; ``solver.last`` tells the rest.

        Args:
            *batch: what the residual takes, with a row for each sample: ``step(x, y)``.
            **batches: of several terms, by name: ``step(interior=x, boundary=(x, y))``.
        """
        given = self._checked(batch, batches)
        eager, device = torch.compiler.set_stance("force_eager"), self.param_groups[0]["params"][0].device.type
        with eager, torch.autocast(device, enabled=False):  # torch.func does not go through compiled code
            local = self._local_model(given)
            try:
                self.last = self._follow(local)
            except BaseException:
                local.put_back()
                raise
        group = self.param_groups[0]
        group["steps"] += 1
        if self.progress and group["steps"] % self.progress == 0:
            print(f"step {group['steps']}: {self.last}", flush=True)
        return self.last.loss

    def _follow(self, local: LocalModel) -> Step:
        """Try steps until one decreases the loss by enough of what it predicted."""
        loss, mean = local.linearise().tolist()
        if not math.isfinite(loss + mean):
            for residual in self.residuals.values():
                pieces_of_it = [some for one, some, _ in local.terms if one is residual]
                residual.refuse_nan(torch.cat([residual.values(some) for some in pieces_of_it]))
            raise ValueError("squares of the residuals, or of their derivatives by the parameters, are not finite")
        group, eps, growth = self.param_groups[0], torch.finfo(local.values.dtype).eps, 2.0
        damping = FIRST * mean if group["damping"] is None else group["damping"]
        for tries in range(1, TRIES + 1):
            damping = max(damping, eps * mean)
            failed, predicted, new_loss = local.attempt(local.system.new_tensor(damping)).tolist()
            if not failed:  # otherwise there are too few digits for so small a λ
                if predicted <= 4 * eps * loss:  # less than rounding
                    group["damping"] = damping / 10 if tries == 1 else group["damping"]  # unless λ was too high
                    break
                came = (loss - new_loss) / predicted
                if came > ENOUGH:
                    group["damping"] = damping / 3 if came > GOOD else damping * 1.5
                    return Step(loss, new_loss, predicted, damping, tries)
            damping, growth = damping * growth, growth * 2
        local.put_back()
        return Step(loss, loss, 0.0, damping, tries)

    def _local_model(self, given: dict[str, Batch]) -> LocalModel:
        """Of these samples: a new one, or with CUDA graphs the last one, to which samples are copied."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not self.cuda_graph:
            return LocalModel(self._terms(given, trained), trained)
        flat = [one for its in given.values() for one in its]
        modes = [module.training for module in self.model.modules()]
        shapes = [(one.shape, one.dtype, one.device, one.requires_grad) for one in flat]
        key = modes, list(self.weights.values()), [p.data_ptr() for p in trained.values()], shapes
        if self._graph is None or self._graph[0] != key:
            self._graph = None  # its memory is free before the next one is made
            own = [one.detach().clone().requires_grad_(one.requires_grad) for one in flat]
            left = iter(own)
            terms = self._terms({name: [next(left) for _ in its] for name, its in given.items()}, trained)
            local = LocalModel(terms, trained)
            local.capture()
            self._graph = key, own, local
        copy_all(flat, self._graph[1])
        self._graph[2].remember()
        return self._graph[2]

    def _terms(self, given: dict[str, Batch], trained: dict[str, nn.Parameter]) -> Terms:
        """The samples of all terms, as many at a time as there is memory for."""
        known, state = {}, (tuple(trained), *(module.training for module in self.model.modules()))
        for name, its in given.items():
            key = (name, state, min(len(its[0]), FEW), *((one.shape[1:], one.dtype) for one in its))
            known[name] = self._known[key] = self._known.get(key) or look(self.residuals[name], its, trained)
        number = sum(len(its[0]) * known[name].components for name, its in given.items())
        size, some = sum(p.numel() for p in trained.values()), next(iter(trained.values()))
        side = min(size, number)
        taken = 32.0 * side**2 + 64 * side  # the system: itself, damped, its factor, and the last one's
        taken += sum(len(its[0]) * known[name].kept for name, its in given.items())
        taken += 2 * number * max(one.formed for one in known.values()) if size >= number else 0
        least = taken + max(one.computed for one in known.values())
        allowed = _memory_of(some.device) if self.memory is None else self.memory
        if least > allowed:
            raise MemoryError(
                f"a step with {number:,} residuals and {size:,} parameters takes {least / 1e9:.3g} GB, and "
                f"{allowed / 1e9:.3g} GB are there: give it fewer samples, or raise memory="
            )
        terms: Terms = []
        for name, its in given.items():
            at_once = max(1, int(min((allowed - taken) / known[name].computed, len(its[0]))))
            terms += [(self.residuals[name], piece, self.weights[name] / len(its[0])) for piece in pieces(its, at_once)]
        return terms

    def _checked(self, batch: Any, batches: dict[str, Any]) -> dict[str, Any]:
        """The samples of each term."""
        if len(self.param_groups) > 1 or "damping" not in self.param_groups[0]:
            raise ValueError(
                "WholeNetwork trains the parameters of its model, in one group: put others into the model, and load "
                "what state_dict() of a WholeNetwork gave"
            )
        given = {"": batch} if batch and not batches else batches
        if given.keys() != self.residuals.keys():
            wanted = ", ".join(f"{name}=…" for name in self.residuals if name) or "x, …"
            raise TypeError(f"step({wanted}) is wanted; got {len(batch)} samples without a name, and {list(batches)}")
        found = {
            name: tuple(its) if isinstance(its := given[name], tuple | list) else (its,) for name in self.residuals
        }
        for name, its in found.items():
            shapes = [list(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in its]
            lengths = {shape[0] if isinstance(shape, list) and shape else 0 for shape in shapes}
            if len(lengths) != 1 or 0 in lengths:
                raise ValueError(
                    f"{self.residuals[name]} takes tensors with a row for each sample, got {shapes}: step(x, y), "
                    "step(*batch), or with several terms step(name=(x, y))"
                )
            batched = self.residuals[name].batched  # then samples may require gradients, for derivatives by them
            if any(isinstance(one, nn.Parameter) or (one.requires_grad and not batched) for one in its):
                raise ValueError(
                    f"{self.residuals[name]} takes samples that require gradients, and they would not be trained: make "
                    "them parameters of the model (as an nn.Embedding, which samples index), or detach() them"
                )
        kinds = sorted({f"{p.dtype} on {p.device}" for p in self.model.parameters() if p.requires_grad})
        if len(kinds) != 1 or not kinds[0].startswith(("torch.float32", "torch.float64")):
            raise ValueError(
                "trained parameters must be of one type, float32 or float64, on one device; the model has "
                f"{kinds or 'none that requires gradients'}"
            )
        if self.cuda_graph and "cuda" not in kinds[0]:
            raise ValueError(f"cuda_graph=True is for parameters on a GPU, and they are {kinds[0]}: leave it out")
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Everything but graphs, so that copies are whole."""
        return self.__dict__ | {"_graph": None}

    def __repr__(self) -> str:
        sizes = [p.numel() for p in self.model.parameters() if p.requires_grad]
        terms = ", ".join(f"{name or 'one residual'} (weight {self.weights[name]:g})" for name in self.residuals)
        done = f"{self.param_groups[0]['steps']} steps" + (f", the last: {self.last}" if self.last else "")
        return f"WholeNetwork of {sum(sizes):,} parameters in {len(sizes)} tensors\n  {terms}\n  {done}"


def _memory_of(device: torch.device) -> float:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if hasattr(os, "sysconf") else math.inf
