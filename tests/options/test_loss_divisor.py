"""What the loss was divided by, without thinking: from the model's outputs, or from the criterion that computed it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import consequent
from consequent.options.criteria import ELEMENTWISE, OF_CLASSES, divisor_of_call

LR = 0.1


def inputs_of(cls):
    """Outputs and targets that a loss module takes."""
    torch.manual_seed(0)
    outputs = torch.randn(6, 4, dtype=torch.float64)
    if cls in OF_CLASSES:
        return (outputs.log_softmax(1), torch.tensor([0, 1, 3, 3, 1, 2]))
    targets = torch.rand(6, 4, dtype=torch.float64)
    if cls in (nn.SoftMarginLoss, nn.HingeEmbeddingLoss):
        targets = targets.round() * 2 - 1
    if cls is nn.BCELoss:
        outputs = outputs.sigmoid()
    return (outputs, targets, torch.ones_like(targets)) if cls is nn.GaussianNLLLoss else (outputs, targets)


def name_of(value):
    """The same in every process: a function's own text has its address."""
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("cls", [*ELEMENTWISE, *OF_CLASSES])
def test_times_its_divisor_a_mean_is_the_sum(cls):
    args = inputs_of(cls)
    per_target = 0.5 if cls is nn.MSELoss else 1.0  # ½‖z − t‖², whose virtual targets are the targets
    for reduction in ("mean", "sum", *(("batchmean",) if cls is nn.KLDivLoss else ())):
        criterion = cls(reduction=reduction)
        divisor = divisor_of_call(criterion, *args[:2])
        assert float(criterion(*args) * divisor) == pytest.approx(float(cls(reduction="sum")(*args) * per_target))


@pytest.mark.parametrize("cls", OF_CLASSES)
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 0.5, 2.0, 3.0], dtype=torch.float64)])
@pytest.mark.parametrize("shape", [(), (6,), (6, 5), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("ignore_index", [-100, 1])
def test_ignored_and_weighted_classes(cls, weight, shape, ignore_index):
    torch.manual_seed(1)
    outputs = torch.randn(*shape[:1], 4, *shape[1:], dtype=torch.float64).log_softmax(1 if shape else 0)
    targets = torch.randint(0, 4, shape)
    if shape:
        targets.view(-1)[0] = ignore_index
    elif ignore_index == 1:
        targets = torch.tensor(2)
    options = {"weight": weight, "ignore_index": ignore_index}
    divisor = divisor_of_call(cls(**options), outputs, targets)
    expected = cls(reduction="sum", **options)(outputs, targets)
    torch.testing.assert_close(cls(**options)(outputs, targets) * divisor, expected)


def test_targets_that_are_probabilities():
    outputs, targets = torch.randn(6, 4, 3), torch.rand(6, 4, 3).softmax(1)
    divisor = divisor_of_call(nn.CrossEntropyLoss(), outputs, targets)
    expected = nn.CrossEntropyLoss(reduction="sum")(outputs, targets)
    torch.testing.assert_close(nn.CrossEntropyLoss()(outputs, targets) * divisor, expected)


class Tagger(nn.Module):
    """Scores of 5 classes for every token."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 5)

    def forward(self, tokens):
        return self.head(self.table(tokens))


def sequences(samples=3, length=4):
    torch.manual_seed(2)
    return torch.randint(0, 7, (samples, length)), torch.randint(0, 5, (samples, length))


def divisor_of_step(model, loss_of, loss_reduction, at="step", steps=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=0.1, loss_reduction=loss_reduction, at=at)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return correction._rewriter.divisor, correction


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("mse", 24.0), (functional.mse_loss, 24.0), (functional.l1_loss, 48.0), ("tokens", 12.0), (nn.MSELoss(), 24.0)],
    ids=name_of,
)
def test_from_the_outputs(at, reduction, expected):
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    x, t = torch.randn(6, 2, 3), torch.randn(6, 2, 4)
    criterion = reduction if isinstance(reduction, nn.Module) else nn.MSELoss()
    divisor, correction = divisor_of_step(model, lambda m: criterion(m(x), t), reduction, at)
    assert divisor == expected
    assert correction.samples == 6


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("reduction", ["mse", functional.mse_loss, nn.MSELoss()], ids=name_of)
def test_lr_1_lands_on_the_targets_of_a_squared_error(at, reduction):
    torch.manual_seed(0)
    model = nn.Linear(40, 4).double()  # a lone layer: no container sees its outputs
    x, t = torch.randn(5, 40).double(), torch.randn(5, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    consequent.attach(optimizer, model, damping=1e-9, loss_reduction=reduction, at=at)
    criterion = reduction if isinstance(reduction, nn.Module) else functional.mse_loss
    criterion(model(x), t).backward()
    optimizer.step()
    torch.testing.assert_close(model(x), t, rtol=0, atol=1e-7)


@pytest.mark.parametrize("at", ["step", "backward"])
def test_ignored_tokens_do_not_count(at):
    x, y = sequences()
    y[0, 2:], y[2] = -100, -100
    criterion = nn.CrossEntropyLoss()
    divisor, correction = divisor_of_step(Tagger(), lambda m: criterion(m(x).mT, y), criterion, at)
    assert divisor == (y != -100).sum() == 6
    assert "divided by 6 (what CrossEntropyLoss was called with)" in repr(correction)
    assert "loss_reduction='CrossEntropyLoss()'" in repr(correction)


def test_micro_batches_add_up_and_calls_in_one_pass_do_not():
    criterion = nn.CrossEntropyLoss()
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=0.1, loss_reduction=criterion)
    for samples, ignored in ((3, 1), (2, 4)):
        x, y = sequences(samples)
        y[:, 0] = y[0, :ignored] = -100
        outputs = model(x)
        (criterion(outputs.mT, y) + criterion(outputs[:1].mT, y[:1].clamp(min=0))).backward()
        with torch.no_grad():
            criterion(model(x).mT, y.clamp(min=0))  # an evaluation
    optimizer.step()
    assert correction._rewriter.divisor == (12 - 3) + max(8 - 5, 4)
    optimizer.zero_grad()
    x, y = sequences(2)
    (criterion(model(x).mT, y) + criterion(model(x[:1]).mT, y[:1])).backward()  # two calls of the model
    optimizer.step()
    assert correction._rewriter.divisor == 8


@pytest.mark.parametrize("at", ["step", "backward"])
def test_all_targets_ignored_changes_nothing(at):
    criterion, model = nn.CrossEntropyLoss(), Tagger()
    x, y = sequences()
    before = copy.deepcopy(model.state_dict())
    divisor_of_step(model, lambda m: criterion(m(x).mT, torch.full_like(y, -100)), criterion, at)
    torch.testing.assert_close(model.state_dict(), before)


def test_logits_of_a_mapping():
    class Named(Tagger):
        def forward(self, tokens):
            return {"hidden": torch.zeros(99, 2), "logits": super().forward(tokens)}

    x, y = sequences()
    divisor, _ = divisor_of_step(Named(), lambda m: functional.cross_entropy(m(x)["logits"].mT, y), "tokens")
    assert divisor == 12


def test_a_criterion_that_is_not_called_is_told_of():
    x, y = sequences()
    criterion = nn.CrossEntropyLoss()
    for at in ("step", "backward"):
        with pytest.raises(RuntimeError, match=r"CrossEntropyLoss\(\) was not called between.*very object"):
            divisor_of_step(Tagger(), lambda m: criterion(m(x).mT, y), nn.CrossEntropyLoss(), at)


def test_classes_of_which_the_place_is_not_seen():
    x, y = sequences()
    with pytest.raises(ValueError, match=r'shape \[3, 4, 5\].*loss_reduction="tokens"'):
        divisor_of_step(Tagger(), lambda m: functional.cross_entropy(m(x).mT, y), functional.cross_entropy)
    model, targets = nn.Sequential(nn.Linear(3, 5)), torch.tensor([0, 1])
    loss = functional.cross_entropy
    assert divisor_of_step(model, lambda m: loss(m(torch.randn(2, 3)), targets), loss)[0] == 2


def test_parts_with_outputs_of_their_own():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 8)), nn.Sequential(nn.Linear(8, 4)))
    x, t = torch.randn(6, 3), torch.randn(6, 4)
    with pytest.raises(RuntimeError, match=r"went through outputs of several parts.*loss_reduction=criterion"):
        divisor_of_step(model, lambda m: functional.mse_loss(m[1](m[0](x)), t), "mse")
    criterion = nn.MSELoss()
    assert divisor_of_step(model, lambda m: criterion(m[1](m[0](x)), t), criterion)[0] == 12


class Focal(nn.CrossEntropyLoss):
    def forward(self, input, target):  # noqa: A002
        return super().forward(input, target) ** 2


@pytest.mark.parametrize(
    ("reduction", "error", "message"),
    [
        ("median", ValueError, '"mse", "tokens"'),
        (nn.CrossEntropyLoss, TypeError, "is a class: pass the loss that you call"),
        (nn.CTCLoss(), TypeError, "what it divides by is not known.*CrossEntropyLoss.*a number, or a function"),
        (Focal(), TypeError, "what it divides by is not known"),
        (nn.Linear(2, 2), TypeError, "what it divides by is not known"),
        (nn.MSELoss(reduction="none"), ValueError, "reduction='none'"),
        (functional.ctc_loss, TypeError, "must take the number of samples.*those of torch are known"),
    ],
    ids=name_of,
)
def test_what_is_not_known_is_refused(reduction, error, message):
    with pytest.raises(error, match=message):
        consequent.Consequentialism(nn.Linear(2, 2), loss_reduction=reduction)


def test_nothing_is_left_on_a_criterion():
    criterion, other, model = nn.MSELoss(), nn.L1Loss(), nn.Linear(2, 2)
    correction = consequent.Consequentialism(model, loss_reduction=criterion)
    copied = copy.deepcopy(criterion)
    copied(model(torch.randn(3, 2)), torch.randn(3, 2))
    assert correction._capture.entries.latest.loss_divisors == []  # a copy tells nobody
    correction.loss_reduction = other
    assert not criterion._forward_hooks
    assert other._forward_hooks
    correction.detach()
    assert not other._forward_hooks


def test_in_a_state_dict():
    model = nn.Linear(2, 2)
    saved = consequent.Consequentialism(model, loss_reduction="mse").state_dict()
    assert saved["loss_reduction"] == "mse"
    criterion = nn.MSELoss()
    other = consequent.Consequentialism(nn.Linear(2, 2), loss_reduction=criterion)
    assert other.state_dict()["loss_reduction"] is None  # stays as it is
    other.load_state_dict(other.state_dict())
    assert other.loss_reduction is criterion
    other.load_state_dict(saved)
    assert other.loss_reduction == "mse"
    assert not criterion._forward_hooks


@pytest.mark.parametrize("reduction", ["criterion", "mse"])
def test_in_a_compiled_model(reduction):
    torch._dynamo.reset()
    criterion, model = nn.MSELoss(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    x, t = torch.randn(6, 3), torch.randn(6, 4)
    run = torch.compile(lambda: criterion(model(x), t), backend="eager")
    divisor, _ = divisor_of_step(model, lambda m: run(), criterion if reduction == "criterion" else "mse", steps=2)
    assert divisor == 12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_count_of_targets_arrives():
    criterion, model = nn.CrossEntropyLoss(), Tagger().cuda()
    x, y = (t.cuda() for t in sequences())
    y[0] = -100
    divisor, _ = divisor_of_step(model, lambda m: criterion(m(x).mT, y), criterion, steps=3)
    assert divisor == 8
