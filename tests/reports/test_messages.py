"""Messages name the numbers of the step and the remedy."""

import warnings

import pytest
import torch
from torch import nn

import consequent
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
