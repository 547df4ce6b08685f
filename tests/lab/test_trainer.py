"""Training runs: what they compute, what they read, and that nothing is lost when they are killed."""

import math
import random
import time
from dataclasses import replace
from io import StringIO
from multiprocessing import get_all_start_methods, get_context

import pytest
import torch
from rich.console import Console
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import consequent
from consequent_lab import cli, trainer
from consequent_lab.configured import build_model, build_optimizer
from consequent_lab.datasets import Dataset, load, prepared
from consequent_lab.learner import order_of
from consequent_lab.models import resnet20
from consequent_lab.progress import ProgressBoard, RunLine
from consequent_lab.runs import DamagedFileError, RunFolder
from consequent_lab.samples import Evaluation
from consequent_lab.train_config import TrainConfig
from consequent_lab.trainer import train
from consequent_lab.training_metrics import Tally

CPU = torch.device("cpu")
SMALL = TrainConfig(hidden=(24, 24), iterations=60, log_every=10, evaluate_every=20, checkpoint_every=7)
OPTIMISERS = ("sgd", "momentum", "nesterov", "adam", "rmsprop")
RATES = {"sgd": 0.1, "momentum": 0.02, "nesterov": 0.02, "adam": 0.003, "rmsprop": 0.003}


class Killed(BaseException):
    """Stands for whatever ends a process."""


def killer(iteration):
    """Returns what ends the run at an iteration."""

    def kill(*event):
        if event == ("advanced", iteration):
            raise Killed

    return kill


def run(config, path, device="cpu", kills=()):
    """Trains, is ended at the given iterations, goes on, and returns the folder."""
    folder = RunFolder(path)
    for iteration in kills:
        with pytest.raises(Killed):
            train(config, RunFolder(path), device, watcher=killer(iteration))
        assert folder.outcome() is None
    train(config, folder, device)
    assert folder.outcome()["outcome"] == "finished"
    return folder


def lines(folder):
    """Returns the metrics without what a clock says."""
    return [{key: value for key, value in line.items() if key != "seconds"} for line in folder.metrics()]


def assert_same(state, other):
    """Bit for bit, however deep."""
    assert type(state) is type(other)
    if isinstance(state, torch.Tensor):
        assert torch.equal(state, other)
    elif isinstance(state, dict):
        assert state.keys() == other.keys()
        for key in state.keys() - {"seconds"}:
            assert_same(state[key], other[key])
    elif isinstance(state, list):
        assert len(state) == len(other)
        for one, two in zip(state, other, strict=True):
            assert_same(one, two)
    else:
        assert state == other


def toy(samples=50, classes=3):
    """Noise with random labels: learnt slowly and forgotten again."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (samples + 20, 1, 2, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, classes, (samples + 20,), generator=generator)
    return Dataset("toy", images[:samples], labels[:samples], images[samples:], labels[samples:], classes)


# ---- a run is the loop one would write ---------------------------------------------------------------------------


def plain_norms(model, inputs, labels):
    """Of the gradients without any correction, which torch.func does not see."""

    def loss(parameters):
        return cross_entropy(functional_call(model, parameters, inputs), labels)

    return [grad.norm().item() for grad in torch.func.grad(loss)(dict(model.named_parameters())).values()]


def script(config, dataset):
    """The training loop as in a script, and all readings from its definition; yields a line per iteration."""
    data = prepared(dataset, config.normalisation, CPU, flat=True)
    model = build_model(config, dataset)
    optimizer = build_optimizer(config, model, capturable=False)
    if config.consequentialist:
        bound = {} if config.damping is None else {"bound": None}
        dampings = {"damping": config.damping, "relative_damping": config.relative_damping}
        consequent.attach(optimizer, model, **dampings, **bound)
    per_epoch = len(data.train.targets) // config.batch_size
    before, complete = None, None
    for iteration in range(config.total_iterations(per_epoch) + 1):
        line = {"iteration": iteration}
        if iteration > 0:
            epoch, place = divmod(iteration - 1, per_epoch)
            if place == 0:
                batches = order_of(len(data.train.targets), config.batch_size, config.seed, epoch).split(
                    config.batch_size
                )
                seen = []
            inputs, labels = data.train.inputs[batches[place]], data.train.targets[batches[place]]
            optimizer.zero_grad()
            logits = model(inputs)
            loss = cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            applied = [parameter.grad.norm().item() for parameter in model.parameters()]
            plain = plain_norms(model, inputs, labels)
            seen.append((loss.item(), (logits.argmax(1) == labels).double().mean().item()))
            means = [sum(values) / len(seen) for values in zip(*seen, strict=True)]
            complete = means if len(seen) == per_epoch else complete
            line |= {"batch": seen[-1], "running": means, "epoch": complete, "plain": plain, "applied": applied}
        with torch.no_grad():
            logits = model(data.train.inputs)
            correct = logits.argmax(1) == data.train.targets
            line |= {
                "train_loss": cross_entropy(logits, data.train.targets).item(),
                "train_accuracy": correct.double().mean().item(),
                "test_accuracy": (model(data.test.inputs).argmax(1) == data.test.targets).double().mean().item(),
            }
        if iteration % config.evaluate_every == 0:
            line["forgotten"] = None if before is None else int((before & ~correct).sum())
            before = correct
        yield line


@pytest.mark.parametrize("options", [{"consequentialist": False}, {"damping": 0.1}, {"relative_damping": 0.1}], ids=str)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_run_computes_and_reads_what_a_script_does(tmp_path, monkeypatch, optimiser, options):
    dataset = toy()
    monkeypatch.setattr(trainer, "load", lambda name, folder: dataset)
    config = TrainConfig(
        hidden=(12,), optimiser=optimiser, lr=10 * RATES[optimiser], batch_size=8,
        head_lr_factor=0.5, momentum=0.9, epochs=6, log_every=2, evaluate_every=3, gradient_norms="both", **options,
    )  # fmt: skip
    found = {line["iteration"]: line for line in run(config, tmp_path / "run").metrics()}
    per_epoch = 6  # of 8 samples; the other 2 of 50 are left out, other ones in every epoch
    assert list(found) == sorted({*range(0, 37, 2), *range(0, 37, 3)})
    forgotten = []
    for expected in script(config, dataset):
        iteration = expected["iteration"]
        if iteration not in found:
            continue
        line = found[iteration]
        assert line["epoch"] == pytest.approx(iteration / per_epoch, rel=1e-6)
        if iteration > 0:
            assert [line["batch_loss"], line["batch_accuracy"]] == pytest.approx(expected["batch"], rel=1e-4)
            assert [line["running_loss"], line["running_accuracy"]] == pytest.approx(expected["running"], rel=1e-4)
            for kind in ("applied", "plain"):
                squares = [norm**2 for norm in expected[kind]]
                norms = [math.sqrt(squares[0] + squares[1]), math.sqrt(squares[2] + squares[3])]
                assert list(line["gradient_norms"][kind].values()) == pytest.approx(norms, rel=1e-3)
            assert line.get("failed", "none") == (0 if config.consequentialist else "none")
        assert ("epoch_accuracy" in line) == (iteration >= per_epoch)
        if iteration >= per_epoch:
            assert [line["epoch_loss"], line["epoch_accuracy"]] == pytest.approx(expected["epoch"], rel=1e-4)
        assert ("test_accuracy" in line) == (iteration % 3 == 0)
        if iteration % 3 == 0:
            assert line["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
            assert line["train_accuracy"] == pytest.approx(expected["train_accuracy"])
            assert line["test_accuracy"] == pytest.approx(expected["test_accuracy"])
            assert line.get("forgotten") == expected["forgotten"]
            forgotten.append(expected["forgotten"])
    assert forgotten[0] is None
    assert sum(forgotten[1:]) > 0, "a toy that shows nothing"


def test_means_over_batches_and_epochs_on_a_toy():
    tally = Tally(CPU, batch_size=4, per_epoch=2)
    answers = [[0, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]  # two epochs of two batches of four
    read = []
    for number, batch in enumerate(answers):
        tally.begin(number)
        tally.add(torch.tensor(float(number)), torch.eye(2)[torch.tensor(batch)], torch.ones(4, dtype=torch.long))
        tally.end(number)
        read.append(tally.read(number + 1))
    assert [line["batch_loss"] for line in read] == [0, 1, 2, 3]
    assert [line["running_loss"] for line in read] == [0, 0.5, 2, 2.5]
    assert [line.get("epoch_loss") for line in read] == [None, 0.5, 0.5, 2.5]
    assert [line["batch_accuracy"] for line in read] == [0.5, 0.5, 0.75, 0]
    assert [line["running_accuracy"] for line in read] == [0.5, 0.5, 0.75, 0.375]
    assert [line.get("epoch_accuracy") for line in read] == [None, 0.5, 0.5, 0.375]


def test_forgotten_samples_on_a_toy():
    before = torch.tensor([True, True, False, False, True])
    now = Evaluation(0.0, torch.tensor([True, False, True, False, False]))
    assert now.forgotten_since(before) == 2
    assert now.accuracy == pytest.approx(0.4)


def test_the_training_set_is_evaluated_only_if_asked_for(tmp_path):
    config = replace(SMALL, evaluate_training=False, gradient_norms="none", iterations=20)
    for line in run(config, tmp_path / "run").metrics():
        assert not {"train_loss", "forgotten", "gradient_norms"} & line.keys()


# ---- models ------------------------------------------------------------------------------------------------------


def images(shape, classes):
    pixels, labels = torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    return Dataset("images", pixels, labels, pixels, labels, classes)


@pytest.mark.parametrize("model", ["mlp", "resnet20", "resnet20-bn"])
@pytest.mark.parametrize(("shape", "classes"), [((3, 32, 32), 100), ((1, 28, 28), 10), ((3, 32, 32), 10)])
def test_every_model_takes_every_data_set(model, shape, classes):
    config = TrainConfig(model=model, hidden=(8,))
    inputs = torch.rand(2, *shape)
    built = build_model(config, images(shape, classes))
    assert built(inputs.flatten(1) if model == "mlp" else inputs).shape == (2, classes)
    again = build_model(config, images(shape, classes))
    assert all(torch.equal(one, two) for one, two in zip(built.parameters(), again.parameters(), strict=True))
    if model != "mlp" and shape[0] == 3 and classes == 10:
        torch.manual_seed(0)
        paper = resnet20(batch_norm=model == "resnet20-bn")
        assert all(torch.equal(one, two) for one, two in zip(built.parameters(), paper.parameters(), strict=True))


def test_the_last_layer_has_its_own_learning_rate():
    config = TrainConfig(model="resnet20", head_lr_factor=0.1, lr=0.08)
    model = build_model(config, images((3, 32, 32), 10))
    body, head = build_optimizer(config, model, capturable=False).param_groups
    assert (body["lr"], head["lr"]) == pytest.approx((0.08, 0.008))
    assert [id(p) for p in head["params"]] == [id(p) for p in model[-1].parameters()]
    assert len(body["params"]) + 2 == len(list(model.parameters()))


def test_epochs_have_orders_of_their_own():
    orders = {tuple(order_of(20, 5, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


# ---- nothing is lost ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consequentialist", [False, True])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_run_that_was_ended_goes_on_bit_for_bit(tmp_path, optimiser, consequentialist):
    config = replace(
        SMALL, optimiser=optimiser, consequentialist=consequentialist, lr=RATES[optimiser], gradient_norms="both"
    )
    straight = run(config, tmp_path / "straight")
    resumed = run(config, tmp_path / "resumed", kills=(3, 8, 28, 30, 59, 60))
    assert lines(straight) == lines(resumed)
    assert_same(straight.checkpoint(), resumed.checkpoint())
    assert [start["iteration"] for start in resumed.environment()] == [0, 0, 7, 28 - 7, 28, 56, 56]


def test_seconds_go_on_too(tmp_path):
    seconds = [line["seconds"] for line in run(SMALL, tmp_path / "run", kills=(30, 50)).metrics()]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0
    assert len(set(seconds)) == len(seconds)


KILLED = {
    "dense": replace(SMALL, hidden=(48,) * 3, optimiser="nesterov", lr=0.02, iterations=200, evaluate_every=30),
    "convolutions": TrainConfig(
        model="resnet20-bn", optimiser="adam", lr=0.003, batch_size=4, iterations=16, log_every=3, evaluate_every=8,
        evaluate_training=False, checkpoint_every=3,
    ),
}  # fmt: skip


@pytest.mark.skipif("forkserver" not in get_all_start_methods(), reason="no forkserver")
@pytest.mark.parametrize("name", KILLED)
def test_a_run_that_is_killed_at_random_moments_goes_on_bit_for_bit(tmp_path, name):
    context = get_context("forkserver")  # starts quickly, and the runs are alike: none is in this process
    context.set_forkserver_preload(["consequent_lab.trainer", "sklearn.datasets"])
    config = KILLED[name]

    def start(folder):
        process = context.Process(target=train, args=(config, RunFolder(folder)))
        process.start()
        return process

    process = start(tmp_path / "straight")
    process.join(60)
    assert process.exitcode == 0
    folder = RunFolder(tmp_path / "killed")
    moments = random.Random(name)
    kills, metrics = 0, folder.path / "metrics.jsonl"
    while kills < 4 and folder.outcome() is None:
        process = start(folder.path)
        size = metrics.stat().st_size if metrics.exists() else 0
        while process.is_alive() and (not metrics.exists() or metrics.stat().st_size <= size):
            time.sleep(0.002)  # until it writes something
        time.sleep(moments.uniform(0, 0.15))
        process.kill()  # SIGKILL
        process.join()
        kills += process.exitcode != 0
    assert kills >= 3, "the run is too short to be killed"
    process = start(folder.path)
    process.join(60)
    assert process.exitcode == 0
    assert len({start["iteration"] for start in folder.environment()}) > 1, "it never got on between two kills"
    straight = RunFolder(tmp_path / "straight")
    assert lines(straight) == lines(folder)
    assert_same(straight.checkpoint(), folder.checkpoint())


def test_a_finished_run_is_skipped(tmp_path):
    def contents():
        files = [path for path in folder.path.iterdir() if path.name != ".lock"]
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    folder = run(SMALL, tmp_path / "run")
    before = contents()
    train(SMALL, folder, watcher=killer(1))
    assert contents() == before


def test_a_run_with_another_config_is_refused(tmp_path):
    run(replace(SMALL, iterations=7), tmp_path / "run")
    with pytest.raises(ValueError, match=r"lr is 0\.1 there and 0\.2 now\. Give this run a folder of its own"):
        train(replace(SMALL, iterations=7, lr=0.2), RunFolder(tmp_path / "run"))


def test_a_damaged_checkpoint_ends_the_attempt_and_changes_nothing(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Killed):
        train(SMALL, folder, watcher=killer(30))
    checkpoint, metrics = folder.path / "checkpoint.pt", (folder.path / "metrics.jsonl").read_bytes()
    damaged = bytearray(checkpoint.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    checkpoint.write_bytes(damaged)
    with pytest.raises(DamagedFileError, match=r"checkpoint\.pt is damaged"):
        train(SMALL, RunFolder(folder.path))
    assert (folder.path / "metrics.jsonl").read_bytes() == metrics


def test_other_data_are_refused(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Killed):
        train(SMALL, folder, watcher=killer(30))
    digits = load("digits", None)
    order = torch.arange(len(digits.train_labels) - 1, -1, -1)
    other = replace(digits, train_images=digits.train_images[order], train_labels=digits.train_labels[order])
    monkeypatch.setattr(trainer, "load", lambda name, folder: other)
    with pytest.raises(ValueError, match="other data, or on the same in another order"):
        train(SMALL, RunFolder(folder.path))


# ---- bad input ---------------------------------------------------------------------------------------------------


def test_divergence_ends_a_run_and_says_so(tmp_path):
    config = replace(SMALL, consequentialist=False, lr=1e8)
    folder = RunFolder(tmp_path / "run")
    train(config, folder)
    last = folder.metrics()[-1]
    assert last["diverged"] is True
    assert last["batch_loss"] is None
    assert last["iteration"] < 60
    assert folder.outcome()["outcome"] == "diverged"
    train(config, folder, watcher=killer(1))  # done is done


@pytest.mark.filterwarnings("ignore::consequent.ConsequentWarning")
def test_divergence_between_two_readings_is_no_error(tmp_path):
    folder = RunFolder(tmp_path / "run")
    every = {"iterations": 400, "log_every": 200, "evaluate_every": 400, "checkpoint_every": 400}
    train(replace(SMALL, consequentialist=True, optimiser="sgd", lr=1e12, damping=0.01, **every), folder)
    assert folder.outcome()["outcome"] == "diverged"
    assert folder.metrics()[-1]["iteration"] == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 3, "epochs": 2}, "iterations or epochs"),
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"lr": math.nan}, "lr must be finite"),
        ({"damping": -1.0}, "damping must be finite and not negative"),
        ({"relative_damping": -1.0}, "relative_damping must be finite and not negative"),
        ({"damping": 0.1, "relative_damping": 0.1}, "give damping or relative_damping, not both"),
        ({"optimiser": "nesterov", "momentum": 0.0}, "nesterov needs a momentum"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"hidden": (3, 0)}, "hidden"),
        ({"seed": -1}, "seed"),
    ],
)
def test_senseless_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


def test_a_batch_larger_than_the_training_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="batch_size 2000 is more than the 1440 training samples"):
        train(TrainConfig(batch_size=2000), RunFolder(tmp_path / "run"))


def test_a_graph_needs_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="needs a CUDA device"):
        train(TrainConfig(graph=True), RunFolder(tmp_path / "run"))


# ---- what is seen ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "bound"), [([], 0.9), (["--no-consequentialist", "--optimiser", "adam"], 0.7)])
def test_the_command_learns_the_digits(tmp_path, capsys, options, bound):
    command = ["train", "--runs", str(tmp_path), "--device", "cpu", "--epochs", "3", "--hidden", "64", "64", *options]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    [path] = tmp_path.glob("train/digits-mlp-*/seed0")
    assert str(path) in shown
    assert "finished at iteration 135" in shown
    assert RunFolder(path).metrics()[-1]["test_accuracy"] > bound
    assert cli.main(command) == 0
    assert "skipped" in capsys.readouterr().out


def test_the_command_names_what_is_wrong(tmp_path, capsys):
    assert cli.main(["train", "--dataset", "cifar10", "--data", str(tmp_path), "--runs", str(tmp_path)]) == 1
    assert "CIFAR-10" in capsys.readouterr().err


def watched(screen):
    """Shows a run of 100 iterations that takes a second for each."""
    now = [0.0]
    with ProgressBoard(screen, clock=lambda: now[0]) as board:
        line = RunLine("C-SGD", board)
        line.started(0, 100)
        for iteration in range(1, 101):
            now[0] += 1
            if iteration % 10 == 0:
                line.read(
                    {"running_loss": 0.25, "running_accuracy": 0.875, "test_loss": 2.0, "test_accuracy": 0.5}
                    | ({"train_loss": 0.5, "train_accuracy": 0.75} if iteration == 100 else {})
                )
            line.advanced(iteration)
        line.ended({"outcome": "finished", "iteration": 100, "seconds": 99.0}, skipped=False)
    return screen.file.getvalue()


def test_progress_without_a_terminal_is_a_plain_line_now_and_then():
    shown = watched(Console(file=StringIO(), width=60)).splitlines()
    assert len(shown) == 8
    assert shown[0] == "C-SGD: 100 iterations"
    metrics = "mini-batches: loss 0.25, accuracy 87.50 %; test loss 2, accuracy 50.00 %"
    assert shown[2] == f"C-SGD: 30 of 100; 1 it/s; {metrics}; 1 min 10 s left"
    evaluated = "training loss 0.5, accuracy 75.00 %; test loss 2, accuracy 50.00 %"
    assert shown[-1] == f"C-SGD: finished at iteration 100, 1 min 39 s of training; {evaluated}"


def test_progress_on_a_terminal_is_one_live_line():
    shown = watched(Console(file=StringIO(), width=150, force_terminal=True))
    assert "\x1b[" in shown
    assert "finished at iteration 100" in shown
    assert "it/s" not in shown.rsplit("\r", 1)[-1], "the line is written over"


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("consequentialist", [False, True])
@pytest.mark.parametrize(("model", "optimiser"), [("mlp", "sgd"), ("mlp", "adam"), ("resnet20", "nesterov")])
def test_graphed_runs_learn_as_eager_ones_do(tmp_path, model, optimiser, consequentialist):
    lr = RATES[optimiser] * (0.1 if model == "resnet20" else 1)  # small enough for rounding not to grow
    config = replace(
        SMALL, model=model, optimiser=optimiser, lr=lr, consequentialist=consequentialist, tf32=False,
        gradient_norms="both", iterations=40,
    )  # fmt: skip
    eager = run(replace(config, graph=False), tmp_path / "eager", "cuda")
    graphed = run(replace(config, graph=True), tmp_path / "graphed", "cuda", kills=(25,))
    assert [start["graph"] for start in graphed.environment()] == [True, True]
    assert eager.environment()[0]["graph"] is False
    for one, other in zip(eager.metrics()[:3], graphed.metrics()[:3], strict=True):
        assert one.keys() == other.keys()
        assert one["epoch"] == other["epoch"]
        assert one.get("running_loss", 0) == pytest.approx(other.get("running_loss", 0), rel=0.05)
    assert graphed.metrics()[-1]["train_loss"] == pytest.approx(eager.metrics()[-1]["train_loss"], rel=0.2)
