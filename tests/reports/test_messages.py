"""Messages name the numbers of the step and the remedy."""

import re
import warnings

import pytest
import torch
from torch import nn

import consequent
from consequent.reports import skipped_on_device
from consequent.reports.counters import Counters
from consequent.reports.errors import StandstillError
from consequent.reports.reports import FIRST_STEPS, MOST_SKIPPED_IN_A_ROW


def start(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    return model, optimizer, consequent.attach(optimizer, model, **options)


def train(model, optimizer, factor=1.0, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(5, 3)).square().mean() * factor).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"damping": 0.5}, "step 3, lr 0.25, damping=0.5, N = 5, loss divided by 5"),
        ({"relative_damping": 0.5, "loss_reduction": "sum"}, "lr 0.25, relative_damping=0.5, N = 5, loss divided by 1"),
    ],
)
def test_nan_in_the_first_steps_names_the_numbers_and_the_remedy(options, numbers):
    model, optimizer, correction = start(**options)
    train(model, optimizer, steps=2)
    with pytest.warns(consequent.ConsequentWarning, match="NaN or inf") as caught:
        train(model, optimizer, float("nan"))
    message = str(caught[0].message)
    assert numbers in message
    assert "lower the learning rate, raise the damping, or check loss_reduction" in message
    correction.check = True
    with pytest.raises(consequent.NonFiniteError, match=r"step 4, lr 0\.25.*lower the learning rate"):
        train(model, optimizer, float("nan"))


def test_nan_late_is_rather_a_bad_batch():
    model, optimizer, correction = start()
    correction.load_state_dict({**correction.state_dict(), "counters": {"steps": FIRST_STEPS}})
    with pytest.warns(consequent.ConsequentWarning, match="Look at this batch") as caught:
        train(model, optimizer, float("nan"))
    assert "learning rate" not in str(caught[0].message)


def test_nan_in_the_backward_pass_names_them_too():
    model, optimizer, _ = start(at="backward", check=True, damping=0.5)
    with pytest.raises(consequent.NonFiniteError, match=r"backward pass 1, lr 0\.25, damping=0\.5, N = 5"):
        train(model, optimizer, float("nan"))


def test_a_run_of_skipped_steps_is_an_error():
    model, optimizer, correction = start()
    train(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", consequent.ConsequentWarning)
        train(model, optimizer, float("nan"), steps=MOST_SKIPPED_IN_A_ROW - 1)
        train(model, optimizer)  # breaks the run
        train(model, optimizer, float("nan"), steps=MOST_SKIPPED_IN_A_ROW - 1)
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(StandstillError, match=r"last 100 steps.*counters\.skipped is 199 of 201 steps"):
            train(model, optimizer, float("nan"))
    assert (correction.counters.steps, correction.counters.skipped) == (201, 199)
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    train(model, optimizer)  # and it goes on, if somebody wants to
    assert not torch.equal(model[0].weight, before[0])


def test_a_standstill_on_a_device_is_told_of_when_counters_are_read():
    _, _, correction = start()
    reports, many = correction._reports, MOST_SKIPPED_IN_A_ROW
    reports.on_device(torch.device("cpu"))[:2] = many  # as a captured graph counts
    with pytest.warns(consequent.ConsequentWarning, match=f"each of the last {many} steps, lr 0.25.*nothing is being"):
        assert correction.counters == Counters(steps=many, skipped=many)
    reports.on_device(torch.device("cpu"))[0] += 1
    assert correction.counters.steps == many + 1
    assert f"NaN or inf was met in {many} steps, which were skipped. Lower the learning rate" in repr(correction)


def skip_on_device(reports, skipped, steps):
    """Steps as a device takes them, which skips some by itself."""
    for step in range(steps):
        reports.on_device(torch.device("cpu"))[1] += step in skipped
        reports.step_taken()


def test_steps_that_a_device_has_skipped_are_told_of_without_asking():
    _, _, correction = start()
    reports, many = correction._reports, MOST_SKIPPED_IN_A_ROW
    skip_on_device(reports, {0, 1}, many)  # the first of which is there when counting begins
    with pytest.warns(consequent.ConsequentWarning, match=f"NaN or inf in 1 of {many} steps.*has put zeros"):
        skip_on_device(reports, {}, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        skip_on_device(reports, range(99), many)  # once, and these are no standstill
        skip_on_device(reports, range(many), many - 1)
    with pytest.warns(consequent.ConsequentWarning, match=f"each of the last {many} steps.*nothing is being trained"):
        skip_on_device(reports, {0}, 1)


def test_counts_that_were_loaded_are_no_skipped_steps():
    _, _, correction = start()
    reports, many = correction._reports, MOST_SKIPPED_IN_A_ROW
    skip_on_device(reports, range(many), many)
    correction.load_state_dict(correction.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        skip_on_device(reports, {}, 3 * many)


class OnItsWay:
    """A count that is there when it is let."""

    let = False

    def __init__(self, count):
        self.count = float(count)

    is_there = property(lambda self: self.let)

    def __float__(self):
        assert self.let, "waited for"
        return self.count


def test_a_count_that_is_not_there_yet_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(skipped_on_device, "Arriving", OnItsWay)
    monkeypatch.setattr(OnItsWay, "let", True)
    watch = skipped_on_device.SkippedOnDevice(every=3)
    assert watch.after_step([torch.tensor(0)]) is None
    monkeypatch.setattr(OnItsWay, "let", False)
    assert [watch.after_step([torch.tensor(2)]) for _ in range(4)] == [None] * 4
    monkeypatch.setattr(OnItsWay, "let", True)
    assert watch.after_step([torch.tensor(3)]) == 2
    assert watch.after_step([torch.tensor(3)]) == 1
    assert watch.after_step([torch.tensor(3)]) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("width", [4, 600])
def test_a_gpu_that_skips_steps_is_told_of_without_waiting(width):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model, loss_reduction=5)
    inputs, factors = torch.randn(5, 3, device="cuda"), torch.tensor([1.0, float("nan")], device="cuda")

    def train_on_gpu(steps, factor=0):
        for _ in range(steps):
            optimizer.zero_grad()
            (model(inputs).square().mean() * factors[factor]).backward()
            optimizer.step()

    train_on_gpu(3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", consequent.ConsequentWarning)
            train_on_gpu(MOST_SKIPPED_IN_A_ROW)
            assert not caught
            train_on_gpu(2 * MOST_SKIPPED_IN_A_ROW + 50, factor=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    first, second = (str(warning.message) for warning in caught)
    assert re.match(f"NaN or inf in \\d+ of {MOST_SKIPPED_IN_A_ROW} steps", first)
    assert f"each of the last {MOST_SKIPPED_IN_A_ROW} steps" in second


def test_a_scaler_s_own_steps_do_not_count_as_skipped():
    model, optimizer, correction = start()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for _ in range(MOST_SKIPPED_IN_A_ROW + 1):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(5, 3)).sum() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    assert correction.counters.skipped == 0


@pytest.mark.parametrize("at", ["step", "backward"])
def test_a_layer_replaced_after_attaching_is_listed_as_such(at):
    model, optimizer, correction = start(at=at)
    train(model, optimizer)
    assert not correction.plain
    model[2] = nn.Linear(4, 2)
    assert correction.plain["2"].startswith("replaced after attaching: add its parameters to the optimiser")
    assert list(correction.corrected) == ["0"]
    assert "    2  replaced after attaching" in repr(correction)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    train(model, optimizer)
    assert correction.plain == {}
    assert list(correction.corrected) == ["0", "2"]


def test_what_is_printed_explains_columns_and_divisor_once():
    model, optimizer, correction = start(loss_reduction="mse")
    train(model, optimizer)
    text = repr(correction)
    assert text.count("one of ones for its bias") == 1
    assert "samples at the last step: 5; its loss was taken for a sum divided by 5 (half of the elements" in text
    bare = consequent.Consequentialism(nn.Linear(2, 2, bias=False))
    assert "bias" not in repr(bare)


@pytest.mark.parametrize("export", ["export", "trace"])
def test_exporting_a_watched_model_says_what_to_do(export):
    model, _, correction = start()
    x = (torch.randn(5, 3),)

    def exported():
        return torch.export.export(model, x) if export == "export" else torch.jit.trace(model, x)

    with pytest.raises(RuntimeError, match=r"consequent watches this model.*correction\.detach\(\)"):
        exported()
    correction.detach()
    exported()
