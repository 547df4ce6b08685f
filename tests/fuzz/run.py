"""One run: a random network in a random loop, the library beside the reference."""

import io
import random
import re
import warnings
from unittest import mock

import exact  # noqa: F401
import torch
from reference import damping_options

import consequent
from fuzz.loops import REDUCTIONS, Edit, Freeze, Pass, Zero, describe, freeze_for_a_while, has, is_edited, make_loop
from fuzz.nets import make_net, sees_the_sample, solved_together
from fuzz.reference import Reference

LR = 0.01
AVERAGED = 0.4  # how often moments are averaged over steps
FROZEN = 0.2  # how often something is frozen for a while
SPLIT = 0.25  # how often the parameters lie in two optimisers
GROUPED = 0.2  # how often they lie in two groups with dampings of their own
BY_DATA = 0.5  # how often zeros are written by way of .data
SPOILT, RELOADED = 0.1, 0.1  # how often a step is not taken, and how often the correction is saved before it
AS_GOOD_AS_NONE = 1e30  # of a promise: the loss must be seen, and nothing is shortened
SAYS_EDITED = re.compile("inputs explain|edited")


class LibraryRaised(Exception):  # noqa: N818
    """The loop raised on the library's side."""


class IllegalError(Exception):
    """The case is one that plain torch refuses, too, or that the reference cannot solve in float64."""


class Library:
    """One side of a run: the model that is trained, by optimisers that the library is attached to."""

    def __init__(
        self,
        net,
        dtype,
        mode,
        damping,
        loss_reduction,
        averaging=(0.0, 1),
        second=(),
        own_dampings=None,
        promise=None,
    ):
        """One side.

        Args:
            net: whose model is trained.
            dtype: of the model.
            mode: "step", "backward", or "plain": nothing is attached.
            damping: λ, or a pair ("relative", ρ).
            loss_reduction: as ``attach`` takes it.
            averaging: β and T.
            second: names of parameters that lie in an optimiser of their own, which steps last.
            own_dampings: those of parameters, by name, that lie in a group with another one.
            promise: as ``attach`` takes it.
        """
        self.model, self.dtype, self.mode = net.model.to(dtype), dtype, mode
        parts = [{}, {}]
        for name, p in self.model.named_parameters():
            own = (own_dampings or {}).get(name)
            parts[name in second].setdefault(own, {"params": [], **(damping_options(own) if own else {})})
            parts[name in second][own]["params"].append(p)
        self.optimizers = [torch.optim.SGD(list(part.values()), lr=LR) for part in parts if part]
        self.options = {"loss_reduction": loss_reduction} | ({"at": mode} if mode == "backward" else {})
        if mode != "plain":
            self.options |= damping_options(damping) | dict(zip(("averaging", "refresh"), averaging, strict=True))
            self.options |= {} if promise is None else {"promise": promise}
            self.correction = consequent.attach(self.optimizers, self.model, **self.options)
        self.pending = []
        self.joined = None  # filled in by the run: names of the parameters that belong together

    def zero(self, how):
        if how == "by hand":
            for p in self.model.parameters():
                p.grad = None
        elif how == "data":
            for p in self.model.parameters():
                if p.grad is not None:  # of zeros that become zeros without a trace, nobody could tell
                    (p.grad.data if p.grad.any() else p.grad).zero_()
        elif how == "model":
            self.model.zero_grad()
        else:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=how == "none")

    def freeze(self, name, is_trained):
        self.model.get_parameter(name).requires_grad_(is_trained)

    def use_checkpoints(self, kind):
        if self.mode == "backward" and kind == "reentrant":
            kind = "saved"  # every reentrant segment is a backward pass of its own there, and corrected by itself
        self.model.checkpoint = kind

    def backward(self, loss, retain_graph=False, only=None):
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        inputs = None if only is None else [p for name, p in trained.items() if name in only]
        loss.backward(retain_graph=retain_graph, inputs=inputs)

    def ask_for_gradients(self, loss, of):
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        torch.autograd.grad(loss, parameters if of is None else of, retain_graph=True, allow_unused=True)

    def scale(self, factor):
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)

    def clip(self, limit, names=None):
        chosen = [p for name, p in self.model.named_parameters() if names is None or name in names]
        torch.nn.utils.clip_grad_norm_(chosen, limit)

    def edit(self, change):
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                change(name, p.grad)

    def spoil(self):
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        for grad in grads[len(grads) // 2 :][:1]:
            grad.view(-1)[0] = torch.nan

    def reload(self):
        if self.mode == "plain":
            return
        file = io.BytesIO()
        torch.save(self.correction.state_dict(), file)
        file.seek(0)
        self.correction.detach()
        self.correction = consequent.attach(self.optimizers, self.model, **self.options)
        self.correction.load_state_dict(torch.load(file, weights_only=True))

    def step(self, closure, inside):
        first, *others = self.optimizers
        if inside:
            first.step(lambda: closure() or 0.0)
        else:
            closure()
            first.step()
        for optimizer in others:
            optimizer.step()
        self.pending.clear()


class Case:
    """What a seed stands for."""

    def __init__(self, seed, mode):
        rng = random.Random(f"{seed} {mode}")
        torch.manual_seed(rng.randrange(2**31))
        self.seed, self.mode = seed, mode
        self.net = make_net(rng)
        self.dtype = torch.float32 if rng.random() < 0.15 else torch.float64
        if self.dtype == torch.float32:
            self.net.model.float()
        self.damping = rng.choice([0.1, 1.0] if self.dtype == torch.float32 else [1e-3, 1e-2, 0.1, 1.0])
        if rng.random() < 0.5:
            self.damping = ("relative", self.damping)
        self.reduction = rng.choices(list(REDUCTIONS), weights=[7, 1, 1, 1])[0]
        self.averaging, steps = (0.0, 1), None
        if mode == "step" and rng.random() < AVERAGED:
            self.averaging, steps = rng.choice([(0.0, 2), (0.0, 3), (0.5, 1), (0.9, 1), (0.5, 2), (0.9, 3)]), 5
        self.actions = make_loop(rng, self.net, self.damping, self.dtype, steps)
        if rng.random() < FROZEN:
            freeze_for_a_while(rng, self.net, self.actions)
        self.second = set()
        if rng.random() < SPLIT and not has(self.actions, Edit):  # of a single number, an edit would be a factor
            names = [name for name, _ in self.net.model.named_parameters()]
            self.second = set(rng.sample(names, rng.randrange(1, len(names) + 1)))
        self.own_dampings = {}
        if rng.random() < GROUPED and not has(self.actions, Edit):  # for the same reason
            self.own_dampings = own_dampings(rng, self.net.model)
        self.widest = rng.choice([8192, 8192, 8192, 6])  # columns of an average of few rows
        self.promise = None
        if mode == "step" and not self.second and not has(self.actions, Edit):  # which makes a gradient of no loss
            self.promise = random.Random(f"{seed} promise").choice([None, AS_GOOD_AS_NONE])
        for step in self.actions:
            step.reloaded = rng.random() < RELOADED
            passes = [action for action in step.body if isinstance(action, Pass)]
            if any(action.mask != "none" or action.only for action in passes):
                continue  # gradients may be zero by themselves, which is what zeroed ones look like
            step.spoilt = mode == "step" and not has(self.actions, Freeze) and rng.random() < SPOILT
            for action in step.body:
                if isinstance(action, Zero) and action.how == "zeros" and rng.random() < BY_DATA:
                    action.how = "data"

    @property
    def loss_reduction(self):
        """As ``attach`` takes it.

        That a single sample enters, or that samples are in another dimension, is known only where a trained layer gets
        them as they are; elsewhere N is not asked for.
        """
        if (self.net.is_unbatched or self.net.is_time_first) and not sees_the_sample(self.net.model.first):
            return 1
        return REDUCTIONS[self.reduction]

    def __str__(self):
        return (
            f"seed {self.seed}, at={self.mode!r}, {self.dtype}, {damping_options(self.damping)}, "
            f"loss_reduction={self.reduction}, averaging and refresh {self.averaging}, widest {self.widest}, "
            f"in a second optimiser: {sorted(self.second)}, with another damping: {self.own_dampings}, "
            f"promise {self.promise}\n"
            f"{self.net}\nactions:\n{describe(self.actions)}"
        )


def own_dampings(rng, model):
    """One for some of the parameters, by name; biases of layers with one weight have the same, if any."""
    others = {}
    for weight, *its in solved_together(model):
        others.setdefault(weight, set()).update(its)
    names = {p: name for name, p in model.named_parameters()}
    damping = rng.choice([0.3, ("relative", 0.3)])
    parts = [part for weight, its in others.items() for part in ({weight}, its)]
    return {names[p]: damping for part in parts if rng.random() < 0.5 for p in part}


def run(seed, mode):
    """Raise an AssertionError that says what differs and where, if anything does.

    Args:
        seed: any number.
        mode: "step" or "backward".
    """
    check(lambda: Case(seed, mode))


def check(make_case):
    """Raise an AssertionError if the case goes wrong; other errors mean that the fuzzer itself does."""
    case = make_case()
    story = str(case)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with mock.patch("consequent.statistics.averages.WIDEST", case.widest):
                must_warn = play(case)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{story}") from error
    except torch.linalg.LinAlgError as error:  # of the reference: numbers have grown until λ is lost beside them
        raise IllegalError(str(error)) from error
    except LibraryRaised as raised:
        error = raised.__cause__
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                play_plainly(make_case())
            except RuntimeError as illegal:
                raise IllegalError(str(illegal)) from illegal
        raise AssertionError(f"{type(error).__name__}: {error}\n{story}") from error
    said = [str(w.message) for w in caught if issubclass(w.category, consequent.ConsequentWarning)]
    if must_warn and case.mode == "step":
        assert any(SAYS_EDITED.search(message) for message in said), f"an edited gradient, and no warning\n{story}"
    if not is_edited(case.actions):
        wrongly = [message for message in said if SAYS_EDITED.search(message)]
        assert not wrongly, f"nobody edited a gradient, and the library says: {wrongly[0]}\n{story}"


def play(case):
    """Do every action to both sides, and compare the gradients after each step.

    Returns:
        whether the library had to warn of an edited gradient.
    """
    settings = (case.mode, case.damping, case.loss_reduction, case.averaging)
    reference = Reference(case.net, *settings, case.own_dampings, case.widest)
    library = Library(case.net, case.dtype, *settings, case.second, case.own_dampings, case.promise)
    library.joined = reference.joined
    for number, step in enumerate(case.actions):
        before = {name: p.detach().double().clone() for name, p in library.model.named_parameters()}
        try:
            step.do(library, case.net)
        except Exception as error:
            raise LibraryRaised from error
        step.do(reference, case.net)
        if step.spoilt:
            compare_weights(library, before, number, is_taken=False)
            reference.forget()
            reference.after_step()
            continue
        wanted = reference.expected()
        if not all(grad is None or grad.isfinite().all() for expected in wanted for grad in expected.grads.values()):
            raise IllegalError("training has diverged beyond float64")
        if case.dtype == torch.float32:  # what comes through attention may be differences of far larger numbers
            largest = max(expected.size for expected in wanted)
            for expected in wanted:
                expected.size = max(expected.size, 1e-3 * largest)
        for expected in wanted:
            compare(library, expected, number)
        compare_weights(library, before, number)
        reference.after_step()
        reference.load({name: p.detach().double() for name, p in library.model.named_parameters()})
    return reference.must_warn


def play_plainly(case):
    """The same without the library, to see whether torch itself allows it."""
    side = Library(case.net, case.dtype, "plain", None, None)
    side.joined = Reference(case.net, case.mode, case.damping, 1).joined
    for step in case.actions:
        step.do(side, case.net)


def compare(library, expected, number):
    parameters = dict(library.model.named_parameters())
    difference = 0.0
    for name, wanted in expected.grads.items():
        grad = parameters[name].grad
        if grad is None or wanted is None:
            rest = next((g for g in (grad, wanted) if g is not None), None)
            assert rest is None or not rest.any(), (
                f"step {number}, {name}: a gradient where there should be none, or none"
            )
            continue
        assert grad.isfinite().all(), f"step {number}, {name}: not finite"
        difference += float((grad.double() - wanted).square().sum())
    error = difference**0.5 / (expected.size or 1.0)
    bound = tolerance(library.dtype, expected.condition)
    assert error <= bound, f"step {number}, {' and '.join(expected.grads)}: relative error {error:.3g} > {bound:.3g}"


def tolerance(dtype, condition):
    """1e-6, or 1e-3 in float32, or more if rounding alone could make more."""
    least, rounding = (1e-6, 1e-16) if dtype == torch.float64 else (1e-3, 6e-8)
    return max(least, 30 * rounding * condition)


def compare_weights(library, before, number, is_taken=True):
    """SGD without momentum moves by the gradient."""
    for name, p in library.model.named_parameters():
        move = 0.0 if p.grad is None or not is_taken else LR * p.grad.double()
        error = (before[name] - move - p.detach().double()).norm()
        size = before[name].norm() + torch.as_tensor(move).norm()
        assert error <= (1e-12 if library.dtype == torch.float64 else 1e-5) * size, f"step {number}, {name}: not moved"
