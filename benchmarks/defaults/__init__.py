"""Which damping, and which learning rate, should be the default? Plain optimisers and their C- versions on 16 tasks.

From the repository's root, on CPUs, one thread for each worker:

    export OMP_NUM_THREADS=1 PYTHONPATH=src
    python -m benchmarks.defaults search  --workers 16   # every rate of every contestant, tuning seed 100
    python -m benchmarks.defaults confirm --workers 16   # the best rates of the search, seeds 0, 1, 2
    python -m benchmarks.defaults fixed   --workers 16   # one rate for all tasks, seeds 0, 1, 2
    python -m benchmarks.defaults stress  --workers 16   # ten times the best rate, at one damping
    python -m benchmarks.defaults summary                # the tables below, in Markdown

Each run is a line of JSON in ``--results`` (default: runs/defaults.jsonl). A run whose line is there is not repeated:
a study that was killed goes on where it was. ``time`` runs every task once and says how long that took; ``--quick`` is
a few tasks with a few steps, to see that all of it works.

The runs that were made are kept in results/defaults.jsonl.gz, and told of in docs/defaults.md.

The measure, fixed before any value was seen:

* A run's *final loss* is the loss over a large fixed part of the training set after the last step. It *diverged* if the
  loss is then NaN or infinite, or more than ten times what it was before the first step.
* The *tuned plain* optimiser of a task is the one, with the rate, that has the lowest final loss at the tuning seed:
  SGD or SGD with Nesterov's momentum for C-SGD, C-Momentum and C-Nesterov; Adam for C-Adam.
* The *ratio* of a run is its final loss divided by that of the tuned plain optimiser with the same seed. It is held
  between 1/100 and 100, and is 100 if the run diverged. (Where the plain run diverged, its loss before the first step
  stands for its final one.) In classification a loss below 0.002 counts as 0.002: the set is learned by heart.
* The *verdict* on a contestant and a damping is the geometric mean of the ratio over seeds and tasks, all tasks alike;
  beside it the worst task (geometric mean over its seeds) and the number of runs that diverged. Lower is better, and
  below 1 is better than tuned plain.

Added after a first look at two tasks: the tables also say by which factor a verdict is uncertain for want of seeds.

"Tuned" runs have their own rate for each task, found at the tuning seed; "fixed" ones have one rate for all tasks,
because good without tuning means that.

The tasks were *not* fixed so: some were changed after trial runs at the tuning seed, which showed C- versions as well
as plain ones. The GPT reversed sequences (Adam solved that in 50 steps), then added modulo 11 (nothing that was tried
learned it), and now sorts. The right side of the PINN was scaled to a mean square of 1 (plain SGD, C-SGD and C-Nesterov
diverged at the rates tried). The SIREN got more pixels and fewer parameters (the loss fell to rounding), the deep
perceptron He's initialisation (plain SGD learned nothing); these two were changed for what plain optimisers did.

β₂ of Adam came later, after C-Adam had been seen to come to a stand on pictures with 0.999 and not with 0.95. Fixed
before its runs: Adam and C-Adam with 0.99 and 0.95, ρ = 0.1, are judged like the rest, against tuned Adam with 0.999.
Another default than torch's is for C-Adam if it has the lower verdict by more than both standard errors, with tuned
rates and with one rate for all tasks, the better of 0.001 and 0.003 for each. The stages are the same, for contestants
named like "c-adam 0.95".

Averages over batches came last, after C-Adam with them had needed the fewest steps of a race. Fixed before their runs:
``averaging=0.95`` with refresh = 1 and 10 for C-Adam, the latter for C-SGD as well, at ρ = 0.1, by the rule of β₂. They
are named like dampings: "relative 0.1, averaging 0.95, refresh 10".

Last came the damping of C-Adam by itself. Of the runs above ρ = 1 looked better for it than 0.1, the default of all:
0.49 against 0.55 with tuned rates, 1.73 against 2.50 at 0.001 for all tasks, and no task behind tuned Adam. As this had
been seen, it is judged by seeds that had not: 3, 4 and 5. Fixed before their runs: ρ = 1 becomes the default of
optimisers whose steps have a length of their own, of which Adam stands here for all, if its verdict is lower than that
of 0.1 by more than both standard errors with one rate for all tasks, at 0.001 and at 0.003, and not higher by more than
both with tuned rates. 0.3 and 3 are run beside it, to see whether 1 is a lucky number; the test losses are looked at,
too, and speak against it if their geometric mean is higher. (``--seeds 3 4 5``, contestants adam and c-adam.)

It failed that rule at 0.003 alone, where the two are level, and passed at 0.001. But whoever adds the one line to a
script has torch's own rate, 0.001, and there the default made Adam worse. So the question was put anew, as it should
have been, after those results and before seeds that had not been seen, 6, 7 and 8: ρ = 1 becomes that default if at
0.001 its verdict is lower than that of ρ = 0.1 and lower than that of plain Adam, by more than both standard errors,
and neither at 0.003 nor with tuned rates higher than that of 0.1 by more than both. Test losses speak against it as
before, in any of the three. (``--seeds 6 7 8``, the same contestants, dampings "relative 0.1" and "relative 1".)

It failed that rule, too, in one of its four parts: 1.52 against 1.83 of plain Adam at 0.001 is less than both standard
errors. But most of these is the noise of tuned Adam, by which both are divided. Runs with the same task and seed are
pairs, and their noise is what counts. So the question is put a third time, to six further seeds, 9 to 14, and for the
last time; fixed before their runs: the *paired ratio* of two is the geometric mean over tasks and seeds of final loss ÷
final loss with the same task and seed, each at least the task's floor, the ratio held between 1/100 and 100, and 100
where the upper one alone diverged; its standard error is that of the seeds' own means. ρ = 1 becomes the default of
optimisers whose steps have a length of their own if at 0.001 its paired ratios to plain Adam and to ρ = 0.1 are both
below 1 by more than two standard errors, if at 0.003 that to ρ = 0.1 is not above 1.1, and if the same ratio of test
losses to those with ρ = 0.1 is above 1 at neither rate. (``--seeds 9 10 11 12 13 14``, the stage ``fixed`` alone.)

Rates are constant over a run. Grids: C-SGD and plain SGD as they are; with momentum 0.9 a step grows ten times longer,
so the C- versions with momentum are spared the rate 1 and are given 0.001 instead. Plain SGD may go up to 10, since a
mean over many outputs, as in ``F.mse_loss``, shortens its steps.
"""
