"""The definition, written down without looking at the library: a float64 copy of the model, probes, dense solves.

No hooks. The copy's modules get subclasses of their own classes: every layer adds a zero to its output, whose gradient
is ΔZ, and every call says when it is the outermost one. ``backward`` is ``torch.autograd.grad``; what ``.grad`` should
hold is kept in dictionaries by the parameters' names.
"""

import copy
from dataclasses import dataclass, field
from itertools import product
from math import inf, prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fuzz.units import JOINTS, UnitCall, call_of_units, units_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (nn.Linear, *CONVOLUTIONS)


@dataclass(eq=False)
class Entry:
    """An outermost call of the model or of a part of it."""

    samples: int
    is_whole: bool


@dataclass(eq=False)
class Call:
    """A call of a layer: what it multiplied, and the zero that was added to what came out."""

    layer: nn.Module
    X: list  # one matrix per group, a row per sample and position
    probe: Tensor
    entry: Entry
    output_grads: list | None = None  # one matrix per group, of all backward passes that are in .grad

    @property
    def key(self):
        """Calls with the same are solved for together."""
        return self.layer.weight

    @property
    def parameters(self):
        return list(self.layer.parameters(recurse=False))

    @property
    def probes(self):
        return [self.probe]

    def rows(self, grads):
        """The gradient of the output as one matrix per group."""
        (grad,) = grads
        if not isinstance(self.layer, CONVOLUTIONS):
            return [grad.reshape(-1, grad.shape[-1])]
        batch = grad if grad.ndim == len(self.layer.kernel_size) + 2 else grad[None]
        return list(batch.flatten(2).transpose(1, 2).flatten(0, 1).chunk(self.layer.groups, dim=1))


@dataclass
class Expected:
    """What a weight and its biases, or a parameter that is not corrected, should have in ``.grad``."""

    grads: dict  # by name; None where there is none
    size: float = 0.0  # errors are compared with this: the gradient's norm, unless it cancels
    condition: float = 1.0  # of XᵀX + λI


@dataclass(eq=False)
class Average:
    """The second moments of a weight's inputs, over steps."""

    has_weight: bool  # otherwise its columns are those of
    biases: list
    moments: list  # one matrix per group
    rows: float  # that have gone into it
    age: int = 0  # in how many steps it was used

    def moment_for(self, biases, group):
        """Without the columns of layers that are not called."""
        moment = self.moments[group]
        features = len(moment) - len(self.biases)
        place = {bias: features + number for number, bias in enumerate(self.biases)}
        kept = [*range(features), *(place[bias] for bias in biases)]
        return moment[kept][:, kept]


@dataclass
class Watch:
    """What happens in the copy."""

    model: nn.Module
    is_unbatched: bool
    is_time_first: bool
    depth: int = 0
    entry: Entry | None = None
    calls: list = field(default_factory=list)


def watched_class(cls, watch):
    """The class with calls that are counted, and with probes if it is a layer."""

    class Watched(cls):
        def __call__(self, *args, **kwargs):
            if watch.depth == 0:
                watch.entry = Entry(samples_in(self, watch, (*args, *kwargs.values())), self is watch.model)
            watch.depth += 1
            try:
                return super().__call__(*args, **kwargs)
            finally:
                watch.depth -= 1

        def forward(self, *args, **kwargs):
            if isinstance(self, JOINTS):
                outputs, units = call_of_units(self, args, kwargs)
                if torch.is_grad_enabled():
                    watch.calls += [UnitCall(parameters, parts, watch.entry) for parameters, parts in units]
                return outputs
            z = super().forward(*args, **kwargs)
            if not isinstance(self, LAYERS) or not torch.is_grad_enabled():
                return z
            probe = torch.zeros_like(z, requires_grad=True)
            watch.calls.append(Call(self, input_matrices(self, args[0].detach().clone()), probe, watch.entry))
            return z + probe

    return Watched


def samples_in(module, watch, values):
    """The leading dimension of the first tensor; 1 where a single sample enters without one."""
    if isinstance(module, JOINTS):
        return samples_of_sequences(module, values[0])
    tensor = next(value for value in values if isinstance(value, Tensor) and value.ndim > 0)
    if isinstance(module, LAYERS):
        dims = len(module.kernel_size) if isinstance(module, CONVOLUTIONS) else 0
        return len(tensor) if tensor.ndim > dims + 1 else 1
    return 1 if watch.is_unbatched else tensor.shape[1 if watch.is_time_first else 0]


def samples_of_sequences(module, inputs):
    """Of a recurrent layer, a cell or an attention that is called by itself."""
    if isinstance(inputs, PackedSequence):
        return int(inputs.batch_sizes[0])
    if isinstance(module, nn.RNNCellBase):
        return 1 if inputs.ndim == 1 else len(inputs)
    return 1 if inputs.ndim == 2 else inputs.shape[0 if module.batch_first else 1]


def input_matrices(layer, x):
    """The rows that the layer multiplies by its weight, one matrix per group: im2col, tap by tap."""
    if not isinstance(layer, CONVOLUTIONS):
        return [x.reshape(-1, x.shape[-1])]
    dims = len(layer.kernel_size)
    x = x if x.ndim == dims + 2 else x[None]
    sides = []
    for i in range(dims):
        reach = layer.dilation[i] * (layer.kernel_size[i] - 1)
        before = reach // 2 if layer.padding == "same" else layer.padding[i]
        sides.append((before, reach - before if layer.padding == "same" else before))
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, [side for pair in reversed(sides) for side in pair], mode=mode)
    taps = []
    for offset in product(*(range(k) for k in layer.kernel_size)):
        window = x
        for i in range(dims):
            positions = (x.shape[2 + i] - layer.dilation[i] * (layer.kernel_size[i] - 1) - 1) // layer.stride[i] + 1
            start = offset[i] * layer.dilation[i]
            places = torch.arange(positions) * layer.stride[i] + start
            window = window.index_select(2 + i, places)
        taps.append(window.flatten(2))  # [samples, channels, positions]
    rows = torch.stack(taps, dim=2).permute(0, 3, 1, 2).flatten(0, 1)  # [samples · positions, channels, taps]
    return [channels.flatten(1) for channels in rows.chunk(layer.groups, dim=1)]


class Reference:
    """One side of a run: what every action should do to the gradients."""

    def __init__(self, net, mode, damping, loss_reduction, averaging=(0.0, 1), own_dampings=None, widest=8192):
        """One side.

        Args:
            net: whose model is trained.
            mode: "step" or "backward".
            damping: λ, or a pair ("relative", ρ).
            loss_reduction: as ``attach`` takes it.
            averaging: β and T.
            own_dampings: those of parameters, by name, that have another one.
            widest: how many columns the average of a layer with fewer rows may have.
        """
        self.rounded = 1e-4 if next(net.model.parameters()).dtype == torch.float64 else 1e-2
        self.model = copy.deepcopy(net.model).double()
        self.dtype = torch.float64
        self.mode, self.damping, self.loss_reduction = mode, damping, loss_reduction
        self.averaging, self.averages, self.widest = averaging, {}, widest
        self.own_dampings = own_dampings or {}
        self.watch = Watch(self.model, net.is_unbatched, net.is_time_first)
        for module in self.model.modules():
            module.__class__ = watched_class(type(module), self.watch)
        self.note_trained()
        self.pending = []
        self.must_warn = False  # of an edit that is no factor
        self.forget()

    def note_trained(self):
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.names = {p: name for name, p in self.trained.items()}

    # ---- what the actions do ----------------------------------------------------------------------------------------

    def forget(self):
        """Nothing is in ``.grad``."""
        self.grads = {}  # in the mode "step" the plain ones
        self.passes = []  # the calls that each has reached
        self.is_edited = False
        self.is_written_to = False  # since the last backward pass
        self.penalised = set()  # names of parameters that are in .grad by another way than a layer's call, too
        self.facts = {}  # by the weight: size of the solutions and condition, in the mode "backward"
        for call in self.watch.calls:
            call.output_grads = None

    def zero(self, how):
        zeros = {name: torch.zeros_like(grad) for name, grad in self.grads.items() if how in ("zeros", "data")}
        self.forget()
        self.grads = zeros  # which may be edited

    def freeze(self, name, is_trained):
        dict(self.model.named_parameters())[name].requires_grad_(is_trained)
        self.note_trained()

    def use_checkpoints(self, kind):
        """The mathematics are the same without."""

    def after_step(self):
        """Graphs of before a step are never used again."""
        self.watch.calls.clear()
        self.pending.clear()

    def backward(self, loss, retain_graph=False, only=None):
        self.forget_zeros()
        calls = [call for call in self.watch.calls if self.is_wanted(call, only)]
        trained = {name: p for name, p in self.trained.items() if only is None or name in only}
        probes = [call.probes for call in calls]
        wanted = [*(probe for its in probes for probe in its), *trained.values()]
        found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
        reached = []
        for call, its in zip(calls, probes, strict=True):
            grads, found = found[: len(its)], found[len(its) :]
            if any(grad is not None for grad in grads):
                grads = [torch.zeros_like(p) if g is None else g for p, g in zip(its, grads, strict=True)]
                reached.append((call, call.rows(grads)))
        plain = {n: g for n, g in zip(trained, found, strict=True) if g is not None}
        entries = {call.entry for call, _ in reached}
        if self.mode == "backward":
            pieces = self.corrected(reached, plain, self.divisor([entries]), edited=False)
            plain = {n: grad for piece in pieces for n, grad in piece.grads.items() if grad is not None}
            for piece in pieces:
                first = next(iter(piece.grads))
                size, condition = self.facts.get(first, (0.0, 1.0))
                self.facts[first] = (size + piece.size, max(condition, piece.condition))
        else:
            self.passes.append([call for call, _ in reached])
            for call, rows in reached:
                call.output_grads = (
                    rows if call.output_grads is None else [a + b for a, b in zip(call.output_grads, rows, strict=True)]
                )
        for name, grad in plain.items():
            self.grads[name] = self.grads[name] + grad if name in self.grads else grad

    def is_wanted(self, call, only):
        """Whether a backward pass is for one of the call's parameters."""
        names = {self.names[p] for p in call.parameters if p in self.names}
        return bool(names if only is None else names & set(only))

    def step(self, closure, inside):
        closure()

    def spoil(self):
        """What is expected of such a step is not asked for."""

    def reload(self):
        """Averages of what is not trained as it was then are not saved."""
        self.averages = {
            weight: average
            for weight, average in self.averages.items()
            if (average.has_weight, average.biases) == (weight in self.names, self.trained_biases(weight))
        }

    def ask_for_gradients(self, loss, of):
        """``torch.autograd.grad`` leaves ``.grad`` alone."""

    def scale(self, factor, names=None):
        names = self.grads.keys() if names is None else [name for name in names if name in self.grads]
        for name in names:
            self.grads[name] = self.grads[name] * factor
        for call in self.watch.calls:
            if call.output_grads is not None and any(self.names.get(p) in names for p in call.parameters):
                call.output_grads = [factor * rows for rows in call.output_grads]
        self.facts = {n: (abs(factor) * s if n in names else s, c) for n, (s, c) in self.facts.items()}
        self.is_written_to = True

    def clip(self, limit, names=None):
        names = self.grads.keys() if names is None else [name for name in names if name in self.grads]
        norm = sum(float(self.grads[name].square().sum()) for name in names) ** 0.5
        self.scale(min(1.0, limit / (norm + 1e-6)), names)

    def edit(self, change):
        """Somebody writes to .grad."""
        before, self.is_edited = self.grads, True
        self.grads = {name: change(name, grad.clone()) for name, grad in before.items()}
        self.is_written_to = True

    def forget_zeros(self):
        """Zeros that were written are taken for ``zero_grad(set_to_none=False)``: what made them no longer counts."""
        together = {}
        for call in self.watch.calls if self.is_written_to else ():
            if call.output_grads is not None:
                together.setdefault(call.key, []).append(call)
        for calls in together.values():
            names = {self.names[p] for call in calls for p in call.parameters if p in self.names}
            if not any(self.grads[name].any() for name in names if name in self.grads):
                for call in calls:
                    call.output_grads = None
                self.passes = [[call for call in reached if call not in calls] for reached in self.passes]
        self.is_written_to = False

    def load(self, state):
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(state[name])

    # ---- what the definition says -----------------------------------------------------------------------------------

    def expected(self):
        """One :class:`Expected` for each weight with its biases, and for each of the other parameters."""
        if self.mode == "backward":
            result = []
            for names in self.joined():
                grads = {name: self.grads.get(name) for name in names}
                facts = [self.facts[name] for name in names if name in self.facts] or [(0.0, 1.0)]
                size = max(norm_of(grads), 1e-4 * sum(size for size, _ in facts), 1e-8 * norm_of(self.grads))
                result.append(Expected(grads, size, max(condition for _, condition in facts)))
            return result
        self.forget_zeros()
        used = [(call, call.output_grads) for call in self.watch.calls if call.output_grads is not None]
        return self.corrected(used, self.grads, self.divisor(self.groups()), self.is_edited)

    def groups(self):
        """Entries that took part in a common backward pass, also by way of others."""
        groups = []
        for entries in ({call.entry for call in reached} for reached in self.passes):
            common = [group for group in groups if group & entries]
            groups = [group for group in groups if not group & entries]
            groups.append(entries.union(*common))
        return groups

    def divisor(self, groups):
        """By what the loss was divided."""
        samples = 0
        for group in groups:
            whole = [entry.samples for entry in group if entry.is_whole]
            samples += max(whole or [entry.samples for entry in group], default=0)
        if callable(self.loss_reduction):
            return self.loss_reduction(samples)
        return {"mean": samples, "sum": 1}.get(self.loss_reduction, self.loss_reduction)

    def joined(self):
        """The names of the parameters that are solved for together, and each of the others by itself."""
        known = {p: name for name, p in self.model.named_parameters()}  # whether they are trained now or not
        owners, together = {}, []
        for module in self.model.modules():
            if isinstance(module, LAYERS):
                owners.setdefault(module.weight, []).append(module)
        for joint in [module for module in self.model.modules() if isinstance(module, JOINTS)]:
            for unit in units_of(joint):
                together.append([known[p] for p in unit])
                owners.pop(unit[0], None)  # of a layer that is a part of it
        for weight, layers in owners.items():
            parameters = [weight, *(layer.bias for layer in layers if layer.bias is not None)]
            together.append(list(dict.fromkeys(known[p] for p in parameters)))
        taken = {name for names in together for name in names}
        return together + [[name] for name in known.values() if name not in taken]

    def corrected(self, used, plain, divisor, edited):
        """``U + R``, or of an edited gradient its own correction.

        Args:
            used: pairs of a call and its ΔZ.
            plain: the gradients, by name.
            divisor: N.
            edited: whether ``plain`` is not what backward passes made.
        """
        by_weight = {}
        for call, dZ in used:
            by_weight.setdefault(call.key, []).append((call, dZ))
        result = {n: Expected({n: plain.get(n)}) for n in self.trained}
        for weight, uses in by_weight.items():
            if isinstance(uses[0][0], UnitCall):
                self.correct_unit(uses, plain, divisor, edited, result)
                continue
            biases = list(dict.fromkeys(c.layer.bias for c, _ in uses if c.layer.bias in self.names))
            names = [self.names[p] for p in [weight, *biases] if p in self.names]
            if not names:
                continue
            explained, solved, piece, terms = [], [], Expected({}), 0.0
            average = self.updated_average(weight, biases, uses)
            is_shortened = average is None and edited and self.is_shortened(weight, biases, uses, plain)
            self.must_warn |= is_shortened
            for group in range(getattr(uses[0][0].layer, "groups", 1)):
                X = torch.cat([self.design(call, group, biases) for call, _ in uses])
                dZ = torch.cat([rows[group] for _, rows in uses])
                moment, rows = X.T @ X, len(X)
                if average is not None:
                    moment, rows = len(X) * average.moment_for(biases, group), max(round(average.rows), 1)
                level = self.level(moment, rows, names)
                S = moment + level * torch.eye(len(moment), dtype=X.dtype)
                G = self.matrix(weight, biases, group, len(dZ.T), plain) if edited else dZ.T @ X
                explained.append(G)
                if is_shortened:  # the rows do not explain it, and there are too few of them to solve with the moment
                    solved.append(divisor * G / (X.square().sum() + level))
                else:
                    solved.append(divisor * torch.linalg.solve(S, G.T).T)
                terms += float(dZ.norm() * X.norm()) + float(G.norm())
                values = torch.linalg.eigvalsh(S)
                least = max(float(values[0]), torch.finfo(S.dtype).eps * float(values[-1]))  # below it is rounding
                piece.condition = max(piece.condition, float(values[-1]) / least)
                piece.size += abs(divisor) * float(dZ.norm()) / (2 * level**0.5)
            explained = dict(zip(names, self.split(torch.cat(explained), weight, biases), strict=True))
            solved = dict(zip(names, self.split(torch.cat(solved), weight, biases), strict=True))
            self.put_together(piece, plain, explained, solved, terms, result)
        if self.mode == "step":
            all_plain = norm_of(plain)
            for piece in result.values():
                piece.size = piece.size or max(norm_of(piece.grads), 1e-8 * all_plain)
        return list(result.values())

    def put_together(self, piece, plain, explained, solved, terms, result):
        """What was solved for, and what is in the gradients besides."""
        for name in solved:
            rest = plain[name] - explained[name]
            if name not in self.penalised:
                if float(rest.norm()) > 1e-9 * terms:
                    raise RuntimeError(f"the reference does not understand {name}")
                rest = 0.0
            piece.grads[name] = solved[name] + rest
            del result[name]
        if self.mode == "step":
            piece.size = max(norm_of(piece.grads), 1e-4 * piece.size)
        result[next(iter(solved))] = piece

    def correct_unit(self, uses, plain, divisor, edited, result):
        """The same of a unit of a module with several products: each of its parts is a problem of its own."""
        trained = {p: self.names[p] for p in uses[0][0].parameters if p in self.names}
        trained = {p: name for p, name in trained.items() if name in plain}
        if not trained:
            return
        explained, solved = ({name: torch.zeros_like(p) for p, name in trained.items()} for _ in range(2))
        piece, terms = Expected({}), 0.0
        for place, part in enumerate(uses[0][0].parts):
            weights = [n for n, (p, _) in enumerate(part.weights) if p in trained]
            biases = [(p, rows) for p, rows in part.biases if p in trained]
            if not weights and not biases:
                continue
            columns = [torch.cat([call.parts[place].X[n] for call, _ in uses]) for n in weights]
            dZ = torch.cat([rows[place] for _, rows in uses])
            X = torch.cat([*columns, torch.ones(len(dZ), bool(biases), dtype=dZ.dtype)], dim=1)
            G = dZ.T @ X
            if edited:
                matrices = [plain[trained[part.weights[n][0]]][part.weights[n][1]] for n in weights]
                sums = [plain[trained[p]][rows] for p, rows in biases]
                G = torch.cat([*matrices, *([torch.stack(sums).mean(0)[:, None]] if sums else [])], dim=1)
            moment = X.T @ X
            level = self.level(moment, len(X), list(trained.values()))
            S = moment + level * torch.eye(len(moment), dtype=X.dtype)
            outside = torch.zeros_like(G)
            if edited and len(X) < len(S):  # what the rows do not explain is shortened
                outside = G - G @ torch.linalg.pinv(X) @ X
                self.must_warn |= bool(outside.norm() > 1e-3 * (dZ.norm() * X.norm() + G.norm()))
            new = torch.linalg.solve(S, (G - outside).T).T + outside / (moment.trace() + level)
            first = 0
            for n, column in zip(weights, columns, strict=True):
                parameter, rows = part.weights[n]
                here, first = slice(first, first + column.shape[1]), first + column.shape[1]
                explained[trained[parameter]][rows] = G[:, here]
                solved[trained[parameter]][rows] = divisor * new[:, here]
            for parameter, rows in biases:
                explained[trained[parameter]][rows] = plain[trained[parameter]][rows] if edited else G[:, -1]
                solved[trained[parameter]][rows] = divisor * new[:, -1] / len(biases)
            terms += float(dZ.norm() * X.norm()) + float(G.norm())
            values = torch.linalg.eigvalsh(S)
            least = max(float(values[0]), torch.finfo(S.dtype).eps * float(values[-1]))  # below it is rounding
            if edited and len(X) < len(S) and torch.linalg.matrix_rank(X, rtol=self.rounded) < len(X):
                least = 0.0  # what of an edit is in the span of such rows, rounding decides
            piece.condition = max(piece.condition, float(values[-1]) / least if least else inf)
            piece.size += abs(divisor) * float(dZ.norm()) / (2 * level**0.5)
        self.put_together(piece, plain, explained, solved, terms, result)

    def level(self, moment, rows, names):
        """λ for the second moment of so many rows, in the group of the first of these parameters."""
        damping = self.own_dampings.get(names[0], self.damping)
        if not isinstance(damping, tuple):
            return damping
        trace = float(moment.trace())
        return damping[1] * trace / min(rows, len(moment)) if trace > 0 else 1.0

    def updated_average(self, weight, biases, uses):
        """What stands for the inputs of a step, if something does: the mean of xxᵀ over the rows of every T-th step.

        Those of a refresh weigh β times those of the next.

        It begins with the first step (with β = 0 or very many columns: one with no fewer rows than columns), and anew
        where what is trained has changed.

        Args:
            weight: whose.
            biases: of its layers that were called.
            uses: pairs of a call and its ΔZ.
        """
        beta, period = self.averaging
        if self.mode == "backward" or (beta == 0 and period == 1):
            return None
        columns = self.trained_biases(weight)
        average = self.averages.pop(weight, None)
        if average is not None and (average.has_weight, average.biases) != (weight in self.names, columns):
            average = None
        rows = sum(len(call.X[0]) for call, _ in uses)
        width = len(self.design(uses[0][0], 0, biases).T)
        if average is None and rows < width and (beta == 0 or width > self.widest):
            return None
        if average is None or average.age == period:
            groups = range(getattr(uses[0][0].layer, "groups", 1))
            X = [torch.cat([self.design(call, group, columns) for call, _ in uses]) for group in groups]
            sums, total = [one.T @ one for one in X], rows
            if average is not None:
                known = [average.rows * moment for moment in average.moments]
                sums = [beta * old + new for old, new in zip(known, sums, strict=True)]
                total = beta * average.rows + rows
            moments = [one / total for one in sums]
            average = Average(weight in self.names, columns, moments, total)
        average.age += 1
        self.averages[weight] = average
        return average

    def trained_biases(self, weight):
        """Of all layers with this weight."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, LAYERS) and layer.weight is weight]
        return list(dict.fromkeys(layer.bias for layer in layers if layer.bias in self.names))

    def is_shortened(self, weight, biases, uses, plain):
        """Whether an edited gradient is no multiple of ``ΔZᵀX``, and solved for by samples."""
        old, new = [], []
        for group in range(getattr(uses[0][0].layer, "groups", 1)):
            X = torch.cat([self.design(call, group, biases) for call, _ in uses])
            dZ = torch.cat([rows[group] for _, rows in uses])
            old.append((dZ.T @ X).flatten())
            new.append(self.matrix(weight, biases, group, len(dZ.T), plain).flatten())
        if X.shape[0] >= X.shape[1]:
            return False
        old, new = torch.cat(old), torch.cat(new)
        factor = (old @ new) / (old @ old) if old.any() else 0.0
        return bool((new - factor * old).norm() > 1e-9 * old.norm())

    def design(self, call, group, biases):
        """The inputs, and for each bias a column: ones where it was added."""
        X = call.X[group]
        columns = [X] if call.layer.weight in self.names else []
        columns += [torch.full((len(X), 1), float(call.layer.bias is bias), dtype=X.dtype) for bias in biases]
        return torch.cat(columns, dim=1)

    def matrix(self, weight, biases, group, outputs, grads):
        """Gradients as a matrix over the columns of ``design``, of one group."""
        place = slice(group * outputs, (group + 1) * outputs)
        columns = [grads[self.names[weight]].flatten(1)[place]] if weight in self.names else []
        columns += [grads[self.names[bias]][place, None] for bias in biases]
        return torch.cat(columns, dim=1)

    def split(self, matrix, weight, biases):
        """The inverse, of all groups."""
        features = prod(weight.shape[1:]) if weight in self.names else 0
        parts = [matrix[:, :features].reshape(weight.shape)] if features else []
        return [*parts, *(matrix[:, features + place] for place in range(len(biases)))]


def flat(tensors):
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(tensor.flatten() for tensor in tensors)])


def norm_of(grads):
    return sum(float(g.square().sum()) for g in grads.values() if g is not None) ** 0.5
