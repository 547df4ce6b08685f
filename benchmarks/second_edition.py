"""Losses of ResNet-20's first steps, as the second edition of the library computed them: later ones must find the same.

The kept runs of ResNet-20 need CIFAR-10. Here it learns random images, so that tests/lab/test_replay.py can repeat it
anywhere. results/second-edition.json was made with that edition:

    git worktree add ../second-edition d5755bf
    PYTHONPATH=../second-edition/src python benchmarks/second_edition.py d5755bf > results/second-edition.json
"""

import json
import sys
from dataclasses import replace

import torch

import consequent
from consequent_lab.race.contestants import CONTESTANTS
from consequent_lab.race.tasks import TASKS
from consequent_lab.race.training import Run
from consequent_lab.samples import Data, Samples

NAMES = ("C-Nesterov", "C-Nesterov-averaged")
SETTINGS = {"lr": 0.3, "relative_damping": 0.1, "decay": 1e-3}  # with which C-Nesterov begins its search in the race
STEPS, BATCH, IMAGES = 12, 32, 96  # averages look at inputs in steps 0 and 10


def losses(name: str) -> list[float]:
    """Returns the loss of each mini-batch before its step, for a contestant of the race."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (IMAGES,), generator=generator)
    data = Data(Samples(images, labels), Samples(images[:0], labels[:0]))
    task = replace(TASKS["resnet20-cifar10"], batch_size=BATCH, augment=None)
    run = Run(task, CONTESTANTS[name], SETTINGS, data, seed=0, steps=STEPS, graph=False)
    found = []
    for step in range(STEPS):
        batch = run.batch(step)
        with torch.no_grad():
            found.append(run.loss(run.model, batch).item())
        run.learn(batch)
    return found


if __name__ == "__main__":
    made_by = {"commit": sys.argv[1], "consequent": consequent.__version__, "torch": str(torch.__version__)}
    recipe = {"settings": SETTINGS, "batch_size": BATCH, "images": IMAGES, "dtype": "float32"}
    print(json.dumps({**made_by, **recipe, "losses": {name: losses(name) for name in NAMES}}, indent=1))
