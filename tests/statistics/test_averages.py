"""``averaging=β, refresh=T`` against loops over explicit matrices in float64."""

import copy
import io
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import consequent

BATCHES = (9, 12, 9, 7, 20, 9, 9, 3)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False), nn.Tanh(), nn.Linear(2, 30)).double()


def batches(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 4, dtype=torch.float64, generator=generator) for size in BATCHES]


def loss_of(outputs):
    return outputs.square().sum() / 2 / len(outputs)


@dataclass
class Naive:
    """SGD with averaged moments, layer by layer, with explicit inverses."""

    model: nn.Module
    beta: float
    period: int
    rho: float | None = 0.1
    level: float = 0.0
    lr: float = 0.05
    steps: int = 0
    kept: dict = field(default_factory=dict)

    def step(self, inputs):
        self.model.zero_grad()
        seen = []
        hooks = [
            layer.register_forward_hook(lambda layer, args, out: seen.append((layer, args[0].detach())))
            for layer in self.model
            if isinstance(layer, nn.Linear)
        ]
        loss_of(self.model(inputs)).backward()
        for hook in hooks:
            hook.remove()
        for layer, x in seen:
            X = x if layer.bias is None else torch.cat([x, torch.ones_like(x[:, :1])], 1)
            rows, columns = X.shape
            known = self.kept.get(layer)
            if self.steps % self.period == 0 and (known is not None or rows >= columns or self.beta > 0):
                before = (0.0, 0.0) if known is None else known
                known = self.kept[layer] = (self.beta * before[0] + X.T @ X, self.beta * before[1] + rows)
            total, n = (X.T @ X, rows) if known is None else known
            S = total / n
            level = self.level if self.rho is None else self.rho * rows * S.trace() / min(round(n), columns)
            G = layer.weight.grad if layer.bias is None else torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
            U = len(inputs) * G @ torch.linalg.inv(rows * S + level * torch.eye(columns, dtype=S.dtype))
            with torch.no_grad():
                layer.weight -= self.lr * U[:, : layer.in_features]
                if layer.bias is not None:
                    layer.bias -= self.lr * U[:, -1]
        self.steps += 1


def assert_same(model, twin):
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("damping", [{"relative_damping": 0.1}, {"damping": 0.3}], ids=str)
@pytest.mark.parametrize(("beta", "period"), [(0.0, 3), (0.9, 1), (0.5, 2), (0.95, 4)])
def test_it_is_what_the_definition_says(beta, period, damping):
    model, twin = network(), network()
    naive = Naive(twin, beta, period, damping.get("relative_damping"), damping.get("damping", 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=naive.lr)
    consequent.attach(optimizer, model, averaging=beta, refresh=period, **damping)
    for x in batches():
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()
        naive.step(x)
        assert_same(model, twin)


def wide_network():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 25, bias=False), nn.Tanh(), nn.Linear(25, 3)]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("damping", [{"relative_damping": 0.1}, {"damping": 0.3}], ids=str)
@pytest.mark.parametrize(("beta", "period"), [(0.0, 3), (0.9, 1), (0.95, 4)])
def test_layers_with_fewer_rows_than_inputs_are_averaged_too(beta, period, damping):
    model, twin = wide_network(), wide_network()
    naive = Naive(twin, beta, period, damping.get("relative_damping"), damping.get("damping", 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=naive.lr)
    correction = consequent.attach(optimizer, model, averaging=beta, refresh=period, **damping)
    for x in batches():
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()
        naive.step(x)
        assert_same(model, twin)
    assert set(correction.state_dict()["averages"]) == ({"0", "2", "4"} if beta else {"0"})


def test_a_layer_that_is_too_wide_for_an_average_has_none(monkeypatch):
    monkeypatch.setattr("consequent.statistics.averages.WIDEST", 30)
    model = wide_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    correction = consequent.attach(optimizer, model, averaging=0.9)
    loss_of(model(batches()[0])).backward()
    optimizer.step()
    assert set(correction.state_dict()["averages"]) == {"0", "4"}
    wide, *others = [line for line in str(correction).splitlines() if "solved on the" in line][::-1][1:]
    assert wide.endswith("; not averaged")
    assert not any("not averaged" in line for line in others)
    assert "not averaged: solved for batch by batch" in str(correction)


def test_before_its_first_step_no_layer_is_said_to_have_no_average():
    optimizer = consequent.CSGD(wide_network(), lr=0.05, averaging=0.9)
    assert "not averaged" not in str(optimizer.correction)


def test_micro_batches_are_one_step():
    whole, parts = network(), network()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (whole, parts)]
    for optimizer, model in zip(optimizers, (whole, parts), strict=True):
        consequent.attach(optimizer, model, averaging=0.5, refresh=2)
    for x in batches():
        optimizers[0].zero_grad()
        loss_of(whole(x)).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        for part in x.split(2):
            (loss_of(parts(part)) * len(part) / len(x)).backward()
        optimizers[1].step()
        assert_same(whole, parts)


def test_between_refreshes_nothing_is_computed_of_the_inputs(monkeypatch):
    from consequent.layers.linear import Linear

    counted = []
    computed = Linear.second_moment
    monkeypatch.setattr(Linear, "second_moment", lambda *args, **kwargs: counted.append(1) or computed(*args, **kwargs))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    correction = consequent.attach(optimizer, model, refresh=4)
    for step, x in enumerate(batches()):
        counted.clear()
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        kept = [use.inputs for record in correction._parts.corrector.records.values() for use in record.uses]
        assert all(inputs is None for inputs in kept) == (len(x) >= 3)  # fewer rows are kept as they are
        optimizer.step()
        assert bool(counted) == (step % 4 == 0)


def test_a_penalty_in_the_loss_stays_plain_between_refreshes():
    """As it does with exact moments: the same update as with decoupled decay."""
    model, twin = network(), network()
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.05),
        torch.optim.SGD(twin.parameters(), lr=0.05, weight_decay=0.3),
    ]
    for optimizer, net in zip(optimizers, (model, twin), strict=True):
        consequent.attach(optimizer, net, averaging=0.5, refresh=3, bound=None)
    for x in batches()[:6]:
        for optimizer in optimizers:
            optimizer.zero_grad()
        penalty = 0.15 * sum(parameter.square().sum() for parameter in model.parameters())
        (loss_of(model(x)) + penalty).backward()
        loss_of(twin(x)).backward()
        for optimizer in optimizers:
            optimizer.step()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_layers_that_share_a_weight_and_are_called_by_turns():
    """Each with a bias of its own, of which a step may do without."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    second.weight = first.weight
    both = nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.0)
    consequent.attach(optimizer, both, averaging=0.5, refresh=2, damping=0.2)
    total, rows = 0.0, 0.0
    for number, x in enumerate(batches()[:6]):
        used = [both[number % 2]] if number < 4 else list(both)
        optimizer.zero_grad()
        outputs = [layer(x) for layer in used]
        output_grads = torch.randn(len(used) * len(x), 3, dtype=torch.float64)
        (torch.cat(outputs) * output_grads).sum().backward()
        ones = [torch.cat([torch.full((len(x), 1), float(layer is one)).double() for layer in used]) for one in both]
        X = torch.cat([x.repeat(len(used), 1), *ones], 1)
        if number % 2 == 0:
            total, rows = 0.5 * total + X.T @ X, 0.5 * rows + len(X)
        G = torch.cat([first.weight.grad, *(layer.bias.grad[:, None] for layer in used)], 1)
        kept = [0, 1, 2, 3, *(4 + list(both).index(layer) for layer in used)]
        damped = (len(X) * total / rows + 0.2 * torch.eye(6, dtype=torch.float64))[kept][:, kept]
        expected = len(x) * G @ torch.linalg.inv(damped)
        optimizer.step()
        found = torch.cat([first.weight.grad, *(layer.bias.grad[:, None] for layer in used)], 1)
        torch.testing.assert_close(found, expected)


class Chained(nn.Module):
    """Two layers with one weight and a bias each, of which the backward pass meets the second one's first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def updates_of_chained(*, penalty=0.0, set_to_none=True, reload_at=None):
    """The gradients at each of six steps without the penalty's, of weights that stay; the fourth calls one layer."""
    model, found = Chained(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, model, averaging=0.5, refresh=2, damping=0.2)
    for number, x in enumerate(batches()[:6]):
        if number == reload_at:
            saved = copy.deepcopy(correction.state_dict())
            correction.detach()
            correction = consequent.attach(optimizer, model, averaging=0.5, refresh=2, damping=0.2)
            correction.load_state_dict(saved)
        optimizer.zero_grad(set_to_none=set_to_none)
        called = model.first if number == 3 else model
        (loss_of(called(x[:, :3])) + penalty * sum(p.square().sum() for p in called.parameters()) / 2).backward()
        optimizer.step()
        penalised = {p: penalty * p.detach() for p in called.parameters()}
        found.append([0 * p if p.grad is None else p.grad - penalised.get(p, 0) for p in model.parameters()])
    return found


@pytest.mark.parametrize("options", [{"penalty": 0.3}, {"set_to_none": False}, {"reload_at": 3}], ids=str)
def test_the_order_of_biases_that_share_a_weight_does_not_matter(options):
    """Neither to penalties, nor where one is not used, nor to a state that is saved."""
    for one, other in zip(updates_of_chained(), updates_of_chained(**options), strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_nan_in_a_batch_does_not_get_into_the_average():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    correction = consequent.attach(optimizer, model, averaging=0.9)
    for number, x in enumerate(batches()):
        if number == 2:
            x[0, 0] = torch.nan
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        if number == 2:
            with pytest.warns(consequent.ConsequentWarning, match="NaN or inf"):
                optimizer.step()
        else:
            optimizer.step()
    assert correction.counters.skipped == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("ready", [True, False])
def test_a_run_that_is_saved_and_goes_on_is_the_same(ready):
    def make(model):
        if ready:
            optimizer = consequent.CSGD(model, lr=0.05, averaging=0.9, refresh=3)
            return optimizer, optimizer.correction
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return optimizer, consequent.attach(optimizer, model, averaging=0.9, refresh=3)

    def train(model, optimizer, data):
        for x in data:
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()

    model = network()
    optimizer, correction = make(model)
    train(model, optimizer, batches()[:4])
    buffer = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), correction.state_dict()), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    train(model, optimizer, batches()[4:])
    other = network()
    its_optimizer, its_correction = make(other)
    other.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    its_correction.load_state_dict(saved[2])
    train(other, its_optimizer, batches()[4:])
    assert_same(model, other)


def test_a_state_of_other_layers_is_refused():
    model, other = network(), nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    corrections = []
    for net in (model, other):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        corrections.append((optimizer, consequent.attach(optimizer, net, averaging=0.9)))
        optimizer.zero_grad()
        loss_of(net(batches()[0])).backward()
        optimizer.step()
    state = copy.deepcopy(corrections[0][1].state_dict())
    with pytest.raises(ValueError, match="averaged moment of layer '4', which is not corrected here"):
        corrections[1][1].load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"averaging": 1.0}, "averaging must be below 1"),
        ({"averaging": -0.1}, "averaging must be finite and ≥ 0"),
        ({"refresh": 0}, "refresh must be a whole number"),
        ({"refresh": 2.5}, "refresh must be a whole number"),
        ({"refresh": 2, "at": "backward"}, 'need at="step"'),
        ({"averaging": 0.5, "foresight": True}, "foresight=True compares"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        consequent.Consequentialism(network(), **options)


def test_a_state_of_another_width_is_refused():
    model, other = network(), network()
    other[0] = nn.Linear(4, 3, bias=False).double()
    corrections = []
    for net in (model, other):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        corrections.append((optimizer, consequent.attach(optimizer, net, averaging=0.9)))
        loss_of(net(batches()[0])).backward()
        optimizer.step()
    with pytest.raises(ValueError, match=r"layer '0' is \[1, 5, 5\], but the layer's is \[1, 4, 4\]"):
        corrections[1][1].load_state_dict(corrections[0][1].state_dict())


def update_of(layer, optimizer, x, output_grads):
    optimizer.zero_grad()
    (layer(x) * output_grads).sum().backward()
    optimizer.step()
    return [None if p.grad is None else p.grad.clone() for p in (layer.weight, layer.bias)]


@pytest.mark.filterwarnings("ignore:all layers to correct are frozen")
@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
@pytest.mark.parametrize("options", [{"averaging": 0.9}, {"refresh": 5}], ids=str)
@pytest.mark.parametrize("begins_frozen", [True, False])
def test_what_is_frozen_or_unfrozen_begins_anew(begins_frozen, options, frozen):
    """With the same inputs at every step, averaging changes nothing; frozen at attaching, and later on."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 3)).double() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in layers]
    names = ("weight", "bias") if frozen == "both" else (frozen,)
    for number, (layer, optimizer) in enumerate(zip(layers, optimizers, strict=True)):
        for name in names if begins_frozen else ():
            getattr(layer[0], name).requires_grad_(False)
        consequent.attach(optimizer, layer, damping=0.2, **(options if number else {}))
    x, output_grads = torch.randn(20, 6, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)
    for step in range(5):
        if step in (2, 4):
            for layer in layers:
                for name in names:
                    getattr(layer[0], name).requires_grad_(begins_frozen == (step == 2))
        if any(p.requires_grad for p in layers[0].parameters()):
            exact, averaged = (update_of(m[0], o, x, output_grads) for m, o in zip(layers, optimizers, strict=True))
            for one, other in zip(exact, averaged, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other)


def test_nan_in_the_first_batch_leaves_no_average():
    models = [network(), network()]
    steps = []
    for number, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        correction = consequent.attach(optimizer, model, refresh=10)
        bad = batches()[0]
        bad[0, 0] = torch.nan
        for x in [bad, *batches()[1:4]] if number else batches()[1:4]:
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            if x is bad:
                with pytest.warns(consequent.ConsequentWarning, match="NaN or inf"):
                    optimizer.step()
            else:
                optimizer.step()
        steps.append(correction.counters.steps)
    assert steps == [3, 4]
    assert_same(*models)


def test_a_layer_is_refreshed_at_every_tth_step_of_its_own():
    torch.manual_seed(0)
    heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).double()
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, heads, refresh=2)
    averages = correction._rewriter.averages
    seen = {0: [], 1: []}
    for step in range(8):
        x = torch.randn(9, 4, dtype=torch.float64) * (step + 1)
        optimizer.zero_grad()
        heads[step % 2](x).square().sum().backward()
        optimizer.step()
        seen[step % 2].append(averages._of[heads[step % 2].weight].moment.sum().item())
    for sums in seen.values():
        assert sums[0] == sums[1] != sums[2] == sums[3]


def averages_after(correction):
    return {name: (one["moment"].clone(), one["age"]) for name, one in correction.state_dict()["averages"].items()}


@pytest.mark.parametrize("refresh", [1, 3])
@pytest.mark.parametrize("loss_is", ["inf", "too large to square"])
def test_a_step_that_is_not_taken_leaves_the_averages_as_they_were(refresh, loss_is):
    """Neither its inputs nor the step itself counts; inputs may be finite, and their moments or gradients not."""
    model = wide_network().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    correction = consequent.attach(optimizer, model, averaging=0.5, refresh=refresh)
    good, bad = torch.randn(9, 4), torch.randn(9, 4)
    bad *= 1e25 if loss_is == "too large to square" else 1
    for number, x in enumerate([good] * refresh + [bad]):
        before = averages_after(correction)
        weights = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        (model(x).square().mean() * (torch.inf if x is bad and loss_is == "inf" else 1)).backward()
        if x is bad:
            with pytest.warns(consequent.ConsequentWarning, match="NaN or inf"):
                optimizer.step()
        else:
            optimizer.step()
        assert (number == refresh) == (x is bad)
    torch.testing.assert_close(averages_after(correction), before)
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert correction.counters.skipped == 1


@pytest.mark.parametrize("saved", [False, True])
def test_averages_go_on_in_another_type(saved):
    model, twin = network().float(), network().float().double()
    steps = []
    for net in (model, twin):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        steps.append((net, optimizer, consequent.attach(optimizer, net, averaging=0.9, refresh=2)))
    for number, x in enumerate(batches()):
        if number == 3:
            model.double()
            if saved:
                state = copy.deepcopy(steps[0][2].state_dict())
                steps[0][2].detach()
                steps[0] = (*steps[0][:2], consequent.attach(steps[0][1], model, averaging=0.9, refresh=2))
                steps[0][2].load_state_dict(state)
        for net, optimizer, _ in steps:
            optimizer.zero_grad()
            loss_of(net(x.to(net[0].weight.dtype))).backward()
            optimizer.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_a_pass_that_is_given_up_by_zeroing_data_does_not_count_between_refreshes(bias):
    """``grad.data.zero_()`` leaves no trace on the gradient."""
    found = []
    for given_up in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(4, 3, bias=bias).double()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        correction = consequent.attach(optimizer, layer, damping=0.3, refresh=4)
        for x in batches()[:4]:
            optimizer.zero_grad()
            if given_up:
                loss_of(layer(x * 2)).backward()
                for parameter in layer.parameters():
                    parameter.grad.data.zero_()
            loss_of(layer(x)).backward()
            optimizer.step()
            assert correction.samples == len(x)
        found.append([*layer.parameters()])
    torch.testing.assert_close(*found)
