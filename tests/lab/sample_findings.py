"""Findings as experiments hand them in, with all that makes a report hard: many runs, gaps, hostile names."""

import math
import random

from consequent_lab.paper.findings import Axis, Contours, Figure, Finding, Lead, Panel, Series, Statement, Table

HOSTILE = "<b>b</b> &lt; <script>alert('x')</script> & \"quotes\" %{x} $5 $6"
BY_LOSS = [Axis("loss", "training loss", log=True), Axis("accuracy", "training accuracy")]
BY_ITERATION = [Axis("iteration", "iterations"), Axis("seconds", "seconds")]
CONTESTANTS = (
    "C-SGD",
    "SGD",
    "SGD-BN",
    "C-SGD-BN",
    "C-Nesterov",
    "Nesterov",
    "Nesterov-BN",
    "C-Adam",
    "Adam",
    "Adam-BN",
    "C-RMSprop",
    "RMSprop",
)


def findings(points=400):
    """Returns all of them. Fewer points make tests quicker; the full number is what real runs have."""
    return [loss_surface(), output_paths(), resnet(points), hostile(), bare()]


def loss_surface():
    x = [-5.0 + 0.25 * step for step in range(41)]
    y = [-2.0 + 0.15 * step for step in range(41)]
    heights = [[0.5 * ((0.5 * (a - 1)) ** 2 + (2 * (b - 1)) ** 2) for a in x] for b in y]
    panels = []
    for title, rate in (("High learning rate, 0.48", 0.48), ("Low learning rate, 0.1", 0.1)):
        paths = {
            "C-SGD": _path(lambda e, v, r=rate: ((1 - r) * e[0], (1 - r) * e[1], v)),
            "SGD": _path(lambda e, v, r=rate: ((1 - 0.25 * r) * e[0], (1 - 4 * r) * e[1], v)),
            "SGD with momentum": _path(lambda e, v, r=rate: _momentum(e, v, r)),
        }
        series = [
            Series(name, {"first": path[0], "second": path[1]}, style="line+markers") for name, path in paths.items()
        ]
        axes = [Axis("first", "first weight")], [Axis("second", "second weight")]
        panels.append(Panel(title, series, *axes, Contours(x, y, heights), equal_scales=True))
    figure = Figure(
        "loss-surface",
        "The way of two weights to their optimum",
        "Contours: the loss. All start at (−4, 3) and should reach (1, 1).",
        panels,
    )
    statements = [
        Statement(
            "The proposed algorithm moves the parameters directly towards the optimum values, regardless of the "
            "learning rate.",
            "toy",
            "Largest distance from the straight line ÷ its length; holds below 1e-6.",
            "2e-13 at 0.48 and 1e-12 at 0.1.",
            (True, True),
        ),
        Statement("Momentum reduces the oscillations of SGD.", "toy", "Swings.", "Both swing.", (False,)),
    ]
    table = Table("The paths measured", ["optimiser", "learning rate"], [["C-SGD", 0.48], ["SGD", 0.1]])
    summary = (
        "Two weights on separate inputs of different strength: the loss bends 16 times as much along one as along "
    )
    return Finding(
        "loss-surface",
        "Loss surface",
        summary + "the other. Plain gradients point across the ellipses; consequentialism undoes the bending.",
        [figure],
        statements,
        [table],
    )


def _path(step, steps=60):
    error, velocity = (-5.0, 2.0), (0.0, 0.0)
    first, second = [error[0] + 1], [error[1] + 1]
    for _ in range(steps):
        *error, velocity = step(error, velocity)
        first.append(error[0] + 1)
        second.append(error[1] + 1)
    return first, second


def _momentum(error, velocity, rate):
    velocity = tuple(0.8 * v - rate * bend * e for v, e, bend in zip(velocity, error, (0.25, 4.0), strict=True))
    return error[0] + velocity[0], error[1] + velocity[1], velocity


def output_paths():
    series = [
        Series(f"C-SGD, sample {k}", {"a": [k, 0.0], "b": [1.0, -1.0]}, group="C-SGD", style="line+markers")
        for k in (1.0, 2.0)
    ]
    series += [
        Series(f"SGD, sample {k}", {"a": [k, 1.4, 0.0], "b": [1.0, 0.6, -1.0]}, group="SGD", style="line+markers")
        for k in (1.0, 2.0)
    ]
    series += [Series("start", {"a": [1.0, 2.0], "b": [1.0, 1.0]}, style="markers")]
    series += [Series("target", {"a": [0.0], "b": [-1.0]}, style="markers")]
    panel = Panel("C-SGD 0.7, SGD 0.03", series, [Axis("a", "first output")], [Axis("b", "second output")])
    figure = Figure("output-paths", "The outputs of two samples", "From the dots to the crosses.", [panel])
    return Finding("output-paths", "The path of the outputs", "One dense layer.", [figure])


def resnet(points):
    """Twelve contestants, three seeds, gaps, and one run that diverged."""
    without, with_norm, rows = [], [], []
    for number, name in enumerate(CONTESTANTS):
        for seed in range(3):
            run = _run(number, seed, points, diverges=name == "Adam" and seed == 2)
            (with_norm if name.endswith("BN") else without).append(Series(f"{name}, seed {seed}", run, group=name))
            for rate in (0.03, 0.1)[: 1 + (number + seed) % 2]:
                last = [run[column][-1] for column in ("loss", "accuracy", "iteration", "seconds")]
                rows.append([name, rate, float(seed), *last, "finished", 3.0, 1e-9])
    panels = [
        Panel("Without BatchNorm", without, BY_ITERATION, BY_LOSS),
        Panel("With BatchNorm", with_norm, BY_ITERATION, BY_LOSS),
    ]
    figure = Figure(
        "resnet20",
        "Training loss and accuracy of ResNet-20 on CIFAR-10",
        "Thin lines: single seeds. Strong lines: their median. The last of every 100 mini-batches.",
        panels,
    )
    long = "C-SGD converged faster in the beginning and maintained its stability to the end of the training. " * 3
    statements = [
        Statement(
            long,
            "empirical",
            "The iteration at which the accuracy is first at 99.99 %; about: a quarter earlier or later.",
            "99.99 % first at iteration 6,630 (6,240–7,020), three seeds. " * 3,
            (True, False, True),
            circumstances="Test accuracy in %: C-SGD 66.8 (63.8–69.8). Seeds: 3. Search: 11 learning rates each.",
            remark="A remark that is rather long, too. " * 9,
        ),
        Statement("SGD with BN crosses the C-SGD line.", "empirical", "Where it is lower.", "No run so long.", (None,)),
        Statement("C-SGD does help.", "digits", "The loss; holds if it is lower.", "It is.", (True,)),
    ]
    columns = ["optimiser", "learning rate", "seed", "final loss", "accuracy", "iterations", "seconds", "state"]
    columns += ["samples forgotten", "smallest gradient norm of any layer"]
    return Finding(
        "resnet20",
        "ResNet-20",
        "Three optimisers, plain and C-, without and with BatchNorm, on CIFAR-10.",
        [figure],
        statements,
        [Table("Every run", columns, rows)],
        Lead("resnet20", ["All is known by heart."], Table("Sizes of effects", ["who", "seeds"], [["C-SGD", 3.0]])),
    )


def _run(number, seed, points, *, diverges):
    noise = random.Random(100 * number + seed)
    iterations = [100.0 * (step + 1) for step in range(points)]
    speed = (1 + number % 4) * 400 / points
    loss = [
        2.3 * math.exp(-speed * (3 + noise.random()) * step / 400) + 1e-4 * 10 ** noise.uniform(0, 1)
        for step in range(points)
    ]
    accuracy = [1 - min(0.9, value / 2.5) for value in loss]
    run = {
        "iteration": iterations,
        "seconds": [iteration * (0.003 + 0.0001 * seed) for iteration in iterations],
        "loss": loss,
        "accuracy": accuracy,
    }
    run["loss"][points // 3] = None  # not measured there
    if diverges:
        for name in ("loss", "accuracy"):
            run[name][points // 2 :] = [math.inf, *([math.nan] * (points - points // 2 - 1))]
    return run


def hostile():
    """Whatever looks like markup is text."""
    series = Series(HOSTILE, {"x": [1.0, 2.0], "__proto__": [3.0, 4.0]})
    panel = Panel(HOSTILE, [series], [Axis("x", HOSTILE)], [Axis("__proto__", HOSTILE)])
    return Finding(
        "hostile",
        HOSTILE,
        HOSTILE,
        [Figure("hostile", HOSTILE, HOSTILE, [panel])],
        [Statement(HOSTILE, "toy", HOSTILE, HOSTILE, (True,), HOSTILE, HOSTILE)],
        [Table(HOSTILE, [HOSTILE, "n"], [[HOSTILE, 1.0], ["b", None], ["a", 10.0], ["c", 2.0]])],
    )


def bare():
    """An experiment of which nothing is there yet, but for one panel of a figure."""
    empty = Panel("Nothing", [], [Axis("a", "a")], [Axis("b", "b")])
    series = Series("s", {column: [1.0, 2.0] for column in "abcdefg"})
    losses = Panel("Losses", [series], [Axis("a", "a")], [Axis("b", "one loss"), Axis("c", "another loss")])
    rates = Panel("Accuracies", [series], [Axis("a", "a")], [Axis("d", "one accuracy"), Axis("e", "another accuracy")])
    both = [Figure("bare", "Nothing", "", [empty, empty]), Figure("begun", "Something", "", [empty, losses, rates])]
    return Finding("bare", "Not run yet", "There are no runs.", both)
