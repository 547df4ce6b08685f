"""Several optimisers attached at once: a layer's weight may lie in one and its bias in another.

They are compared with one optimiser that holds all parameters, and with the naive reference.
"""

import copy

import pytest
import torch
from kinds import default_damping
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
from models.two_optimizers import (
    inputs,
    make_model,
    matrices_and_rest,
    one_optimizer,
    step_once,
    two_optimizers,
    zero_all,
)

MODES = ["step", "backward"]


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
        expected_backward(twin, lambda m, x=x: half_squares(m(x)), 4, default_damping(naive[0]))  # of the weights
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
