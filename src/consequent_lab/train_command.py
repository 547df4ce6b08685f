"""`consequent train`: any of the models on any of the data sets with any of the optimisers, plain or C-."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from consequent_lab.train_config import TrainConfig


@dataclass(frozen=True)
class Train(TrainConfig):
    """Train a network and keep the run in a folder.

    A run that was interrupted, in whatever way, goes on from its last checkpoint when the same command is given again;
    a finished one is skipped. Under torchrun (torchrun --nproc-per-node 4 -m consequent_lab.cli train …) the ranks
    share every mini-batch out among themselves, on CPUs or with a GPU each.
    """

    runs: Path = Path("runs")
    """Where run folders are: this one is RUNS/train/NAME/seedSEED."""
    name: str | None = None
    """Of the run (default: made from the options)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU if there is one."""
    data: Path | None = None
    """The folder of the data sets (default: the environment's CONSEQUENT_DATA, else data)."""

    def config(self) -> TrainConfig:
        """Returns what makes the run what it is, wherever it runs."""
        return TrainConfig(**{option.name: getattr(self, option.name) for option in fields(TrainConfig)})

    def run(self) -> None:
        """Trains."""
        from consequent_lab.crew import CrewFolder, joined
        from consequent_lab.progress import ProgressBoard
        from consequent_lab.runs import RunFolder
        from consequent_lab.screen import console
        from consequent_lab.trainer import train

        config = self.config()
        variant = self.name or variant_of(config)
        folder = RunFolder.of(self.runs, "train", variant, config.seed)
        screen = console()
        title = f"{config.optimiser_name}, {config.model}, {config.dataset}, seed {config.seed}"
        with joined(chosen_device(self.device)) as (crew, device):
            if crew is not None:
                folder = CrewFolder(folder.path, crew)
                if not crew.is_first:
                    train(config, folder, device, data=self.data, crew=crew)
                    return
            with ProgressBoard(screen) as board:
                train(config, folder, device, data=self.data, watcher=board.run(title), crew=crew)
        screen.print(f"Run: {folder.path}", markup=False, soft_wrap=True)


def variant_of(config: TrainConfig) -> str:
    """Returns a name for a config up to its seed; other options, another name.

    >>> variant_of(TrainConfig(lr=0.3)).rsplit("-", 1)[0]
    'digits-mlp-c-sgd-lr0.3'
    >>> variant_of(TrainConfig()) == variant_of(TrainConfig(seed=1)), variant_of(TrainConfig()) == variant_of(
    ...     TrainConfig(damping=1.0))
    (True, False)
    """
    options = {name: value for name, value in asdict(config).items() if name != "seed"}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:6]
    return f"{config.dataset}-{config.model}-{config.optimiser_name.lower()}-lr{config.lr:g}-{digest}"


def chosen_device(device: Literal["auto", "cpu", "cuda"]) -> str:
    """Returns where to train; raises if it is not there."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA device here")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device
