"""Several optimisers attached at once: a layer's weight may lie in one and its bias in another.

They are compared with one optimiser that holds all parameters, and with the naive reference.
"""

import copy

import pytest
import torch
from torch import nn

import consequent
from models.expected import (
    check_same,
    check_same_grads,
    corrected_gradients,
    expected_backward,
    half_squares,
    twin_of,
    watching,
)

LRS = (0.1, 0.02)
MODES = ["step", "backward"]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double()


def inputs(samples, seed=0):
    """Few samples are solved on the sample side, many on the feature side."""
    return torch.randn(samples, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def matrices_and_rest(model):
    """As Muon wants them: matrices, and all else."""
    return [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim != 2]


def two_optimizers(model, kinds=(torch.optim.SGD, torch.optim.SGD), lrs=LRS, **options):
    return [kind(part, lr=lr, **options) for kind, part, lr in zip(kinds, matrices_and_rest(model), lrs, strict=True)]


def one_optimizer(model, lrs=LRS):
    return torch.optim.SGD([{"params": part, "lr": lr} for part, lr in zip(matrices_and_rest(model), lrs, strict=True)])


def zero_all(optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()


def step_once(model, x, optimizer):
    half_squares(model(x)).backward()
    optimizer.step()


# ---- the update -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", MODES)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["weights first", "biases first"])
@pytest.mark.parametrize("samples", [3, 20])
def test_weights_and_biases_are_corrected_jointly(samples, order, at):
    model = make_model()
    twin, third = twin_of(model), twin_of(model)
    optimizers = two_optimizers(model)
    correction = consequent.attach(optimizers, model, at=at)
    naive = two_optimizers(twin)
    single = one_optimizer(third)
    consequent.attach(single, third, at=at)
    for number in range(3):
        x = inputs(samples, number)
        zero_all([*optimizers, *naive, single])
        half_squares(model(x)).backward()
        half_squares(third(x)).backward()
        expected_backward(twin, lambda m, x=x: half_squares(m(x)), samples)
        for place in order:
            optimizers[place].step()
            naive[place].step()
        single.step()
        check_same_grads(model, twin)
    check_same(model, twin)
    check_same(model, third, rtol=1e-12, atol=1e-14)
    assert correction.counters.steps == 3  # corrected once, not once for each optimiser


@pytest.mark.parametrize("kinds", [(torch.optim.Adam, torch.optim.RMSprop), (torch.optim.SGD, torch.optim.AdamW)])
def test_optimizers_of_different_kinds(kinds):
    model = make_model()
    twin = twin_of(model)
    optimizers, naive = two_optimizers(model, kinds), two_optimizers(twin, kinds)
    consequent.attach(tuple(optimizers), model)
    for number in range(3):
        x = inputs(4, number)
        zero_all([*optimizers, *naive])
        half_squares(model(x)).backward()
        expected_backward(twin, lambda m, x=x: half_squares(m(x)), 4)
        for optimizer in (*optimizers, *naive):
            optimizer.step()
    check_same(model, twin)


def test_layers_that_lie_in_one_of_them_as_a_whole():
    """Hidden matrices in one, the first layer, the head and all biases in the other: as one uses Muon."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    twin = twin_of(model)

    def split(m):
        hidden = [m[2].weight]
        return hidden, [p for p in m.parameters() if p is not hidden[0]]

    optimizers, naive = ([torch.optim.SGD(part, lr=0.1) for part in split(m)] for m in (model, twin))
    correction = consequent.attach(optimizers, model)
    x = inputs(7)
    half_squares(model(x)).backward()
    expected_backward(twin, lambda m: half_squares(m(x)), 7)
    for optimizer in (*optimizers, *naive):
        optimizer.step()
    check_same(model, twin)
    assert list(correction.corrected) == ["0", "2", "4"]


@pytest.mark.parametrize("at", MODES)
def test_the_damping_of_the_weights_group_counts(at):
    model = make_model()
    twin = twin_of(model)
    weights, rest = matrices_and_rest(model)
    optimizers = [
        torch.optim.SGD([{"params": weights, "damping": 0.7}], lr=0.1),
        torch.optim.SGD([{"params": rest, "relative_damping": 3.0}], lr=0.1),
    ]
    consequent.attach(optimizers, model, damping=0.01, at=at)
    x = inputs(4)
    half_squares(model(x)).backward()
    for optimizer in optimizers:
        optimizer.step()
    expected_backward(twin, lambda m: half_squares(m(x)), 4, damping=0.7)
    check_same_grads(model, twin)


def test_averaged_moments():
    """Between refreshes nothing is looked at but the gradients: still one correction for both."""
    model = make_model()
    twin = twin_of(model)
    optimizers, single = two_optimizers(model), one_optimizer(twin)
    for optimizer, m in ((optimizers, model), (single, twin)):
        consequent.attach(optimizer, m, averaging=0.9, refresh=2)
    for number in range(5):
        zero_all([*optimizers, single])
        for m in (model, twin):
            half_squares(m(inputs(20, number))).backward()
        for optimizer in (*optimizers, single):
            optimizer.step()
    check_same(model, twin, rtol=1e-12, atol=1e-14)


# ---- loops ----------------------------------------------------------------------------------------------------------


def test_each_zeroes_its_gradients_straight_after_its_step():
    model = make_model()
    twin = twin_of(model)
    optimizers, naive = two_optimizers(model), two_optimizers(twin)
    consequent.attach(optimizers, model)
    for number in range(3):
        x = inputs(4, number)
        half_squares(model(x)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number > 0)
        twin.zero_grad()
        expected_backward(twin, lambda m, x=x: half_squares(m(x)), 4)
        for optimizer in naive:
            optimizer.step()
    check_same(model, twin)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("at", MODES)
def test_only_one_of_them_steps_for_a_while(at, who):
    """All gradients are thrown away at every step, so that nothing accumulates."""
    model = make_model()
    twin = twin_of(model)
    optimizers, naive = two_optimizers(model), two_optimizers(twin)
    consequent.attach(optimizers, model, at=at)
    for number in range(4):
        x = inputs(4, number)
        model.zero_grad()
        twin.zero_grad()
        half_squares(model(x)).backward()
        expected_backward(twin, lambda m, x=x: half_squares(m(x)), 4)
        for place in (0, 1):
            if place == who or number == 3:
                optimizers[place].step()
                naive[place].step()
    check_same(model, twin)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("samples", [3, 20])
def test_a_gradient_that_accumulates_on_a_corrected_one_is_refused(samples, who):
    """One steps and zeroes its own at every pass, the other goes on accumulating."""
    model = make_model()
    optimizers = two_optimizers(model)
    consequent.attach(optimizers, model)
    half_squares(model(inputs(samples))).backward()
    optimizers[who].step()
    optimizers[who].zero_grad()
    half_squares(model(inputs(samples, 1))).backward()
    before = twin_of(model)
    with pytest.raises(RuntimeError, match=r"layer '\d'.*corrected already.*zero_grad\(\) of every optimiser"):
        optimizers[who].step()
    check_same(model, before, rtol=0, atol=0)


@pytest.mark.parametrize("who", [0, 1])
def test_one_accumulates_while_the_other_steps_in_the_backward_pass(who):
    """What is refused above is natural here: every pass is corrected by itself."""
    model = make_model()
    twin = twin_of(model)
    optimizers, naive = two_optimizers(model), two_optimizers(twin)
    consequent.attach(optimizers, model, at="backward")
    parts = matrices_and_rest(twin)
    accumulated = [torch.zeros_like(p) for p in parts[1 - who]]
    for number in range(2):
        x = inputs(4, number)
        half_squares(model(x)).backward()
        twin.zero_grad()
        expected_backward(twin, lambda m, x=x: half_squares(m(x)), 4)
        for place, p in enumerate(parts[1 - who]):
            accumulated[place] += p.grad
        for those in (optimizers, naive):
            those[who].step()
            those[who].zero_grad()
    optimizers[1 - who].step()
    for p, gradient in zip(parts[1 - who], accumulated, strict=True):
        p.grad = gradient
    naive[1 - who].step()
    check_same(model, twin)


@pytest.mark.parametrize("to_none", [True, False], ids=["None", "zeros"])
@pytest.mark.parametrize("who", [0, 1], ids=["weights", "biases"])
@pytest.mark.parametrize("samples", [2, 20])
def test_only_one_is_zeroed_between_micro_batches(samples, who, to_none):
    model = make_model()
    optimizers = two_optimizers(model)
    consequent.attach(optimizers, model)
    half_squares(model(inputs(samples))).backward()
    optimizers[who].zero_grad(set_to_none=to_none)
    half_squares(model(inputs(samples, 1))).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="layer '3': between two backward passes some of its gradients were emptied"):
        optimizers[0].step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    zero_all(optimizers)  # and then it goes on
    step_once(model, inputs(samples), optimizers[0])


@pytest.mark.parametrize("sizes", [(2, 1), (20, 3), (2, 9)])
def test_micro_batches(sizes):
    model = make_model()
    twin = twin_of(model)
    optimizers, naive = two_optimizers(model), two_optimizers(twin)
    consequent.attach(optimizers, model)
    total = sum(sizes)
    parts = [inputs(size, size) for size in sizes]

    def loss(m, x):
        return half_squares(m(x)) * len(x) / total

    for x in parts:
        loss(model, x).backward()
    for optimizer in optimizers:
        optimizer.step()
    with watching(twin) as calls:
        sum(loss(twin, x) for x in parts).backward()
    for parameter, gradient in corrected_gradients(calls).items():
        parameter.grad = torch.as_tensor(gradient * total)
    for optimizer in naive:
        optimizer.step()
    check_same(model, twin)


def test_a_closure_of_the_first():
    model = make_model()
    twin = twin_of(model)
    optimizers, naive = two_optimizers(model), two_optimizers(twin)
    consequent.attach(optimizers, model)
    for number in range(2):
        x = inputs(4, number)

        def closure(x=x):
            zero_all(optimizers)
            loss = half_squares(model(x))
            loss.backward()
            return loss

        assert optimizers[0].step(closure) > 0
        optimizers[1].step()
        zero_all(naive)
        expected_backward(twin, lambda m, x=x: half_squares(m(x)), 4)
        for optimizer in naive:
            optimizer.step()
    check_same(model, twin)


def test_corrected_by_hand_and_clipped():
    model = make_model()
    twin = twin_of(model)
    optimizers, naive = two_optimizers(model), two_optimizers(twin)
    correction = consequent.attach(optimizers, model)
    x = inputs(4)
    half_squares(model(x)).backward()
    correction.step()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected_backward(twin, lambda m: half_squares(m(x)), 4)
    nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    for optimizer in (*optimizers, *naive):
        optimizer.step()
    check_same(model, twin)


@pytest.mark.parametrize("at", MODES)
def test_an_optimizer_for_each_parameter_that_steps_in_the_backward_pass(at):
    """torch's recipe to save memory; at the step there is no joint correction of what is not there yet."""
    model = make_model()
    twin = twin_of(model)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    consequent.attach(list(optimizers.values()), model, at=at)

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    loss = half_squares(model(inputs(4)))
    if at == "step":
        with pytest.raises(RuntimeError, match=r'midst of a backward pass.*at="backward"'):
            loss.backward()
        check_same(model, twin, rtol=0, atol=0)
        return
    loss.backward()
    expected_backward(twin, lambda m: half_squares(m(inputs(4))), 4)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    check_same(model, twin)


# ---- gradients that were scaled by different numbers ----------------------------------------------------------------


@pytest.mark.parametrize("samples", [3, 20])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["weights first", "biases first"])
@pytest.mark.parametrize("unscaled", ["none", "first", "second", "both"])
@pytest.mark.parametrize("at", MODES)
def test_a_scaler_that_unscales_one_after_the_other(samples, order, unscaled, at):
    model = make_model()
    twin = twin_of(model)
    optimizers, naive = two_optimizers(model), two_optimizers(twin)
    correction = consequent.attach(optimizers, model, at=at)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16 / 3)
    for number in range(2):
        x = inputs(samples, number)
        zero_all([*optimizers, *naive])
        scaler.scale(half_squares(model(x))).backward()
        for place in {"none": (), "first": order[:1], "second": order[1:], "both": order}[unscaled]:
            scaler.unscale_(optimizers[place])
        for place in order:
            scaler.step(optimizers[place])
        scaler.update()
        expected_backward(twin, lambda m, x=x: half_squares(m(x)), samples)
        for optimizer in naive:
            optimizer.step()
    check_same(model, twin)
    assert correction.counters.edited == 0


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("samples", [50, 400])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)], ids=str)
def test_a_scaler_with_rounded_gradients(dtype, tolerance, samples, waits, monkeypatch):
    """What one optimiser would do with all parameters; also as on a GPU, where nobody looks at the numbers."""
    if not waits:
        monkeypatch.setattr("consequent.capture.separate_scales.answers_at_once", lambda tensor: False)
    torch.manual_seed(0)
    model = nn.Linear(300, 100, dtype=dtype)
    twin = twin_of(model)
    optimizers, single = two_optimizers(model, lrs=(0.1, 0.1)), one_optimizer(twin, lrs=(0.1, 0.1))
    for optimizer, m in ((optimizers, model), (single, twin)):
        consequent.attach(optimizer, m)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16 / 3)
    x = torch.randn(samples, 300, dtype=dtype)
    scaler.scale(half_squares(model(x))).backward()
    half_squares(twin(x)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    single.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= tolerance * q.grad.norm()


@pytest.mark.parametrize("fused", [(True, False), (False, True), (True, True)])
def test_a_scaler_with_fused_optimizers(fused):
    model = make_model()
    twin = twin_of(model)
    optimizers = [
        torch.optim.SGD(part, lr=lr, fused=is_fused)
        for part, lr, is_fused in zip(matrices_and_rest(model), LRS, fused, strict=True)
    ]
    naive = two_optimizers(twin)
    correction = consequent.attach(optimizers, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = inputs(20)
    scaler.scale(half_squares(model(x))).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    expected_backward(twin, lambda m: half_squares(m(x)), 20)
    for optimizer in naive:
        optimizer.step()
    check_same(model, twin)
    assert correction.counters.edited == 0


@pytest.mark.parametrize("are_groups", [False, True], ids=["optimisers", "groups"])
@pytest.mark.parametrize("samples", [3, 20])
def test_each_is_clipped_by_itself(samples, are_groups):
    """Scaling the gradients of an optimiser, or of a parameter group, by a number scales its update by it."""
    model = make_model()
    twin = twin_of(model)
    optimizers = [one_optimizer(model)] if are_groups else two_optimizers(model)
    correction = consequent.attach(optimizers, model)
    x = inputs(samples)
    half_squares(model(x)).backward()
    factors = [0.01 / nn.utils.clip_grad_norm_(part, 0.01) for part in matrices_and_rest(model)]
    for optimizer in optimizers:
        optimizer.step()
    expected_backward(twin, lambda m: half_squares(m(x)), samples)
    for part, factor in zip(matrices_and_rest(twin), factors, strict=True):
        assert factor < 0.9
        for parameter in part:
            parameter.grad *= factor
    check_same_grads(model, twin, rtol=1e-4)  # clip_grad_norm_ adds 1e-6 to the norm
    assert correction.counters.edited == 0


def test_a_penalty_is_still_told_apart():
    model = make_model()
    twin = twin_of(model)
    optimizers = two_optimizers(model)
    consequent.attach(optimizers, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    x = inputs(20)
    scaler.scale(half_squares(model(x)) + sum(p.square().sum() for p in model[0].parameters())).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    expected_backward(twin, lambda m: half_squares(m(x)), 20)
    for parameter in twin[0].parameters():
        parameter.grad += 2 * parameter.detach()
    check_same_grads(model, twin)


def test_edited_gradients_are_told_of():
    model = make_model()
    optimizers = two_optimizers(model)
    correction = consequent.attach(optimizers, model)
    half_squares(model(inputs(3))).backward()
    nn.utils.clip_grad_value_(model[0].weight, 1e-3)
    with pytest.warns(consequent.ConsequentWarning, match="not the one its inputs explain"):
        optimizers[0].step()
    assert correction.counters.edited == 1


# ---- bad numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("samples", [3, 20])
@pytest.mark.filterwarnings("ignore::consequent.ConsequentWarning")
def test_nan_skips_the_steps_of_both(samples, order):
    model = make_model()
    optimizers = two_optimizers(model, weight_decay=0.1)
    correction = consequent.attach(optimizers, model)
    before = twin_of(model)
    bad = inputs(samples)
    bad[0, 0] = torch.nan
    half_squares(model(bad)).backward()
    for place in order:
        optimizers[place].step()
        optimizers[place].zero_grad()
    check_same(model, before, rtol=0, atol=0)
    assert correction.counters.skipped == 1
    half_squares(model(inputs(samples))).backward()
    for place in order:
        optimizers[place].step()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore::consequent.ConsequentWarning")
def test_a_scaler_that_skips_one_of_them_skips_both():
    """The overflow is in the gradients of one alone; the scaler would let the other go on."""
    model = make_model()
    optimizers = two_optimizers(model)
    consequent.attach(optimizers, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = twin_of(model)
    scaler.scale(half_squares(model(inputs(20)))).backward()
    model[0].bias.grad[0] = torch.inf
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    check_same(model, before, rtol=0, atol=0)
    assert scaler.get_scale() == 128.0


# ---- attaching, looking, saving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", MODES)
def test_attached_separately_is_refused_and_leaves_no_trace(at):
    model = make_model()
    first, second = two_optimizers(model)
    correction = consequent.attach(first, model, at=at)
    with pytest.raises(RuntimeError, match=r"layer '0': its weight and its bias lie in two.*attach\(\[first_opt"):
        consequent.attach(second, model, at=at)
    assert not second._optimizer_step_pre_hooks
    correction.detach()
    consequent.attach(second, model, at=at).detach()
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("at", MODES)
def test_split_by_a_group_that_is_added_later(at):
    model = make_model()
    body = torch.optim.SGD([model[0].weight], lr=0.1)
    head = torch.optim.SGD(model[3].parameters(), lr=0.1)
    corrections = [consequent.attach(optimizer, model, at=at) for optimizer in (body, head)]
    head.add_param_group({"params": [model[0].bias]})
    for _ in range(2):  # and it goes on being refused
        with pytest.raises(RuntimeError, match="layer '0': its weight and its bias lie in two"):
            model(inputs(3))
    corrections[0].detach()
    with pytest.warns(consequent.ConsequentWarning, match="SGD holds its bias and not its weight"):
        step_once(model, inputs(3), head)


def test_a_parameter_that_is_added_to_a_second_one_later():
    model = make_model()
    first, second = two_optimizers(model)
    consequent.attach([first, second], model)
    second.add_param_group({"params": [model[3].weight]})
    for _ in range(2):
        with pytest.raises(ValueError, match="layer '3': SGD and SGD both hold"):
            model(inputs(3))


@pytest.mark.parametrize("at", MODES)
@pytest.mark.parametrize(("place", "held"), [(0, "weight and not its bias"), (1, "bias and not its weight")])
def test_one_half_of_a_layer_is_warned_of(place, held, at):
    model = make_model()
    optimizer = two_optimizers(model)[place]
    correction = consequent.attach(optimizer, model, at=at)
    assert f"; its {held.split()[-1]} is in none of the optimisers" in repr(correction)
    with pytest.warns(consequent.ConsequentWarning, match=f"layer '0': SGD holds its {held}"):
        step_once(model, inputs(3), optimizer)


def test_what_is_refused():
    model = make_model()
    first, second = two_optimizers(model)
    whole = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="empty list"):
        consequent.attach([], model)
    with pytest.raises(ValueError, match="the same SGD is there twice"):
        consequent.attach([first, first], model)
    with pytest.raises(ValueError, match=r"layer '0': SGD and Adam both hold its parameter of shape \[5, 6\]"):
        consequent.attach([first, whole], model)
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got dict"):
        consequent.attach([first, {}], model)
    with pytest.raises(TypeError, match="LBFGS"):
        consequent.attach([first, torch.optim.LBFGS(model.parameters())], model)
    with pytest.raises(ValueError, match="Adam holds no parameter"):
        consequent.attach([first, torch.optim.Adam(make_model().parameters())], model)
    with pytest.raises(ValueError, match="foresight=True looks at what one optimiser's step does"):
        consequent.attach([first, second], model, foresight=True)
    assert type(model[0]) is nn.Linear
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in (first, second, whole))


def test_one_that_holds_no_corrected_layer_is_welcome():
    """Layers without biases in one, the normalisation in the other."""
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.LayerNorm(5), nn.Linear(5, 2, bias=False)).double()
    optimizers = two_optimizers(model)
    correction = consequent.attach(optimizers, model)
    half_squares(model(inputs(4))).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert len(correction.corrected) == 2


def test_looking_and_detaching(bounded):
    model = make_model()
    first, second = two_optimizers(model, (torch.optim.SGD, torch.optim.AdamW))
    correction = consequent.attach([first, second], model)
    shown = repr(correction)
    assert "attached to SGD and AdamW" in shown
    assert "bound: off with several optimisers" in shown
    assert correction.optimizers == [first, second]
    assert correction.optimizer is first
    with pytest.raises(RuntimeError, match="already attached to SGD and AdamW"):
        correction.attach(first)
    with pytest.raises(RuntimeError, match="SGD and AdamW: attached to these layers already"):
        consequent.attach(second, model)
    first.param_groups[0]["lr"] = 1e4
    half_squares(model(inputs(4))).backward()
    first.step()
    assert correction.counters.bounded == 0
    correction.detach()
    assert not any([*o._optimizer_step_pre_hooks, *o._optimizer_step_post_hooks] for o in (first, second))
    assert type(model[0]) is nn.Linear


def test_one_that_is_thrown_away():
    """Nobody steps what it held: the other's parameters are corrected as if those stood still."""
    model = make_model()
    twin = twin_of(model)
    first, second = two_optimizers(model)
    correction = consequent.attach([first, second], model)
    del second
    assert correction.optimizers == [first]
    x = inputs(4)
    with pytest.warns(consequent.ConsequentWarning, match="SGD holds its weight and not its bias"):
        step_once(model, x, first)
    weights = set(matrices_and_rest(twin)[0])
    expected_backward(twin, lambda m: half_squares(m(x)), 4, trains=weights.__contains__)
    torch.optim.SGD(weights, lr=LRS[0]).step()
    check_same(model, twin)
    del first
    assert "thrown away" in repr(correction)
    assert type(model[0]) is nn.Linear


def test_states_are_saved_and_loaded():
    """What a run that is interrupted goes on with is what it would have gone on with."""

    def make(model):
        optimizers = two_optimizers(model, (torch.optim.SGD, torch.optim.Adam))
        return optimizers, consequent.attach(optimizers, model, relative_damping=0.3, averaging=0.9, refresh=2)

    def train(model, optimizers, numbers):
        for number in numbers:
            zero_all(optimizers)
            half_squares(model(inputs(20, number))).backward()
            for optimizer in optimizers:
                optimizer.step()

    model = make_model()
    optimizers, correction = make(model)
    train(model, optimizers, range(3))
    saved = copy.deepcopy([part.state_dict() for part in (model, *optimizers, correction)])
    train(model, optimizers, range(3, 6))
    other = make_model()
    theirs, its_correction = make(other)
    its_correction.relative_damping = 0.7
    for part, state in zip((other, *theirs, its_correction), saved, strict=True):
        part.load_state_dict(state)
    assert its_correction.relative_damping == 0.3
    train(other, theirs, range(3, 6))
    check_same(model, other, rtol=0, atol=0)
    assert its_correction.counters == correction.counters


def test_a_damping_that_is_set_is_that_of_all_groups_without_their_own():
    model = make_model()
    optimizers = two_optimizers(model)
    for optimizer, damping in zip(optimizers, (0.1, 0.3), strict=True):
        optimizer.param_groups[0]["damping"] = damping
    correction = consequent.attach(optimizers, model, damping=0.1)
    assert "damping=0.1 and damping=0.3" in repr(correction)
    correction.damping = 0.5
    assert [optimizer.param_groups[0]["damping"] for optimizer in optimizers] == [0.5, 0.3]
