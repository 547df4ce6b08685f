"""Random training loops from a seed: a list of actions, each of which can be done to the library and to the reference.

A side (``run.Library``, ``reference.Reference``) has a model and says what ``backward``, ``zero``, ``scale``, ``clip``
and ``edit`` do to its gradients. The actions are the same for both, so that only the gradients can differ.
"""

from dataclasses import MISSING, dataclass, fields

import torch

from fuzz.nets import TASKS, solved_together

EDITED = 0.2  # how often gradients are edited in a step that allows it
REDUCTIONS = {"mean": "mean", "sum": "sum", "2.5": 2.5, "2n + 3": lambda samples: 2 * samples + 3}


# ---- actions --------------------------------------------------------------------------------------------------------


@dataclass
class Zero:
    """Empty the gradients."""

    how: str  # "none", "zeros", "data" (zeros that leave no trace), "model", "by hand"

    def do(self, side, net):
        side.zero(self.how)


@dataclass
class Freeze:
    """From now on a parameter is trained, or not; after its gradient was thrown away."""

    name: str
    is_trained: bool

    def do(self, side, net):
        side.zero("none")
        side.freeze(self.name, self.is_trained)


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
    only: tuple | None = None  # names of the parameters that ``backward(inputs=…)`` is for; None: all
    retain: bool = False  # the graph is kept for Again
    backward: bool = True  # False: the forward pass is given up, or waits for Again

    def do(self, side, net):
        x, y = batches(self, side, net)
        if self.checkpoint == "reentrant" or self.asked == "inputs":
            x, y = x.requires_grad_(), y.requires_grad_()
        side.use_checkpoints(self.checkpoint)
        outputs = TASKS[self.task](side.model, x, y)
        side.use_checkpoints(None)
        loss = self.factor * loss_of(outputs, self.seed, self.mask)
        parameters = dict(side.model.named_parameters())
        for name, strength in self.penalties:
            loss = loss + self.factor * strength * parameters[name].square().sum()
        if self.asked is not None:
            side.ask_for_gradients(loss, x if self.asked == "inputs" else None)
        if self.retain:
            side.pending.append((outputs, self))
        if not self.backward:
            return
        note_penalties(side, self.penalties)
        side.backward(loss, retain_graph=self.retain, only=self.only)


@dataclass
class Again:
    """A backward pass, a second one of another loss perhaps, through the forward pass whose graph was kept."""

    def do(self, side, net):
        outputs, first = side.pending.pop()
        side.backward(first.factor * loss_of(outputs, first.seed + 1, "none"))


@dataclass
class PenaltyAlone:
    """A backward pass that goes through no layer."""

    penalties: tuple
    factor: float

    def do(self, side, net):
        parameters = dict(side.model.named_parameters())
        loss = sum(strength * parameters[name].square().sum() for name, strength in self.penalties)
        note_penalties(side, self.penalties)
        side.backward(self.factor * loss)


@dataclass
class Evaluate:
    """A forward pass without a graph."""

    seed: int

    def do(self, side, net):
        with torch.no_grad():
            side.model(data(net, net.sizes[-1], self.seed, side.dtype))


@dataclass
class Scale:
    """Multiply all gradients, as a GradScaler does when it unscales."""

    factor: float

    def do(self, side, net):
        side.scale(self.factor)


@dataclass
class Clip:
    """``clip_grad_norm_`` of all parameters, or of each layer by itself."""

    limit: float
    by_layer: bool

    def do(self, side, net):
        for names in side.joined() if self.by_layer else [None]:
            side.clip(self.limit, names)


@dataclass
class Edit:
    """A change of the gradients that no factor describes."""

    how: str  # "clip" or "entry"
    amount: float

    def do(self, side, net):
        side.edit(self.change)

    def change(self, name, grad):
        if self.how == "clip":
            return grad.clamp_(-self.amount, self.amount)
        if "weight" in name:
            grad.view(-1)[grad.numel() // 2] += self.amount
        return grad


@dataclass
class Step:
    """The optimiser's step; with a closure, what comes before is done inside of it."""

    body: tuple
    closure: bool
    spoilt: bool = False  # NaN gets into a gradient before it, so that it is not taken
    reloaded: bool = False  # before all of it the correction is saved, and another one goes on from that

    def do(self, side, net):
        def closure():
            for action in self.body:
                action.do(side, net)
            if self.spoilt:
                side.spoil()

        if self.reloaded:
            side.reload()
        side.step(closure, self.closure)


def note_penalties(side, penalties):
    if hasattr(side, "penalised"):
        side.penalised |= {name for name, _ in penalties}


def data(net, samples, seed, dtype):
    return net.inputs(samples, torch.Generator().manual_seed(seed)).float().to(dtype)  # the same numbers in both


def batches(action, side, net):
    x = data(net, action.samples, action.seed, side.dtype)
    return x, data(net, action.others, action.seed + 1, side.dtype)


def loss_of(outputs, seed, mask):
    """A mean over samples of a half of squared errors; some samples may not count."""
    generator = torch.Generator().manual_seed(seed)
    total = 0
    for output in outputs:
        target = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
        errors = 0.5 * (output - target).square()
        if mask == "all":
            errors = errors * 0
        elif mask == "some":
            errors = errors * (torch.rand(errors.shape[:1], generator=generator) < 0.5).view(
                -1, *[1] * (errors.ndim - 1)
            )
        total = total + errors.sum() / len(output)
    return total


# ---- loops ----------------------------------------------------------------------------------------------------------


def make_loop(rng, net, damping, dtype, steps=None):
    """A list of actions, each step of which begins with Zero where that is needed."""
    actions = []
    for step in range(steps or rng.choice([1, 1, 2, 3])):
        body = body_of_a_step(rng, net, damping, dtype)
        if step > 0 or rng.random() < 0.3:
            body = [Zero(rng.choice(["none", "zeros", "model", "by hand"])), *body]
        if rng.random() < 0.15:  # passes that come to nothing
            body = [*body[:1] * (step > 0), make_pass(rng, net), Zero(rng.choice(["none", "zeros"])), *body]
        actions.append(Step(tuple(body), closure=rng.random() < 0.15))
    return actions


def freeze_for_a_while(rng, net, actions):
    """Let one parameter of a layer, of which another is trained, be frozen in a step and trained again in a later one.

    Penalties are left alone, which may be all that a backward pass is for.
    """
    names = {p: name for name, p in net.model.named_parameters() if p.requires_grad}
    layers = [[p for p in together if p in names] for together in solved_together(net.model)]
    layers = [together for together in layers if len(together) > 1]
    if not layers or len(actions) < 2 or any(getattr(i, "penalties", ()) for action in actions for i in action.body):
        return
    name = names[rng.choice(rng.choice(layers))]
    when = sorted(rng.choices(range(1, len(actions) + 1), k=2))  # the last of them: never
    for place, is_trained in zip(when, (False, True), strict=True):
        if place < len(actions):
            actions[place].body = (Freeze(name, is_trained), *actions[place].body)


def body_of_a_step(rng, net, damping, dtype):
    factor = rng.choice([1.0, 1.0, 1.0, 64.0])
    penalties = make_penalties(rng, net) if rng.random() < 0.25 else ()
    number = damping[1] if isinstance(damping, tuple) else damping
    edited = not penalties and number >= 0.1 and rng.random() < EDITED
    body = []
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        action = make_pass(rng, net, factor, penalties if rng.random() < 0.8 else ())
        body.append(action)
        if rng.random() < 0.15:
            action.retain = True
            action.asked = None
            between = rng.choice(["nothing", "nothing", "zero", "pass"])
            if between == "zero":
                body.append(Zero(rng.choice(["none", "zeros"])))
            elif between == "pass":
                body.append(make_pass(rng, net, factor))
            body.append(Again())
        elif rng.random() < 0.1:  # its backward pass comes after that of another
            body[-1:] = [make_pass(rng, net, factor), action, Again()]
            body[-3].backward, body[-3].retain, body[-3].asked, body[-3].only = False, True, None, None
        if rng.random() < 0.1:
            body.append(Evaluate(rng.randrange(10**6)))
        if rng.random() < 0.1:
            body.append(make_pass(rng, net))
            body[-1].backward = False
            body[-1].asked = None if body[-1].checkpoint else rng.choice([None, "inputs", "parameters"])
    if penalties and rng.random() < 0.1:
        body.append(PenaltyAlone(penalties, factor))
    if factor != 1.0:
        body.append(Scale(1 / factor))
    roll = rng.random()
    if edited:
        amounts = [1e-2, 0.1] if dtype == torch.float32 else [1e-6, 1e-4, 1e-2, 0.1]
        body.append(Edit(rng.choice(["clip", "entry"]), rng.choice(amounts)))
        for action in body:
            if isinstance(action, Pass):
                action.only = None  # zeros that are edited without a pass for them look like what was before
    elif roll < 0.2:
        body.append(Clip(rng.choice([1e-3, 0.1, 1.0, 100.0]), by_layer=rng.random() < 0.3))
    elif roll < 0.3:
        body.append(Scale(rng.choice([0.1, -2.0, 3.0])))
    return body


def make_penalties(rng, net):
    names = [name for name, p in net.model.named_parameters() if p.requires_grad]
    strength = rng.choice([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
    chosen = names if rng.random() < 0.5 else rng.sample(names, 1)
    return tuple((name, strength) for name in chosen)


def make_pass(rng, net, factor=1.0, penalties=()):
    task = "whole" if rng.random() < 0.5 else rng.choice(net.tasks)
    checkpoint = rng.choice(["reentrant", "saved"]) if rng.random() < 0.2 else None
    asked = only = None
    if checkpoint != "reentrant" and rng.random() < 0.1:
        asked = rng.choice(["inputs", "parameters"])
    if checkpoint != "reentrant" and rng.random() < 0.05:
        only = names_of_a_layer(rng, net.model)
    return Pass(
        task,
        rng.choice(net.sizes),
        rng.choice(net.sizes),
        rng.randrange(10**6),
        # Zeros of some layers alone, if clipping writes to them, would be taken as zeroed.
        mask=rng.choices(["none", "some", "all"], weights=[16, 2, 3] if only is None else [1, 0, 0])[0],
        factor=factor,
        penalties=penalties,
        checkpoint=checkpoint,
        asked=asked,
        only=only,
    )


def names_of_a_layer(rng, model):
    """The parameters of a layer that is reached by every task, and what shares its weight."""
    together = rng.choice([its for its in solved_together(model.second) if any(p.requires_grad for p in its)] or [None])
    if together is None:
        return None
    same = {p for its in solved_together(model) if its[0] is together[0] for p in its}
    return tuple(name for name, p in model.named_parameters() if p in same and p.requires_grad)


def describe(actions):
    lines = []
    for action in actions:
        lines.append(f"  Step, closure={action.closure}, spoilt={action.spoilt}, reloaded={action.reloaded}:")
        lines += [f"    {shown(inner)}" for inner in action.body]
    return "\n".join(lines)


def shown(action):
    """As a call, without the arguments that say nothing."""
    unsaid = {field.name: field.default for field in fields(action) if field.default is not MISSING}
    said = {name: value for name, value in vars(action).items() if name not in unsaid or value != unsaid[name]}
    return f"{type(action).__name__}({', '.join(f'{name}={value!r}' for name, value in said.items())})"


def has(actions, *kinds):
    return any(isinstance(inner, kinds) for action in actions for inner in action.body)


def is_edited(actions):
    """Whether the library may say that a gradient was edited."""
    for action in actions:
        for place, inner in enumerate(action.body):
            if isinstance(inner, Edit) or getattr(inner, "penalties", ()):
                return True
            later = action.body[place + 1 :]
            if isinstance(inner, Scale | Clip) and has([Step(later, False)], Pass, Again):
                return True
    return False
