"""Random training loops from a seed: lists of actions, which are done to the library and to the reference alike.

A side (``run.Library``, ``reference.Reference``) has a model, whose ``.grad`` the actions empty, scale, clip and edit,
and says what ``backward`` and ``step`` do.
"""

from dataclasses import MISSING, dataclass, fields, replace

import torch

from fuzz.nets import TASKS

EDITS = [("scale", 0.1), ("scale", -2.0), ("clip", 0.1), ("clip", 10.0), ("clamp", 1e-2), ("entry", 0.1)]


@dataclass
class Zero:
    """Empty the gradients."""

    how: str  # "none", "zeros" or "model"

    def do(self, side, net):
        side.zero(self.how)


@dataclass
class Freeze:
    """From now on a parameter is trained, or not."""

    name: str
    is_trained: bool

    def do(self, side, net):
        side.model.get_parameter(self.name).requires_grad_(self.is_trained)


@dataclass
class Pass:
    """A forward pass, and backward passes through it."""

    task: str
    samples: int
    others: int  # samples of a second batch, where the task has one
    seed: int
    mask: str = "none"  # "all" samples of the loss or "some" of them count as zero
    factor: float = 1.0  # of the loss
    penalties: tuple = ()  # (name, strength) of L2 penalties on parameters
    checkpoint: str | None = None  # "reentrant" or "saved"
    asked: str | None = None  # torch.autograd.grad before the backward pass, of "inputs" or "parameters"
    differentiated: str | None = None  # a penalty on the gradient of "inputs" or "parameters"
    only: tuple | None = None  # names of the parameters that ``backward(inputs=…)`` is for; None: all
    retain: bool = False  # the graph is kept for Again
    backward: bool = True  # False: the forward pass is given up, or waits for Again
    spoilt: str | None = None  # NaN in the "inputs", or the "loss" is infinite

    def do(self, side, net):
        batches = (net.inputs(self.samples, self.seed), net.inputs(self.others, self.seed + 1))
        x, y = (batch.float().to(side.dtype) for batch in batches)  # the same numbers in either dtype
        if self.spoilt == "inputs":
            x[-1] = torch.nan
        if self.checkpoint == "reentrant" or "inputs" in (self.asked, self.differentiated):
            x, y = x.requires_grad_(), y.requires_grad_()
        side.use_checkpoints(self.checkpoint)
        outputs = TASKS[self.task](side.model, x, y)
        side.use_checkpoints(None)
        loss = loss_of(outputs, self.seed, self.mask)
        for name, strength in self.penalties:
            loss = loss + strength * side.model.get_parameter(name).square().sum()
        loss = self.factor * loss
        if self.spoilt == "loss":
            loss = loss * torch.inf
        wanted = {"inputs": [x, y], "parameters": [p for p in side.model.parameters() if p.requires_grad]}
        if self.asked is not None:
            torch.autograd.grad(loss, wanted[self.asked], retain_graph=True, allow_unused=True)
        if self.differentiated is not None:
            slopes = torch.autograd.grad(loss, wanted[self.differentiated], create_graph=True, allow_unused=True)
            loss = loss + 0.1 * sum(slope.square().sum() for slope in slopes if slope is not None)
        if self.retain:
            side.pending.append((outputs, self))
        if self.backward:
            side.backward(loss, self.retain, self.only, is_plain=self.differentiated is not None)


@dataclass
class Again:
    """A backward pass, of another loss, through the forward pass whose graph was kept."""

    def do(self, side, net):
        outputs, first = side.pending.pop()
        side.backward(first.factor * loss_of(outputs, first.seed + 1, "none"))


@dataclass
class Evaluate:
    """A forward pass without a graph."""

    seed: int

    def do(self, side, net):
        with torch.no_grad():
            side.model(net.inputs(net.sizes[-1], self.seed).to(side.dtype))


@dataclass
class Edit:
    """A change of all gradients: "scale", "clip" to a norm, or "clamp"; or of an "entry" of each."""

    how: str
    amount: float

    def do(self, side, net):
        parameters = [p for p in side.model.parameters() if p.requires_grad and p.grad is not None]
        if self.how == "clip":
            torch.nn.utils.clip_grad_norm_(parameters, self.amount)
        for p in parameters:
            if self.how == "scale":
                p.grad.mul_(self.amount)
            elif self.how == "clamp":
                p.grad.clamp_(-self.amount, self.amount)
            elif self.how == "entry":
                p.grad[tuple(size // 2 for size in p.grad.shape)] += self.amount


@dataclass
class Step:
    """The steps of the optimisers; with a closure, what comes before is done inside of the first one's."""

    body: list
    closure: bool = False
    both: bool = True  # whether the second optimiser, if there is one, takes a step as well
    taken: bool = True  # False: the steps are left out, as a scaler does if a gradient is not finite
    reloaded: bool = False  # before all of it the correction is saved, and another one goes on from that

    def do(self, side, net):
        def closure():
            for action in self.body:
                action.do(side, net)
                side.note(action)
            return 0.0

        if self.reloaded:
            side.reload()
        if not (self.closure and self.taken):
            closure()
        if self.taken:
            side.step(closure if self.closure else None, self.both)
            side.note(self)
        side.pending.clear()


def loss_of(outputs, seed, mask):
    """A mean over samples of a half of squared errors; some samples may not count."""
    generator, total = torch.Generator().manual_seed(seed), 0
    for output in outputs:
        target = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
        counts = torch.rand(output.shape[:1], generator=generator) < {"none": 2, "some": 0.5, "all": -1}[mask]
        errors = 0.5 * (output - target).square() * counts.view(-1, *[1] * (output.ndim - 1))
        total = total + errors.sum() / len(output)
    return total


# ---- loops ----------------------------------------------------------------------------------------------------------


def make_loop(rng, net, mode, is_bounded):
    """A list of steps, each of which begins with Zero where that is needed."""
    steps = []
    for number in range(rng.randint(3, 6) if mode == "averages" else rng.choice([1, 1, 2, 3])):
        body = make_body(rng, net, mode, is_bounded)
        if rng.random() < 0.1:  # a pass that comes to nothing
            body = [make_pass(rng, net, mode, is_bounded), Zero(rng.choice(["none", "zeros"])), *body]
        if number > 0 or rng.random() < 0.3:
            body = [Zero(rng.choice(["none", "zeros", "model"])), *body]
        taken = rng.random() < 0.9
        if not taken:
            body.append(replace(make_pass(rng, net, mode), spoilt=rng.choice(["inputs", "loss"])))
        steps.append(Step(body, rng.random() < 0.15, rng.random() < 0.8, taken, rng.random() < 0.1))
    names = trained_names(net)
    if len(names) > 1 and rng.random() < 0.2:  # one of them is frozen for a while
        name, when = rng.choice(names), sorted(rng.choices(range(1, len(steps) + 1), k=2))
        for place, is_trained in zip(when, (False, True), strict=True):
            if place < len(steps):
                steps[place].body.insert(1, Freeze(name, is_trained))
    return steps


def make_body(rng, net, mode, is_bounded):
    """What comes before a step."""
    factor = rng.choice([1.0, 1.0, 1.0, 64.0])
    penalties, names = (), trained_names(net)
    if rng.random() < 0.25:
        strength = rng.choice([1e-5, 1e-3, 1e-1])
        penalties = tuple((name, strength) for name in (names if rng.random() < 0.5 else rng.sample(names, 1)))
    body = []
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        action, other = make_pass(rng, net, mode, is_bounded), make_pass(rng, net, mode, is_bounded)
        action.factor = 1.0 if action.differentiated else factor
        action.penalties = penalties if rng.random() < 0.8 else ()
        body.append(action)
        if action.differentiated is None and rng.random() < 0.15:
            action.retain, action.asked = True, None
            body += [*rng.choice([[], [], [Zero("none")], [Zero("zeros")], [other]]), Again()]
        elif rng.random() < 0.1:  # a backward pass that comes after that of another
            waits = {"backward": False, "retain": True, "asked": None, "only": None, "differentiated": None}
            body[-1:] = [replace(other, **waits), action, Again()]
        elif rng.random() < 0.1:  # a pass that is given up
            body.append(replace(other, backward=False))
        if mode == "averages":  # which observe what is reentrant once for each forward pass, in its backward pass
            for one in body:
                if isinstance(one, Pass) and (one.retain or not one.backward) and one.checkpoint == "reentrant":
                    one.checkpoint = "saved"
        if rng.random() < 0.1:
            body.append(Evaluate(rng.randrange(10**6)))
    if factor != 1.0:
        body.append(Edit("scale", 1 / factor))
    if rng.random() < 0.3:
        body.append(Edit(*rng.choice(EDITS)))
    return body


def make_pass(rng, net, mode, is_bounded=False):
    task, roll, names = "whole" if rng.random() < 0.5 else rng.choice(net.tasks), rng.random(), trained_names(net)
    made = Pass(task, rng.choice(net.sizes), rng.choice(net.sizes), rng.randrange(10**6))
    made.mask = rng.choices(["none", "some", "all"], weights=[16, 2, 1])[0]
    if roll < 0.15:  # averages may miss what is checkpointed outside of the model, if it is reentrant
        is_whole = task in tuple(TASKS)[:4]
        made.checkpoint = rng.choice(["reentrant", "saved"]) if mode == "own" or is_whole else "saved"
    elif roll < 0.25:
        made.asked = rng.choice(["inputs", "parameters"])
    elif roll < 0.32:  # by way of the inputs, not all layers of a "marked" network are differentiated
        made.differentiated = "parameters" if net.kind == "marked" else rng.choice(["inputs", "parameters"])
    elif roll < 0.38 and not is_bounded:  # nothing is told of such a pass, and it is not bounded
        made.only = tuple(rng.sample(names, rng.randint(1, len(names))))
    return made


def trained_names(net):
    return [name for name, p in net.model.named_parameters() if p.requires_grad]


def shown(action):
    """As a call, without the arguments that say nothing."""
    unsaid = {field.name: field.default for field in fields(action) if field.default is not MISSING}
    said = {name: value for name, value in vars(action).items() if name not in unsaid or value != unsaid[name]}
    body = said.pop("body", ())
    call = f"{type(action).__name__}({', '.join(f'{name}={value!r}' for name, value in said.items())})"
    return "\n".join([call, *(f"    {shown(inner)}" for inner in body)])
