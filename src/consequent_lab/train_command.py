"""`consequent train`: any model on any data with any of the optimisers, plain or C-."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from consequent_lab.comparison import runs_at, terminal_table
from consequent_lab.progress import ProgressBoard, RunLine
from consequent_lab.runs import RunFolder
from consequent_lab.screen import console
from consequent_lab.train_config import TrainConfig, is_own

if TYPE_CHECKING:  # The command line reads this file for its options; torch is imported when needed.
    from consequent_lab.rank_group import RankGroup

HELD_OUT = 0.1  # of the training set, in a search
FIRST_RATES = {"sgd": 0.1, "momentum": 0.01, "nesterov": 0.01, "adam": 0.003, "rmsprop": 0.001}


class DivergedError(ValueError):
    """A run's loss was not finite any more."""


@dataclass(frozen=True)
class Train(TrainConfig):
    """Train a network and keep the run in a folder.

    A run that was interrupted, in whatever way, goes on from its last checkpoint when the same command is given again;
    a finished one is skipped. One that diverged ends the command with a message and exit code 1.

    Your own: --model module:function, called as function(shape, classes) or function(), returns an nn.Module;
    --dataset module:function returns training inputs, training targets, test inputs and test targets as four tensors,
    or a training and a test set as two torch.utils.data.Datasets. Whole numbers are classes, floats are learnt by half
    of the squared error.

    Under torchrun (torchrun --nproc-per-node 4 -m consequent_lab.cli train …) the ranks share every mini-batch out
    among themselves, on CPUs or with a GPU each.
    """

    lr: float | None = None  # type: ignore[assignment]  # a number once it was looked up
    """The learning rate; None: 0.1 for sgd, 0.01 for momentum and nesterov, 0.003 for adam, 0.001 for rmsprop."""
    seeds: tuple[int, ...] = ()
    """Several runs that differ by their seeds, one after the other; instead of --seed."""
    search_lr: tuple[float, ...] = ()
    """Learning rates to try first, on nine tenths of the training set: the lowest loss on the last tenth decides."""
    search_damping: tuple[float, ...] = ()
    """Relative dampings to try in the same way, each with each learning rate."""
    runs: Path = Path("runs")
    """Where run folders are: this one is RUNS/train/NAME/seedSEED, those of a search are in RUNS/train-search."""
    name: str | None = None
    """Of the run; None: made from the options."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU if there is one."""
    data: str | None = None
    """The folder of the data sets; None: $CONSEQUENT_DATA, else ./data. Or your own data, as in --dataset."""

    def __post_init__(self) -> None:
        if self.lr is None:
            object.__setattr__(self, "lr", FIRST_RATES[self.optimiser])
        super().__post_init__()
        is_damped = self.damping is not None or self.relative_damping is not None
        if not self.consequentialist and (self.search_damping or is_damped):
            raise ValueError("a damping is for the C- versions, and --no-consequentialist is a plain one")
        if self.search_damping and is_damped:
            raise ValueError("--search-damping finds the relative damping: give no other damping beside it")
        if self.data is not None and is_own(self.data) and self.dataset != "digits":
            raise ValueError(
                f"--data {self.data} and --dataset {self.dataset} are two data sets: leave out one of both"
            )
        for value in (*self.search_lr, *self.search_damping):
            if not 0 < value < float("inf"):
                raise ValueError(f"--search-lr and --search-damping need positive numbers, got {value}")
        for seed in self.seeds:
            self.config(seed)  # raises on a bad one

    def config(self, seed: int | None = None) -> TrainConfig:
        """Returns what makes a run what it is, wherever it runs, with another seed if one is given."""
        options = {option.name: getattr(self, option.name) for option in fields(TrainConfig)}
        if self.data is not None and is_own(self.data):
            options["dataset"] = self.data
        if seed is not None:
            options["seed"] = seed
        return TrainConfig(**options)

    def run(self) -> None:
        """Searches and trains, and raises if a run diverged."""
        from consequent_lab.rank_group import joined

        screen = console()
        with joined(chosen_device(self.device)) as (ranks, device):
            config = self.config()
            if self.search_lr or self.search_damping:
                if ranks is not None:
                    raise ValueError(
                        "--search-lr and --search-damping are for one process: search first, without torchrun"
                    )
                config = self._searched(config, screen, device)
            variant = self.name or variant_of(config)
            seeds = self.seeds or (config.seed,)
            for seed in seeds:
                folder = self._folder("train", variant, seed, ranks)
                self._train(replace(config, seed=seed), folder, screen, device, ranks)
        if ranks is None or ranks.is_first:  # the ranks have parted: this reads for itself
            _report([self._folder("train", variant, seed) for seed in seeds], screen)

    def _folder(self, recipe: str, variant: str, seed: int, ranks: "RankGroup | None" = None) -> RunFolder:
        from consequent_lab.rank_group import RankGroupFolder

        folder = RunFolder.of(self.runs, recipe, variant, seed)
        return folder if ranks is None else RankGroupFolder(folder.path, ranks)

    def _train(
        self, config: TrainConfig, folder: RunFolder, screen: Console, device: str, ranks: "RankGroup | None" = None
    ) -> None:
        from consequent_lab.trainer import train

        data = None if self.data is None or is_own(self.data) else Path(self.data)
        if ranks is not None and not ranks.is_first:
            train(config, folder, device, data=data, ranks=ranks)
            return
        with ProgressBoard(screen) as board:
            watcher = RunLine(config.title, board)
            try:
                train(config, folder, device, data=data, watcher=watcher, ranks=ranks)
            except KeyboardInterrupt:
                if (folder.path / "checkpoint.pt").exists():
                    text = f"{folder.path} has a checkpoint: the same command goes on from it."
                    screen.print(text, soft_wrap=True)
                raise

    def _searched(self, config: TrainConfig, screen: Console, device: str) -> TrainConfig:
        """Returns the config with the best of the settings that are tried, each in a run of its own."""
        rates = sorted(self.search_lr) or [config.lr]
        dampings: list[float] | list[float | None] = sorted(self.search_damping) or [config.relative_damping]
        losses: dict[TrainConfig, float] = {}
        for lr, damping in product(rates, dampings):
            tried = replace(config, lr=lr, relative_damping=damping)
            trial = replace(tried, validation=config.validation or HELD_OUT)
            folder = self._folder("train-search", variant_of(trial), trial.seed)
            self._train(trial, folder, screen, device)
            last = folder.metrics()[-1]
            loss = last.get("validation_loss")
            losses[tried] = float("inf") if loss is None or "diverged" in last else loss
        best = min(losses, key=lambda tried: losses[tried])
        if losses[best] == float("inf"):
            raise DivergedError(f"every run of the search diverged; try smaller learning rates than {rates[0]:g}")
        words = f"learning rate {best.lr:g}"
        words += f" and relative damping {best.relative_damping:g}" if self.search_damping else ""
        screen.print(f"Best of {len(losses)}: {words}, validation loss {losses[best]:.4g}.")
        for what, value, some in (("learning rate", best.lr, rates), ("damping", best.relative_damping, dampings)):
            if len(some) > 1 and value in (some[0], some[-1]):
                end, beyond = ("smallest", "smaller") if value == some[0] else ("largest", "larger")
                screen.print(f"This {what} is the {end} that was tried: try {beyond} ones, too.")
        return best


def _report(folders: list[RunFolder], screen: Console) -> None:
    """Says where the runs are, and what several came to; raises if one diverged."""
    for folder in folders:
        screen.print(f"Run: {folder.path}", soft_wrap=True)
    if len(folders) > 1:
        screen.print(terminal_table(runs_at([folder.path for folder in folders])))
    diverged = [
        (folder, outcome) for folder in folders if (outcome := folder.outcome()) and outcome["outcome"] == "diverged"
    ]
    if diverged:
        config = diverged[0][0].config(TrainConfig)
        listed = ", ".join(f"{folder.path} at iteration {outcome['iteration']}" for folder, outcome in diverged)
        option = "relative-damping" if config.damping is None else "damping"
        larger = f", or a larger damping (--{option})" if config.consequentialist else ""
        raise DivergedError(
            f"the loss is not finite any more: {listed}. Try a smaller learning rate than {config.lr:g} (--lr), "
            f"a warm-up (--warm-up){larger}"
        )


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
    dataset, model = (name.replace(":", ".") for name in (config.dataset, config.model))
    return f"{dataset}-{model}-{config.optimiser_name.lower()}-lr{config.lr:g}-{digest}"


def chosen_device(device: Literal["auto", "cpu", "cuda"]) -> str:
    """Returns where to train; raises if it is not there."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA device here")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device
