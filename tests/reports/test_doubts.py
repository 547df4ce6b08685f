"""An N that can hardly be what the loss was averaged over is told of once; ordinary models are left in peace."""

import functools
import gc
import re
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import consequent


def warnings_of(model, loss_of, steps=2, make=torch.optim.SGD, **options):
    optimizer = make(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model, damping=0.1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    return [str(warning.message) for warning in caught if warning.category is consequent.ConsequentWarning]


class LastState(nn.Module):
    """Of inputs [time, batch, features]: one output for each sample."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.RNN(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][-1])


class LastStep(nn.Module):
    """The same without a layer that knows which dimension is which."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(x)[-1]


class Graph(nn.Module):
    """Edges [2, edges] come first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, edges, nodes):
        return torch.zeros(len(nodes), 2).index_add(0, edges[0], self.layer(nodes)[edges[1]])


class AtATime(nn.Module):
    """One number for all samples comes first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, time, x):
        return self.layer(x) * time


class Tokens(nn.Module):
    """A vector of logits for every token."""

    def __init__(self, pick=lambda z: z):
        super().__init__()
        self.table, self.head, self.pick = nn.Embedding(7, 3), nn.Linear(3, 5), pick

    def forward(self, tokens):
        return self.pick(self.head(self.table(tokens)))


torch.manual_seed(0)
SEQUENCES, LABELS = torch.randint(0, 7, (4, 6)), torch.randint(0, 5, (4, 6))


SOME_TOKENS = rf"over all positions.* {int((LABELS != 1).sum()) / 4:g} times too short"


def cross_entropy(outputs, **options):
    return functional.cross_entropy(outputs.mT, LABELS, **options)


IMPLAUSIBLE = {
    "sequence first": (
        LastStep,
        lambda m: m(torch.randn(9, 4, 3)).square().mean(),
        r"9 samples.*\[4, 2\].* 2\.25 times too long",
    ),
    "edges first": (
        Graph,
        lambda m: m(torch.randint(0, 5, (2, 8)), torch.randn(5, 3)).square().mean(),
        r"2 samples.*\[2, 8\].*\[5, 2\]",
    ),
    "one number first": (
        AtATime,
        lambda m: m(torch.rand(1), torch.randn(5, 3)).square().mean(),
        r"1 sample,.*shape \[1\].*\[5, 2\]",
    ),
    "the tokens of one sequence": (
        Tokens,
        lambda m: functional.cross_entropy(m(SEQUENCES[:1]).mT, LABELS[:1]),
        r"1 sample,.*over all positions .* of the outputs \[1, 6, 5\].* 6 times too short",
    ),
    "flattened tokens": (
        lambda: Tokens(lambda z: z.flatten(0, 1)),
        lambda m: functional.cross_entropy(m(SEQUENCES), LABELS.flatten()),
        r"4 samples.*\[24, 5\]: if it is one over these 24, steps are 6 times too short",
    ),
    "tokens": (
        Tokens,
        lambda m: cross_entropy(m(SEQUENCES)),
        r'over all positions .* of the outputs \[4, 6, 5\].* 6 times too short.*"tokens"',
    ),
    "some tokens": (Tokens, lambda m: cross_entropy(m(SEQUENCES), ignore_index=1), SOME_TOKENS),
    "logits": (
        lambda: Tokens(lambda z: {"loss": z.sum(), "logits": z}),
        lambda m: cross_entropy(m(SEQUENCES)["logits"]),
        r"over all positions",
    ),
    "time steps of numbers": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)),
        lambda m: cross_entropy(m(torch.randn(4, 6, 3))),
        r"over all positions .* \[4, 6, 5\]",
    ),
    "pixels": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 1)),
        lambda m: functional.cross_entropy(m(torch.randn(4, 1, 6, 6)), torch.randint(0, 5, (4, 6, 6))),
        r"over all positions .* \[4, 5, 6, 6\].* 36 times too short",
    ),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", IMPLAUSIBLE)
def test_implausible_samples_are_told_of_once(name, at):
    make, loss_of, message = IMPLAUSIBLE[name]
    (said,) = warnings_of(make(), loss_of, at=at)
    assert re.search(message, said), said
    assert "loss_reduction=criterion" in said


PLAUSIBLE = {
    "images": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)),
        lambda m: m(torch.randn(5, 3, 4, 4)).square().mean(),
    ),
    "one image without a leading dimension": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()),
        lambda m: m(torch.randn(3, 4, 4)).square().mean(),
    ),
    "one grey image without a leading dimension": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()),
        lambda m: m(torch.randn(1, 4, 4)).square().mean(),
    ),
    "one sample": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Flatten(0)),
        lambda m: m(torch.randn(1, 3)).square().mean(),
    ),
    "a vector": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU()), lambda m: m(torch.randn(3)).square().mean()),
    "a lone layer": (lambda: nn.Linear(3, 4), lambda m: m(torch.randn(6, 2, 3)).square().mean()),
    "a scalar": (lambda: Tokens(lambda z: z.square().mean()), lambda m: m(SEQUENCES)),
    "the last token": (Tokens, lambda m: functional.cross_entropy(m(SEQUENCES)[:, -1], LABELS[:, -1])),
    "a sum over tokens": (Tokens, lambda m: cross_entropy(m(SEQUENCES), reduction="sum") / 4),
    "vectors for tokens, and no cross-entropy": (Tokens, lambda m: m(SEQUENCES).square().mean()),
    "pixels, and no classes": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 1)),
        lambda m: functional.mse_loss(m(torch.ones(4, 1, 6, 6)), torch.zeros(4, 1, 6, 6), reduction="sum") / 4,
    ),
    "a sum over pixels": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 1)),
        lambda m: (
            functional.cross_entropy(m(torch.randn(4, 1, 6, 6)), torch.zeros(4, 6, 6).long(), reduction="sum") / 4
        ),
    ),
    "one sequence": (Tokens, lambda m: functional.cross_entropy(m(SEQUENCES[:1, :1])[0], LABELS[0, :1])),
    "classes": (Tokens, lambda m: functional.cross_entropy(m(SEQUENCES[:, 0]), LABELS[:, 0])),
    "sequence first, in a recurrent layer": (LastState, lambda m: m(torch.randn(9, 4, 3)).square().mean()),
    "parts": (LastState, lambda m: m.head(m.recurrent(torch.randn(9, 4, 3))[0][-1]).square().mean()),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", PLAUSIBLE)
def test_ordinary_models_are_left_in_peace(name, at):
    make, loss_of = PLAUSIBLE[name]
    assert warnings_of(make(), loss_of, at=at) == []


@pytest.mark.parametrize(
    "reduction", ["tokens", "sum", 24, lambda samples: samples], ids=["tokens", "sum", "number", "function"]
)
def test_who_has_said_how_the_loss_sums_up_is_left_in_peace(reduction):
    assert warnings_of(Tokens(), lambda m: cross_entropy(m(SEQUENCES)), loss_reduction=reduction) == []


def dense(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


INPUTS, TARGETS = torch.linspace(-1, 1, 30).view(5, 6), torch.linspace(0, 1, 20).view(5, 4)
ELEMENTS = (
    r"over 5 samples.*; but it is one over all elements of the outputs \[5, 4\], and steps are 4 times too short.*, of "
    r"squares without a ½ 2 times: say loss_reduction=criterion"
)
MEANS_OVER_ELEMENTS = {
    "mse": lambda model: functional.mse_loss(model(INPUTS), TARGETS),
    "module": lambda model: nn.MSELoss()(model(INPUTS), TARGETS),
    "smooth-l1": lambda model: functional.smooth_l1_loss(model(INPUTS), TARGETS),
    "huber": lambda model: functional.huber_loss(model(INPUTS), TARGETS),
    "many-labels": lambda model: functional.binary_cross_entropy_with_logits(model(INPUTS), TARGETS),
    "flat": lambda model: functional.mse_loss(model(INPUTS).view(-1), TARGETS.view(-1)),
    "in-another-type": lambda model: functional.mse_loss(model(INPUTS).double(), TARGETS.double()),
    "targets-first": lambda model: functional.mse_loss(TARGETS, model(INPUTS)),
    "a-part": lambda model: functional.mse_loss(model(INPUTS), TARGETS) / 4 + model[0].weight.square().sum(),
}
OTHER_LOSSES = {
    "sum": lambda model: functional.mse_loss(model(INPUTS), TARGETS, reduction="sum") / 5,
    "by-hand": lambda model: (model(INPUTS) - TARGETS).square().sum(1).mean(),
    "gathered": lambda model: functional.mse_loss(model(INPUTS)[:, 1], TARGETS[:, 1]),
    "classes": lambda model: functional.cross_entropy(model(INPUTS), torch.arange(5) % 4),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", MEANS_OVER_ELEMENTS)
def test_a_mean_over_all_elements_is_told_of_once(name, at):
    (message,) = warnings_of(dense(4), MEANS_OVER_ELEMENTS[name], at=at)
    assert re.search(ELEMENTS, message)
    assert warnings_of(dense(4), MEANS_OVER_ELEMENTS[name], at=at, loss_reduction="mse") == []


def test_so_is_one_of_outputs_that_the_model_itself_has_reshaped():
    model = nn.Sequential(dense(4), nn.Unflatten(1, (2, 2)))
    (message,) = warnings_of(model, lambda model: functional.mse_loss(model(INPUTS), TARGETS.view(5, 2, 2)))
    assert "all elements of the outputs [5, 2, 2]" in message


def test_looking_for_it_keeps_nothing_alive():
    model = dense(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model)
    gc.disable()
    try:
        loss = functional.mse_loss(model(INPUTS), TARGETS)
        held = weakref.ref(loss)
        loss.backward()
        del loss
        assert held() is None
    finally:
        gc.enable()


def test_so_is_a_mean_over_all_pixels():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 1))
    images = torch.ones(4, 1, 6, 6)
    (message,) = warnings_of(model, lambda model: functional.mse_loss(model(images), images))
    assert "all elements of the outputs [4, 1, 6, 6]" in message


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_other_losses_of_several_numbers_a_sample_are_left_in_peace(name):
    assert warnings_of(dense(4), OTHER_LOSSES[name]) == []


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_mean_over_one_or_two_numbers_a_sample_is_nearly_one_over_samples(outputs):
    assert warnings_of(dense(outputs), lambda model: functional.mse_loss(model(INPUTS), TARGETS[:, :outputs])) == []


# ---- sums -----------------------------------------------------------------------------------------------------------

CLASSES = torch.arange(5) % 4
SUMMED = r"over 5 samples.*; but it is a sum over them.*5 times too long.*loss_reduction=\"sum\""


def of_classes(outputs, **options):
    return functional.cross_entropy(outputs, CLASSES, **options)


def focal(outputs):
    each = of_classes(outputs, reduction="none")
    return (1 - torch.exp(-each)).square() * each


def probabilities():
    return TARGETS / TARGETS.sum(1, keepdim=True)


SUMS = {
    "cross-entropy": lambda z: of_classes(z, reduction="sum"),
    "module": lambda z: nn.CrossEntropyLoss(reduction="sum")(z, CLASSES),
    "none-then-sum": lambda z: of_classes(z, reduction="none").sum(),
    "smoothed": lambda z: of_classes(z, reduction="sum", label_smoothing=0.1),
    "smoothed-and-weighted": lambda z: of_classes(z, reduction="sum", label_smoothing=0.1, weight=torch.ones(4)),
    "class-weights": lambda z: of_classes(z, reduction="sum", weight=torch.arange(1.0, 5.0)),
    "probabilities": lambda z: functional.cross_entropy(z, probabilities(), reduction="sum"),
    "nll": lambda z: functional.nll_loss(z.log_softmax(1), CLASSES, reduction="sum"),
    "by-hand": lambda z: -z.log_softmax(1).gather(1, CLASSES[:, None]).sum(),
    "by-index": lambda z: -z.log_softmax(1)[torch.arange(5), CLASSES].sum(0),
    "focal": lambda z: focal(z).sum(),
    "mse": lambda z: functional.mse_loss(z, TARGETS, reduction="sum"),
    "mse-none": lambda z: functional.mse_loss(z, TARGETS, reduction="none").sum(1).sum(),
    "squares-by-hand": lambda z: ((z - TARGETS) ** 2).sum(),
    "l1": lambda z: functional.l1_loss(z, TARGETS, reduction="sum"),
    "huber": lambda z: functional.huber_loss(z, TARGETS, reduction="sum"),
    "bce": lambda z: functional.binary_cross_entropy(z.sigmoid(), TARGETS, reduction="sum"),
    "bce-with-logits": lambda z: functional.binary_cross_entropy_with_logits(z, TARGETS, reduction="sum"),
    "kl": lambda z: functional.kl_div(z.log_softmax(1), probabilities(), reduction="sum"),
    "poisson": lambda z: functional.poisson_nll_loss(z, TARGETS, reduction="sum"),
    "margins": lambda z: functional.multi_margin_loss(z, CLASSES, reduction="sum"),
    "and-a-penalty": lambda z: of_classes(z, reduction="sum") + 0.001 * z.square().sum(),
    "ignored": lambda z: functional.cross_entropy(z, CLASSES, reduction="sum", ignore_index=1),
    "many-ways": lambda z: functools.reduce(lambda ones, _: ones * ones, range(24), z - z.detach() + 1).sum(),
}
NO_SUMS = {
    "mean": of_classes,
    "divided": lambda z: of_classes(z, reduction="sum") / 5,
    "divided-in-place": lambda z: of_classes(z, reduction="sum").div_(5),
    "multiplied": lambda z: of_classes(z, reduction="sum") * 0.2,
    "multiplied-from-the-left": lambda z: 0.2 * of_classes(z, reduction="sum"),
    "divided-by-a-tensor": lambda z: of_classes(z, reduction="none").sum() / torch.tensor(5),
    "divided-before": lambda z: (of_classes(z, reduction="none") / 5).sum(),
    "by-normalised-weights": lambda z: (torch.full((5,), 0.2) * of_classes(z, reduction="none")).sum(),
    "focal-by-weights": lambda z: (torch.full((5,), 0.2) * focal(z)).sum(),
    "focal-by-inner-weights": lambda z: ((0.2 * focal(z)) * of_classes(z, reduction="none")).sum(),
    "smoothed": lambda z: of_classes(z, reduction="sum", label_smoothing=0.1) / 5,
    "multiplied-by-torch": lambda z: of_classes(z, reduction="sum", label_smoothing=0.6),  # by 0.4, and may be by 0.2
    "smoothed-mean": lambda z: of_classes(z, label_smoothing=0.1),
    "probabilities": lambda z: functional.cross_entropy(z, probabilities()),
    "means-of-heads": lambda z: torch.stack([of_classes(z[:, :4]), z.square().sum(1).mean()]).sum(),
    "a-sum-over-outputs": lambda z: functional.mse_loss(z, TARGETS, reduction="none").sum(1).mean(),
    "a-mean-over-samples": lambda z: functional.mse_loss(z, TARGETS, reduction="none").mean(0).sum(),
    "of-a-mean": lambda z: functional.mse_loss(z.mean(0), TARGETS.mean(0), reduction="sum"),
    "batchmean": lambda z: functional.kl_div(z.log_softmax(1), probabilities(), reduction="batchmean"),
    "a-penalty": lambda z: of_classes(z) + 0.001 * z.square().sum(),
    "no-targets": lambda z: z.square().sum(),
    "similarities": lambda z: functional.cross_entropy(z @ z.T, torch.arange(5).roll(1), reduction="sum"),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_samples_is_told_of_once(name, at):
    (message,) = warnings_of(dense(4), lambda model: SUMS[name](model(INPUTS)), at=at)
    assert re.search(SUMMED, message), message
    assert "loss_reduction=criterion" in message
    assert warnings_of(dense(4), lambda model: SUMS[name](model(INPUTS)), at=at, loss_reduction="sum") == []


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", NO_SUMS)
def test_who_divides_a_sum_is_left_in_peace(name, at):
    assert warnings_of(dense(4), lambda model: NO_SUMS[name](model(INPUTS)), at=at) == []


def test_a_sum_over_one_sample_is_its_mean():
    assert warnings_of(dense(4), lambda m: functional.mse_loss(m(INPUTS[:1]), TARGETS[:1], reduction="sum")) == []


def test_a_sum_over_tokens_is_told_of():
    (message,) = warnings_of(Tokens(), lambda m: cross_entropy(m(SEQUENCES), reduction="sum"))
    assert "a sum over them" in message


def test_who_gives_a_gradient_to_backward_may_have_divided_by_it():
    model = dense(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model)
    of_classes(model(INPUTS), reduction="sum").backward(torch.tensor(0.2))
    optimizer.step()  # and a warning would be an error


def scaled_step(loss_of, *, at="step", by_hand=False, **options):
    model = dense(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model, at=at)
    scaler = torch.amp.GradScaler("cpu", **options)
    scaler.scale(loss_of(model(INPUTS))).backward()
    if by_hand:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def test_a_scaler_hides_a_sum_only_where_it_does_not_make_the_step():
    with pytest.warns(consequent.ConsequentWarning, match="a sum over them"):
        scaled_step(SUMS["cross-entropy"])
    with pytest.warns(consequent.ConsequentWarning, match="a sum over them"):
        scaled_step(SUMS["cross-entropy"], enabled=False)
    scaled_step(SUMS["cross-entropy"], by_hand=True)
    scaled_step(SUMS["cross-entropy"], at="backward")


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("name", NO_SUMS)
def test_who_divides_a_sum_that_is_scaled_is_left_in_peace(name, enabled):
    scaled_step(NO_SUMS[name], enabled=enabled)


# ---- labels that do not count ---------------------------------------------------------------------------------------

SOME = torch.tensor([0, 1, -100, 3, -100])
MASK = SOME >= 0
FEWER = {
    "ignored": lambda z: functional.cross_entropy(z, SOME),
    "module": lambda z: nn.CrossEntropyLoss()(z, SOME),
    "smoothed": lambda z: functional.cross_entropy(z, SOME, label_smoothing=0.1),
    "weights": lambda z: functional.cross_entropy(z, SOME, weight=torch.arange(1.0, 5.0)),
    "another-index-and-a-weight-of-zero": lambda z: functional.cross_entropy(
        z, SOME.clamp(min=0), weight=torch.tensor([1.0, 1, 1, 0]), ignore_index=1
    ),
    "nll": lambda z: functional.nll_loss(z.log_softmax(1), SOME),
    "scaled": lambda z: 1000 * functional.cross_entropy(z, SOME),
    "a-mask": lambda z: functional.cross_entropy(z[MASK], SOME[MASK]),
    "chosen": lambda z: functional.cross_entropy(z.index_select(0, torch.tensor([0, 1, 4])), SOME[[0, 1, 3]]),
    "a-mask-of-losses": lambda z: functional.cross_entropy(z, SOME.clamp(min=0), reduction="none")[MASK].mean(),
    "a-mask-of-numbers": lambda z: (z[:, 0] - TARGETS[:, 0])[MASK].square().mean(),
}
ALL_COUNT = {
    "classes": of_classes,
    "divided-by-all": lambda z: functional.cross_entropy(z, SOME, reduction="sum") / 5,
    "a-mask-divided-by-all": lambda z: (functional.cross_entropy(z, CLASSES, reduction="none") * MASK).sum() / 5,
    "class-weights": lambda z: of_classes(z, weight=torch.arange(1.0, 5.0)),
    "satisfied-margins": lambda z: functional.relu(-9 - z[torch.arange(5), CLASSES]).mean() + 0 * z.sum(),
    "chosen-outputs": lambda z: functional.mse_loss(z[torch.arange(5), CLASSES], TARGETS[:, 0]),
    "none-counts": lambda z: 0 * z.sum() + functional.cross_entropy(z, torch.full((5,), -100)).nan_to_num(),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", FEWER)
def test_labels_that_are_ignored_or_left_out_are_told_of_once(name, at):
    (message,) = warnings_of(dense(4), lambda model: FEWER[name](model(INPUTS)), at=at)
    assert re.search(r"mean over 5 samples.*; but it is one over 3 of them only.*loss_reduction=criterion", message)
    assert "steps are 1.67 times too long" in message
    assert warnings_of(dense(4), lambda model: FEWER[name](model(INPUTS)), at=at, loss_reduction=3) == []


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", ALL_COUNT)
def test_where_all_labels_count_nothing_is_said(name, at):
    assert warnings_of(dense(4), lambda model: ALL_COUNT[name](model(INPUTS)), at=at) == []


@pytest.mark.parametrize("flat", [True, False])
def test_tokens_that_are_ignored_are_told_of(flat):
    labels = LABELS.clone()
    labels[:, 4:] = -100

    def loss_of(model, labels=labels):
        outputs = model(SEQUENCES)
        if flat:
            return functional.cross_entropy(outputs.view(-1, 5), labels.view(-1))
        return functional.cross_entropy(outputs.mT, labels)

    (message,) = warnings_of(Tokens(), loss_of, loss_reduction="tokens")
    assert re.search(r"all 24 positions of the outputs \[4, 6, 5\]; but it is one over 16 of them only", message)
    assert "steps are 1.5 times too long" in message
    assert "loss_reduction=criterion" in message
    assert warnings_of(Tokens(), lambda m: loss_of(m, LABELS), loss_reduction="tokens") == []
    for some in (LABELS[:, -1:], LABELS[:1, -2:]):  # where the next token is the label the last has none; and a few
        few = LABELS.clone()
        few[: len(some), -some.size(1) :] = -100
        assert warnings_of(Tokens(), lambda m, few=few: loss_of(m, few), loss_reduction="tokens") == []


def test_so_are_labels_where_the_function_was_given():
    loss_of = FEWER["ignored"]
    (message,) = warnings_of(dense(4), lambda m: loss_of(m(INPUTS)), loss_reduction=functional.cross_entropy)
    assert "all 5 positions of the outputs [5, 4]; but it is one over 3 of them only" in message


def test_a_criterion_that_was_given_counts_itself():
    criterion = nn.CrossEntropyLoss()
    assert warnings_of(dense(4), lambda m: criterion(m(INPUTS), SOME), loss_reduction=criterion) == []


def test_in_float16_a_gradient_of_zero_may_be_rounding():
    model = nn.Sequential(dense(4), Halved())
    assert warnings_of(model, lambda m: functional.cross_entropy(m(INPUTS).float(), SOME)) == []


class Halved(nn.Module):
    def forward(self, x):
        return x.half()


# ---- means by hand --------------------------------------------------------------------------------------------------

MEANS_BY_HAND = {
    "squares": lambda z: ((z - TARGETS) ** 2).mean(),
    "absolute": lambda z: (z - TARGETS).abs().mean(),
    "l1": lambda z: functional.l1_loss(z, TARGETS),
    "of-none": lambda z: functional.binary_cross_entropy_with_logits(z, TARGETS, reduction="none").mean(),
    "poisson": lambda z: functional.poisson_nll_loss(z, TARGETS),
}
OTHER_MEANS_BY_HAND = {
    "of-sums": lambda z: (z - TARGETS).square().sum(1).mean(),
    "multiplied": lambda z: 4 * (z - TARGETS).square().mean(),
    "weighted": lambda z: (TARGETS * (z - TARGETS).square()).mean(),
    "no-targets": lambda z: z.square().mean(),
    "one-output": lambda z: (z[:, :1] - TARGETS[:, :1]).square().mean(),
    "mixed": lambda z: (z @ z.T - torch.eye(5)).square().mean(),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("name", MEANS_BY_HAND)
def test_a_mean_over_all_elements_by_hand_is_told_of(name, at):
    (message,) = warnings_of(dense(4), lambda model: MEANS_BY_HAND[name](model(INPUTS)), at=at)
    assert re.search(ELEMENTS, message)


@pytest.mark.parametrize("name", OTHER_MEANS_BY_HAND)
def test_other_means_by_hand_are_left_in_peace(name):
    assert warnings_of(dense(4), lambda model: OTHER_MEANS_BY_HAND[name](model(INPUTS))) == []


# ---- where it does not matter ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "count"), [(torch.optim.SGD, 1), (torch.optim.Adam, 0), (torch.optim.AdamW, 0), (torch.optim.RMSprop, 0)]
)
def test_optimisers_whose_steps_have_their_own_length_are_left_in_peace(make, count):
    model, inputs, labels = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), torch.randn(8, 4), torch.arange(8) % 3
    told = warnings_of(model, lambda m: functional.cross_entropy(m(inputs), labels, reduction="sum"), make=make)
    assert len(told) == count
