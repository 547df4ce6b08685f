"""`consequent reproduce` says beforehand how long it will take."""

import re
import time
from dataclasses import replace

import pytest
import torch

from consequent_lab import cli, jobs
from consequent_lab.forecast import AROUND_A_RUN, Cost, expected_jobs, forecast, kind_of, measured_cost
from consequent_lab.paper import schedule
from consequent_lab.paper.archive import Archive
from consequent_lab.paper.experiments import experiments
from consequent_lab.paper.recipes import STEPS, Job, Race
from consequent_lab.runs import RunFolder
from consequent_lab.train_config import TrainConfig
from consequent_lab.trainer import train

CONFIG = TrainConfig(hidden=(24,), iterations=100, evaluate_every=100, evaluate_training=False)


def test_runs_add_up_over_workers_and_kinds():
    timed = []

    def cost(config):
        timed.append(config)
        return Cost(0.0, 0.02 if config.consequentialist else 0.01, 0.0, 1440, 357)

    plain = replace(CONFIG, consequentialist=False)
    jobs = [Job("a", "x", CONFIG), Job("a", "y", replace(CONFIG, lr=0.5)), Job("a", "z", plain, alone=True)]
    assert forecast(jobs, 2, cost) == pytest.approx(2 * (2 + AROUND_A_RUN) / 2 + 1 + AROUND_A_RUN)
    assert timed == [plain, CONFIG], "a kind is timed once"
    assert kind_of(CONFIG) != kind_of(replace(CONFIG, model="resnet20"))


def test_runs_that_a_search_opens_are_counted_too(tmp_path):
    recipes = experiments()["mlp"].recipes(True)
    [race] = [recipe for recipe in recipes if isinstance(recipe, Race)]
    archive = Archive(tmp_path)
    later = [job for job in expected_jobs([race], archive, STEPS) if job.recipe == race.name]
    assert len(later) == sum(len(one.seeds) for one in race.contestants)
    assert not [job for job in race.jobs(archive, STEPS) if job.recipe == race.name], "none of them can start yet"


def test_a_forecast_is_of_the_right_size(tmp_path):
    threads = torch.get_num_threads()
    config = replace(CONFIG, hidden=(256, 256), iterations=400)
    expected = measured_cost("cpu", None)(config).run(config)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
    start = time.perf_counter()
    train(config, RunFolder(tmp_path / "run"))
    taken = time.perf_counter() - start
    torch.set_num_threads(threads)
    assert taken / 5 < expected < 5 * taken  # other work on the machine slows one of both down


def test_the_command_says_it_before_the_first_run(tmp_path, monkeypatch, capsys):
    said = []

    def no_runs(ready, setup, board):
        said.append(capsys.readouterr().out)
        return jobs.Summary()

    monkeypatch.setattr(schedule, "train_runs", no_runs)
    cli.main(["reproduce", "mlp", "--quick", "--runs", str(tmp_path), "--device", "cpu", "--workers", "2"])
    assert re.search(
        r"^\d+ runs, 2 at a time: about \d.*s here, by a short timing; a search may need some more", said[0]
    )
