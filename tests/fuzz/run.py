"""One run: a random network in a random loop, the library beside the reference."""

import io
import random
import warnings
from functools import partial

import torch
from reference import DEFAULT_DAMPING, DEFAULT_DAMPING_OF_OTHERS, damping_options
from torch.utils.checkpoint import checkpoint

import consequent
from fuzz.loops import make_loop, shown
from fuzz.nets import LAYERS, make_net
from fuzz.reference import Reference

REDUCTIONS = {"mean": "mean", "sum": "sum", "2.5": 2.5, "2n + 3": lambda n: 2 * n + 3}


class LibraryRaised(Exception):  # noqa: N818
    """The loop raised on the library's side."""


class IllegalError(Exception):
    """The case is one that plain torch refuses, too, or in which numbers grow beyond all bounds."""


class Library:
    """One side of a run: the model that is trained, by optimisers that the library is attached to."""

    def __init__(self, case, is_attached=True):
        self.case, self.model, self.dtype = case, case.net.model.to(case.dtype), case.dtype
        parts = [], []
        for name, p in self.model.named_parameters():
            parts[name in case.second].append(p)
        make = {"sgd": partial(torch.optim.SGD, lr=case.lr, momentum=case.momentum), "adam": torch.optim.Adam}
        self.optimizers = [make[kind](part) for kind, part in zip(case.kinds, parts, strict=True) if part]
        self.correction = self.attach() if is_attached else None
        self.pending, self.notes = [], []

    def attach(self):
        case = self.case
        options = {} if case.damping is None else damping_options(case.damping)
        options |= {"averaging": case.averaging, "refresh": case.refresh, "bound": case.bound, "exclude": case.excluded}
        return consequent.attach(self.optimizers, self.model, loss_reduction=REDUCTIONS[case.reduction], **options)

    def zero(self, how):
        for one in [self.model] if how == "model" else self.optimizers:
            one.zero_grad(set_to_none=how != "zeros")

    def use_checkpoints(self, kind):
        self.model.checkpoint = kind and partial(checkpoint, use_reentrant=kind == "reentrant")

    def backward(self, loss, retain_graph=False, only=None, is_plain=False):
        inputs = None if only is None else [self.model.get_parameter(name) for name in only]
        loss.backward(retain_graph=retain_graph, inputs=inputs)

    def note(self, action):
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in self.model.named_parameters()}
        self.notes.append((shown(action).splitlines()[0], grads))

    def reload(self):
        if self.correction is not None:
            file = io.BytesIO()
            torch.save(self.correction.state_dict(), file)
            file.seek(0)
            self.correction.detach()
            self.correction = self.attach()
            self.correction.load_state_dict(torch.load(file, weights_only=True))

    def step(self, closure, both):
        first, *others = self.optimizers
        first.step(closure)
        for optimizer in others if both else ():
            optimizer.step()


class Case:
    """What a seed stands for."""

    def __init__(self, seed, mode):
        rng = random.Random(f"{seed} {mode}")
        torch.manual_seed(rng.randrange(2**31))
        self.seed, self.mode, self.net = seed, mode, make_net(rng)
        modules = dict(self.net.model.named_modules())
        names = [name for name, _ in self.net.model.named_parameters()]
        self.dtype = torch.float32 if rng.random() < 0.15 else torch.float64
        damping = rng.choice([0.1, 1.0] if self.dtype == torch.float32 else [1e-3, 1e-2, 0.1, 1.0])
        self.damping = rng.choice([damping, ("relative", damping), None])
        self.reduction = rng.choices(list(REDUCTIONS), weights=[7, 1, 1, 1])[0]
        self.averaging = rng.choice([0.5, 0.9, 0.95]) if mode == "averages" else 0
        self.refresh = rng.choice([1, 2, 3])
        self.kinds, self.second = [rng.choice(["sgd", "sgd", "adam"]), rng.choice(["sgd", "adam"])], set()
        if rng.random() < 0.25 and len(names) > 1:
            self.second = set(rng.sample(names, rng.randrange(1, len(names))))  # which a second optimiser trains
        self.bound, self.lr, self.momentum = None, 0.01, 0.0
        if rng.random() < 0.15:
            self.bound, self.kinds, self.second = 0.2, ["sgd", "sgd"], set()
            self.lr, self.momentum = rng.choice([0.01, 0.3, 3.0]), rng.choice([0.0, 0.9])
        layers = {name: module for name, module in modules.items() if isinstance(module, LAYERS)}
        self.excluded = ()
        if len({layer.weight for layer in layers.values()}) > 1 and rng.random() < 0.1:
            self.excluded = (rng.choice(list(layers)),)
        self.steps = make_loop(rng, self.net, mode, is_bounded=self.bound is not None)

    @property
    def rate(self):
        """In the long run."""
        return self.lr / (1 - self.momentum)

    def divisor(self, samples):
        """What the loss is divided by."""
        return {"mean": samples, "sum": 1, "2.5": 2.5, "2n + 3": 2 * samples + 3}[self.reduction]

    def damping_of(self, name):
        """λ, or ("relative", ρ), of a weight."""
        default = {"sgd": DEFAULT_DAMPING, "adam": DEFAULT_DAMPING_OF_OTHERS}[self.kinds[name in self.second]]
        return default if self.damping is None else self.damping

    def __str__(self):
        settings = {name: value for name, value in vars(self).items() if name not in ("net", "steps")}
        return f"{settings}\n{self.net}\n" + "\n".join(map(shown, self.steps))


def run(seed, mode):
    """Raise an AssertionError that says what differs and where, if anything does; the mode is "own" or "averages"."""
    check(lambda: Case(seed, mode))


def check(make_case):
    """Raise an AssertionError if the case goes wrong; other errors mean that the fuzzer itself does."""
    case = make_case()
    story = str(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            play(case)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{story}") from error
        except LibraryRaised as raised:
            error = raised.__cause__
            try:
                plain = Library(case := make_case(), is_attached=False)
                for step in case.steps:
                    step.do(plain, case.net)
            except RuntimeError as illegal:
                raise IllegalError(str(illegal)) from illegal
            raise AssertionError(f"{type(error).__name__}: {error}\n{story}") from error


def play(case):
    """Do every action to both sides, and compare the gradients after each."""
    reference, library = Reference(case), None
    for number, step in enumerate(case.steps):
        before = {name: p.detach().double().clone() for name, p in case.net.model.named_parameters()}
        try:
            library = library or Library(case)
            step.do(library, case.net)
        except Exception as error:
            raise LibraryRaised from error
        step.do(reference, case.net)
        for (action, found), expected in zip(library.notes, reference.notes, strict=True):
            # In float32, what comes through a saturated tanh is the difference of far larger numbers.
            floor = 0.0 if case.dtype == torch.float64 else 1e-3 * max(size for _, size, *_ in expected.values())
            for name, (wanted, size, *others) in expected.items():
                where = f"step {number}, {name}, after {action}"
                compare(where, case, found[name], wanted, max(size, floor), *others)
        library.notes, reference.notes = [], []
        if step.taken:
            compare_weights(f"step {number}", case, before, step.both)
        if not all(p.abs().max() < 1e4 for p in library.model.parameters()):
            raise IllegalError("training has diverged")
        with torch.no_grad():
            for p, new in zip(reference.model.parameters(), library.model.parameters(), strict=True):
                p.copy_(new)


def compare(where, case, grad, wanted, size, condition, is_known):
    """One gradient; an error is relative to the size, and more of it is rounding where the condition is bad.

    Where no digit is left (networks that explode), any number is as good as another.
    """
    least, rounding = (1e-9 if case.bound is None else 1e-5, 1e-16) if case.dtype == torch.float64 else (1e-3, 6e-8)
    bound = max(least, 30 * rounding * condition)
    assert (grad is None) == (wanted is None), f"{where}: a gradient where there should be none, or none"
    if wanted is not None and not wanted.isfinite().all():
        assert not grad.isfinite().all(), f"{where}: finite where autograd has it not"
    elif wanted is not None and is_known:
        error = float((grad.double() - wanted).norm()) / (size or 1.0)
        assert error <= bound or bound >= 1, f"{where}: relative error {error:.3g} > {bound:.3g}"


def compare_weights(when, case, before, both):
    """SGD without momentum moves by the gradient."""
    rounding = 1e-12 if case.dtype == torch.float64 else 1e-5
    for name, p in case.net.model.named_parameters():
        is_second = name in case.second
        if case.kinds[is_second] == "sgd" and not case.momentum and (both or not is_second):
            move = 0 * before[name] if p.grad is None else case.lr * p.grad.double()
            error, size = (before[name] - move - p.detach().double()).norm(), before[name].norm() + move.norm()
            assert error <= rounding * size, f"{when}, {name}: not moved by its gradient"
