"""`consequent train` with one's own model and data, schedules, decay, augmentation, seeds, a search, Ctrl-C."""

import os
import signal
import threading
from dataclasses import replace

import pytest
import torch
from test_trainer import Killed, assert_same, killer, lines, run
from torch import nn

import consequent
from consequent_lab import cli, trainer
from consequent_lab.augmentation import augmented
from consequent_lab.configured import ConfiguredLearner, build_optimizer
from consequent_lab.learner import order_of
from consequent_lab.own_code import own_data
from consequent_lab.runs import RunFolder
from consequent_lab.schedules import rate_factor
from consequent_lab.train_command import Train
from consequent_lab.train_config import TrainConfig
from consequent_lab.trainer import train

OWN = TrainConfig(
    dataset="own_network:tensors", model="own_network:model", batch_size=16, iterations=24, log_every=4,
    evaluate_every=8, checkpoint_every=5,
)  # fmt: skip


def command(path, *options):
    return ["train", "--runs", str(path), "--device", "cpu", "--batch-size", "16", "--epochs", "5", *options]


# ---- one's own model and data ------------------------------------------------------------------------------------


def test_tensors_and_datasets_train_alike_and_learn(tmp_path):
    folders = [run(replace(OWN, dataset=f"own_network:{name}"), tmp_path / name) for name in ("tensors", "datasets")]
    assert lines(folders[0]) == lines(folders[1])
    first, last = folders[0].metrics()[0], folders[0].metrics()[-1]
    assert last["train_loss"] < 0.7 * first["train_loss"]
    assert last["test_accuracy"] > 0.5


def test_numbers_are_learnt_by_half_the_squared_error(tmp_path):
    config = replace(OWN, dataset="own_network:numbers", gradient_norms="none")
    [*_, last] = run(config, tmp_path / "run").metrics()
    assert not any(name.endswith("accuracy") or name == "forgotten" for name in last)
    import own_network

    inputs, targets, *_ = own_network.numbers()
    torch.manual_seed(0)
    model = own_network.model((6,), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model)
    for iteration in range(24):
        epoch, place = divmod(iteration, 4)
        batch = order_of(64, 16, 0, epoch)[16 * place : 16 * (place + 1)]
        optimizer.zero_grad()
        (0.5 * (model(inputs[batch]) - targets[batch]).square().sum(1)).mean().backward()
        optimizer.step()
    assert last["train_loss"] == pytest.approx(0.5 * (model(inputs) - targets).square().mean().item(), rel=1e-4)


@pytest.mark.parametrize("model", ["mlp", "resnet20", "own_network:model"])
def test_images_of_ones_own_are_normalised_and_fit_every_model(tmp_path, model):
    config = replace(OWN, dataset="own_network:images", model=model, hidden=(8,), widths=(4,), blocks=1, iterations=2)
    assert run(config, tmp_path / "run").metrics()[-1]["test_loss"] < 50  # of bytes it would be far more


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "nowhere:model"}, r"--model nowhere:model: there is no module 'nowhere'.*PYTHONPATH"),
        ({"model": "own_network.py:model"}, "name the module and not its file, own_network:model"),
        ({"model": "own_network:missing"}, r"has no function 'missing'; it has .*model"),
        ({"model": "own_network:NOT_A_FUNCTION"}, "has no function 'NOT_A_FUNCTION'"),
        ({"model": "own_network:no_model"}, "returned a value of type int: it must return an nn.Module"),
        ({"model": "own_network:needs_more"}, r"needs \(shape, classes, depth\): it is called as function\(shape"),
        ({"model": "own_network:too_wide"}, r"makes \[2, 5\] of inputs \[2, 6\]; logits of 3 classes need a tensor of"),
        ({"dataset": "own_network:flat_numbers"}, r"makes \[2, 1\] .* a tensor of \[2\]: return targets\[:, None\]"),
        ({"model": "own_network:for_others"}, r"fails with inputs of shape \[2, 6\]"),
        ({"model": "resnet20"}, r"model resnet20 is for images .*these inputs are \[N, 6,\]"),
        ({"augment": ("flip",)}, "augment flip is for images"),
        ({"dataset": "own_network:three_tensors"}, "returned 3 of Tensor, Tensor, Tensor: it must return"),
        ({"dataset": "own_network:no_model"}, "returned a value of type int: it must return"),
        ({"dataset": "own_network:unequal"}, "64 training inputs and 60 targets"),
        ({"dataset": "own_network:from_one"}, r"begin at -1\. Targets that are numbers must be floats"),
        ({"dataset": "own_network:not_finite"}, "some training inputs are NaN or infinite"),
        ({"warm_up": 24}, "warm_up 24 must be less than the 24 iterations"),
    ],
)
def test_what_is_wrong_with_ones_own_is_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(replace(OWN, **options), RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run" / "config.json").exists()  # or it would be seen beside those that were trained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model": "mpl"},
            "model must be one of mlp, resnet20, resnet20-bn, or your own as module:function, got 'mpl'",
        ),
        ({"dataset": "cifar"}, "dataset must be one of digits"),
        ({"validation": 1.0}, "validation must be a fraction"),
        ({"weight_decay": -1.0}, "weight_decay must be finite and not negative"),
    ],
)
def test_senseless_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


def test_another_model_behind_the_same_name_is_refused(tmp_path, monkeypatch):
    import own_network

    with pytest.raises(Killed):
        train(OWN, RunFolder(tmp_path / "run"), watcher=killer(8))
    monkeypatch.setattr(own_network, "model", own_network.fixed)
    with pytest.raises(ValueError, match="the checkpoint is of another model than own_network:model is now"):
        train(OWN, RunFolder(tmp_path / "run"))


# ---- schedules, decay, augmentation ------------------------------------------------------------------------------


def test_the_schedule_is_what_the_optimiser_gets(tmp_path, monkeypatch):
    config = replace(OWN, schedule="cosine", warm_up=4, head_lr_factor=0.5, log_every=1, consequentialist=False)
    seen = []
    step = torch.optim.SGD.step

    def noted(self, *arguments, **keywords):
        seen.append([group["lr"] for group in self.param_groups])
        return step(self, *arguments, **keywords)

    monkeypatch.setattr(torch.optim.SGD, "step", noted)
    found = run(config, tmp_path / "run").metrics()
    steps = [rates for rates in seen if any(rates)]  # without those that only look
    expected = [0.1 * rate_factor(config, iteration, 24) for iteration in range(24)]
    assert [body for body, _ in steps] == pytest.approx(expected)
    assert [head for _, head in steps] == pytest.approx([rate / 2 for rate in expected])
    assert [line["lr"] for line in found[1:]] == pytest.approx(expected)
    assert expected[3] == pytest.approx(0.1)
    assert expected[-1] < 0.001


def test_weight_decay_shrinks_weights_beside_the_correction():
    """Whose gradients are 0 here: no more than the decay is left of a step."""
    for name in ("sgd", "adam"):
        model = nn.Linear(3, 2)
        before = model.weight.detach().clone()
        optimizer = build_optimizer(TrainConfig(optimiser=name, lr=0.1, weight_decay=0.5), model, capturable=False)
        consequent.attach(optimizer, model)
        (0 * model(torch.randn(4, 3))).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), 0.95 * before)


def test_crops_are_windows_and_flips_mirror_images():
    images = torch.arange(1.0, 129.0).reshape(2, 1, 8, 8).repeat(100, 3, 1, 1)
    generator = torch.Generator().manual_seed(0)
    flipped = augmented(images, ["flip"], generator)
    mirrored = (flipped == images.flip(3)).flatten(1).all(1)
    assert 60 < int(mirrored.sum()) < 140
    assert torch.equal(flipped[~mirrored], images[~mirrored])
    padded = torch.nn.functional.pad(images[:2], (1, 1, 1, 1))

    def windows(images, padded):
        """The places of the windows that each image is."""
        places = [(y, x) for y in range(3) for x in range(3)]
        wholes = [padded[number % 2] for number in range(len(images))]
        return [
            {(y, x) for y, x in places if torch.equal(image, whole[:, y : y + 8, x : x + 8])}
            for image, whole in zip(images, wholes, strict=True)
        ]

    seen = windows(augmented(images, ["crop"], generator), padded)
    assert all(len(places) == 1 for places in seen)
    assert len(set.union(*seen)) == 9
    both = augmented(images, ["crop", "flip"], generator)
    straight, turned = windows(both, padded), windows(both, padded.flip(3))
    assert all(len(one) + len(other) == 1 for one, other in zip(straight, turned, strict=True))


def test_cutout_covers_a_square_of_each_image():
    images = 1 + torch.rand(400, 3, 8, 12)
    covered = augmented(images, ["cutout"], torch.Generator().manual_seed(0))
    is_covered = covered == 0
    assert torch.equal(covered[~is_covered], images[~is_covered])
    places = set()
    for image in is_covered:
        assert torch.equal(image[0], image[1])
        assert torch.equal(image[0], image[2])
        rows, columns = (image[0].any(axis).nonzero().flatten().tolist() for axis in (1, 0))
        assert (len(rows), len(columns), int(image[0].sum())) == (2, 2, 4)
        places.add((rows[0], columns[0]))
    assert len(places) == 7 * 11  # anywhere, and nowhere partly outside


def test_every_epoch_has_images_of_its_own_and_the_evaluated_ones_stay(tmp_path):
    config = replace(OWN, dataset="own_network:images", model="mlp", hidden=(8,), augment=("crop", "flip"))
    learner = ConfiguredLearner(config, own_data(config.dataset), torch.device("cpu"))
    before = learner.samples.inputs.clone()
    seen = []
    for epoch in (0, 1, 0):
        learner.batch(epoch * learner.per_epoch)
        seen.append(learner._trained_on.inputs.clone())
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], before)
    assert torch.equal(learner.samples.inputs, before)


# ---- nothing is lost ---------------------------------------------------------------------------------------------


HARD = {
    "schedule, decay, dropout": replace(
        OWN, model="own_network:with_dropout", schedule="cosine", warm_up=3, weight_decay=0.01, optimiser="momentum",
        lr=0.02,
    ),
    "augmentation": replace(
        OWN, dataset="own_network:images", model="resnet20-bn", widths=(4, 8), blocks=1, augment=("crop", "flip")
    ),
    "plain norms": replace(OWN, gradient_norms="both", optimiser="adam", lr=0.003, weight_decay=0.01),
}  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_what_depends_on_the_iteration_goes_on_bit_for_bit(tmp_path, name):
    straight = run(HARD[name], tmp_path / "straight")
    resumed = run(HARD[name], tmp_path / "resumed", kills=(3, 12))
    assert lines(straight) == lines(resumed)
    assert_same(straight.checkpoint(), resumed.checkpoint())


@pytest.mark.parametrize("name", ["augmentation", "plain norms"])
def test_a_checkpoint_at_any_moment_changes_nothing(tmp_path, monkeypatch, name):
    """There is one a minute, whatever the iteration: here, whenever the clock is looked at."""
    config = replace(HARD[name], checkpoint_every=1000)
    straight = run(config, tmp_path / "straight")
    monkeypatch.setattr(trainer, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    often = run(config, tmp_path / "often", kills=(3, 12))
    assert [start["iteration"] for start in often.environment()] == [0, 2, 11]
    assert lines(straight) == lines(often)
    assert_same(straight.checkpoint(), often.checkpoint())


def press_ctrl_c(*event):
    if event == ("advanced", 11):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def _interruptible():
    """As in a terminal: a shell's background jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals are for the main thread")
@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_leaves_a_checkpoint_of_that_very_step(tmp_path):
    folder, config = RunFolder(tmp_path / "run"), replace(OWN, checkpoint_every=1000)
    with pytest.raises(KeyboardInterrupt):
        train(config, folder, watcher=press_ctrl_c)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert folder.checkpoint()["iteration"] == 11
    train(config, folder)
    assert lines(folder) == lines(run(config, tmp_path / "straight"))


def test_torch_itself_reads_the_checkpoint(tmp_path):
    folder = run(OWN, tmp_path / "run")
    loaded = torch.load(folder.path / "checkpoint.pt", weights_only=True)
    assert_same(loaded["state"], folder.checkpoint())
    import own_network

    own_network.model((6,), 3).load_state_dict(loaded["state"]["learner"]["model"])


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_command_trains_ones_own_from_the_current_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "only_here.py").write_text("from own_network import tensors, model\n")
    monkeypatch.chdir(tmp_path)
    options = ("--model", "only_here:model", "--data", "only_here:tensors", "--optimizer", "adam", "--lr", "0.003")
    assert cli.main(command(tmp_path / "runs", *options)) == 0
    [path] = (tmp_path / "runs").glob("train/only_here.tensors-only_here.model-c-adam-lr0.003-*/seed0")
    assert RunFolder(path).outcome()["outcome"] == "finished"


def test_several_seeds_are_several_runs_and_one_row(tmp_path, capsys):
    own = ("--model", "own_network:model", "--dataset", "own_network:tensors")
    assert cli.main(command(tmp_path, *own, "--seeds", "0", "1", "2", "--name", "mine")) == 0
    shown = capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "train" / "mine").iterdir()) == ["seed0", "seed1", "seed2"]
    [row] = [line for line in shown.splitlines() if line.strip().startswith("mine ")]
    assert row.split()[1:3] == ["3", "20"]


def test_a_search_takes_what_a_held_out_part_says(tmp_path, capsys):
    own = ("--model", "own_network:model", "--dataset", "own_network:numbers", "--no-consequentialist")
    options = (*own, "--search-lr", "1e-6", "0.05", "1e-5")
    assert cli.main(command(tmp_path, *options)) == 0
    shown = capsys.readouterr().out
    assert "Best of 3: learning rate 0.05" in shown
    assert "This learning rate is the largest that was tried" in shown
    trials = [RunFolder(path) for path in (tmp_path / "train-search").glob("*/seed0")]
    assert len(trials) == 3
    for trial in trials:
        last = trial.metrics()[-1]
        assert "validation_loss" in last
        assert "test_loss" not in last
    [final] = (tmp_path / "train").glob("*lr0.05-*/seed0")
    assert "test_loss" in RunFolder(final).metrics()[-1]


def test_dampings_are_searched_with_every_rate(tmp_path, capsys):
    own = ("--model", "own_network:model", "--dataset", "own_network:tensors")
    assert cli.main(command(tmp_path, *own, "--search-lr", "0.1", "0.2", "--search-damping", "0.01", "0.1")) == 0
    assert "Best of 4: learning rate" in capsys.readouterr().out
    [final] = (tmp_path / "train").glob("*/seed0")
    assert RunFolder(final).config(TrainConfig).relative_damping in (0.01, 0.1)


def test_a_diverged_run_is_an_error(tmp_path, capsys):
    own = ("--model", "own_network:model", "--dataset", "own_network:numbers", "--no-consequentialist", "--lr", "1e9")
    for _ in range(2):  # trained, and skipped
        assert cli.main(command(tmp_path, *own)) == 1
        message = capsys.readouterr().err
        assert "the loss is not finite any more" in message
        assert "Try a smaller learning rate than 1e+09 (--lr)" in message
    assert cli.main(command(tmp_path, *own, "--search-lr", "1e9", "1e10")) == 1
    assert "every run of the search diverged; try smaller learning rates than 1e+09" in capsys.readouterr().err


def test_every_optimiser_has_a_rate_to_start_with():
    rates = {name: Train(optimiser=name).config().lr for name in ("sgd", "momentum", "nesterov", "adam", "rmsprop")}
    assert rates == {"sgd": 0.1, "momentum": 0.01, "nesterov": 0.01, "adam": 0.003, "rmsprop": 0.001}
    assert Train(optimiser="adam", lr=0.1).config().lr == 0.1


@pytest.mark.parametrize("damping", [{"damping": 0.1}, {"relative_damping": 0.1}, {"search_damping": (0.1, 1.0)}])
def test_a_plain_optimiser_has_no_damping(damping):
    with pytest.raises(ValueError, match="a damping is for the C- versions"):
        Train(consequentialist=False, **damping)
