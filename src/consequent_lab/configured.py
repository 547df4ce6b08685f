"""What a config stands for on a device: the data, the model, the optimiser with or without its correction."""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from consequent.maths.bound import DEFAULT as BOUND
from consequent_lab.augmentation import augmented
from consequent_lab.datasets import Dataset, prepared
from consequent_lab.learner import Learner, first_model, seed_number
from consequent_lab.models import mlp, residual_net
from consequent_lab.optimizers import Optimizers, plain_optimizer
from consequent_lab.own_code import own_model
from consequent_lab.rank_group import RankGroup
from consequent_lab.samples import usual_loss
from consequent_lab.schedules import rate_factor
from consequent_lab.train_config import TrainConfig, is_own
from consequent_lab.training_metrics import Tally, gradient_norms


class ConfiguredLearner(Learner):
    """The learner of a config, whose state can be kept and gone on from; ranks share the run out among themselves.

    Nothing is trained before :meth:`settle`.
    """

    def __init__(
        self, config: TrainConfig, dataset: Dataset, device: torch.device, ranks: RankGroup | None = None
    ) -> None:
        _refuse(config, dataset, device, ranks)
        channels_last = config.is_convolutional and config.channels_last
        data = prepared(dataset, config.normalisation, device, not config.is_convolutional, channels_last)
        model = build_model(config, dataset).to(device)
        if channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._wants_graph = (
            device.type == "cuda" and config.graph is not False and ranks is None and not _what_changes(config)
        )

        def augment(inputs: Tensor, generator: torch.Generator) -> Tensor:
            images = inputs.reshape(-1, *dataset.train_images.shape[1:])
            return augmented(images, config.augment, generator).reshape(inputs.shape)

        super().__init__(
            model,
            Optimizers(model, [build_optimizer(config, model, capturable=self._wants_graph)]),
            data.train,
            usual_loss,
            config.batch_size,
            config.seed,
            augment if config.augment else None,
        )
        self.test_samples = data.test
        self.config = config
        self.tally = Tally(device, config.batch_size, self.per_epoch, None if ranks is None else ranks.add_up)
        self._ranks = ranks
        self._failed_before = 0
        if ranks is not None:
            self._called = ranks.wrap(model, device)

    def step(self, iteration: int, total: int) -> None:
        """Takes the step of an iteration, out of so many, and counts its samples.

        Learning rate and random numbers depend on the iteration alone: nothing needs to be kept to go on with them.
        """
        if self.config.schedule != "constant" or self.config.warm_up:
            self.schedule(rate_factor(self.config, iteration, total))
        if is_own(self.config.model):  # there may be dropout in it
            torch.manual_seed(seed_number(self.config.seed, "iteration", iteration))
        self.tally.begin(iteration)
        self.learn(self.batch(iteration))
        self.tally.end(iteration)

    def loss(self, model: nn.Module, indices: Tensor) -> Tensor:
        """Returns the loss over this rank's share of the samples, and counts them."""
        inputs, targets = self._trained_on.take(indices if self._ranks is None else self._ranks.share(indices))
        outputs = model(inputs)
        loss = self._loss(outputs, targets)
        self.tally.add(loss.detach(), outputs.detach(), targets)
        return loss

    def share_buffers(self) -> None:
        """Gives all ranks the same running statistics, as they have the same weights."""
        if self._ranks is not None:
            self._ranks.share_buffers(self.model)

    def failed(self) -> int:
        """Returns how many factorisations of the correction failed; waits for the device."""
        correction = self.optimizers.correction
        return self._failed_before + (0 if correction is None else correction.failed)

    def gradient_norms(self, iteration: int) -> dict[str, dict[str, float]]:
        """Returns norms of gradients by layer: what the optimiser got in the last step, and, if asked for, plain ones.

        Plain ones are those of backpropagation on the same mini-batch, with the weights of now.
        """
        norms = {"applied": gradient_norms(self.model)}
        if self.config.gradient_norms == "both":
            twin = copy.deepcopy(self.model)  # which has no correction
            twin.zero_grad()
            with torch.random.fork_rng(devices=[self.samples.device] if self.samples.device.type == "cuda" else []):
                super().loss(twin, self.batch(iteration)).backward()
            norms["plain"] = gradient_norms(twin)
        return norms

    # ---- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of all that changes in training, on the CPU."""
        self.share_buffers()
        return {
            "model": {name: _copied(tensor) for name, tensor in self.model.state_dict().items()},
            "optimizer": [{key: _copied(value) for key, value in state.items()} for state in self.optimizers.states],
            "tally": _copied(self.tally.values),
            "failed": self.failed(),
        }

    def settle(self, state: dict[str, Any] | None = None) -> None:
        """Makes everything ready to train on from a state of :meth:`state_dict`, or from the present one."""
        state = self.state_dict() if state is None else state
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise ValueError(f"the checkpoint is of another model than {self.config.model} is now: {error}") from error
        self.forget_epoch()
        self._attach()
        if self._wants_graph:
            self._capture()
        self._restore(state)

    def _restore(self, state: dict[str, Any]) -> None:
        """Writes a state into the tensors that are there: a captured step knows them by their addresses."""
        self.model.load_state_dict(state["model"])
        with torch.no_grad():
            for kept, saved in zip(self.optimizers.states, state["optimizer"], strict=True):
                for key, value in kept.items():
                    if not isinstance(value, Tensor):
                        optimiser = type(self.optimizers.parts[0]).__name__
                        raise TypeError(f"{optimiser} keeps {key!r} as a {type(value).__name__}")
                    if saved:
                        value.copy_(saved[key])
                    else:
                        value.zero_()  # what every one of the optimisers starts from
            self.tally.values.copy_(state["tally"])
        self._failed_before += state.get("failed", 0) - self.failed()

    def _attach(self) -> None:
        """Attaches the correction, and takes a step of length 0, in which the optimiser makes what it keeps."""
        if self.config.consequentialist:
            self.optimizers.attach(
                damping=self.config.damping,
                relative_damping=self.config.relative_damping,
                averaging=0,  # as in the paper
                bound=None if self.config.damping is not None else BOUND,
            )
        self.optimizers.schedule(0.0)
        self.eager_step(self._first_indices())
        self.optimizers.schedule(1.0)

    def _capture(self) -> None:
        try:
            self.capture(self._first_indices(), warm_up=3)
        except RuntimeError as error:
            if self.config.graph:
                raise
            warnings.warn(f"the step cannot be captured in a CUDA graph and is run as it is: {error}", stacklevel=2)
            self._wants_graph = False
            self._attach()

    def _first_indices(self) -> Tensor:
        return torch.arange(self.config.batch_size, device=self.samples.device)


# ---- what fits together ------------------------------------------------------------------------------------------


def _refuse(config: TrainConfig, dataset: Dataset, device: torch.device, ranks: RankGroup | None) -> None:
    """Raises if the config does not fit the data or the device."""
    if ranks is not None:
        if config.batch_size % ranks.size:
            raise ValueError(f"batch_size {config.batch_size} cannot be shared out equally among {ranks.size} ranks")
        if config.graph:
            raise ValueError("graph: the step of several ranks cannot be a CUDA graph; leave it to the default")
    if config.graph and device.type != "cuda":
        raise ValueError(f"graph: a CUDA graph needs a CUDA device, and this is {device}; leave it to the default")
    if config.graph and (changing := _what_changes(config)):
        raise ValueError(f"graph: a CUDA graph is every step the same, and {changing} is not; leave out one of both")
    shape = tuple(dataset.train_images.shape[1:])
    if len(shape) != 3 and (config.augment or config.is_convolutional):
        what = f"augment {' '.join(config.augment)}" if config.augment else f"model {config.model}"
        raise ValueError(f"{what} is for images [N, channels, height, width]; these inputs are [N, {str(shape)[1:-1]}]")
    if dataset.classes is None and not is_own(config.model) and dataset.train_labels[0].ndim != 1:
        targets = list(dataset.train_labels.shape)
        raise ValueError(
            f"model {config.model} has outputs [N, n], and these targets are {targets}: give a model of your own"
        )


def _what_changes(config: TrainConfig) -> str:
    """Returns what makes a step another one than the step before, or needs more than its numbers."""
    changing = {
        f"the schedule {config.schedule}": config.schedule != "constant",
        "a warm-up": config.warm_up > 0,
        f"the model {config.model}, which may draw random numbers,": is_own(config.model),
    }
    return next((what for what, is_there in changing.items() if is_there), "")


# ---- what it is made of ------------------------------------------------------------------------------------------


def build_model(config: TrainConfig, dataset: Dataset) -> nn.Module:
    """Returns the model with the seed's first weights."""

    def make() -> nn.Module:
        if is_own(config.model):
            return own_model(config.model, dataset)
        shape = dataset.train_images.shape[1:]
        outputs = dataset.train_labels.shape[-1] if dataset.classes is None else dataset.classes
        if config.model == "mlp":
            return mlp(shape.numel(), config.hidden, outputs)
        batch_norm = config.model == "resnet20-bn"
        return residual_net(config.widths, config.blocks, batch_norm, channels=shape[0], classes=outputs)

    return first_model(config.seed, make)


def build_optimizer(config: TrainConfig, model: nn.Module, *, capturable: bool) -> Optimizer:
    """Returns the plain optimiser; the last layer is a group of its own where its learning rate differs."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if config.head_lr_factor != 1:
        dense = [module for module in model.modules() if isinstance(module, nn.Linear)]
        if not dense:
            raise ValueError(f"head_lr_factor {config.head_lr_factor}: {config.model} has no nn.Linear; leave it at 1")
        head = list(dense[-1].parameters())
        body = [parameter for parameter in parameters if not any(parameter is one for one in head)]
        groups = [{"params": body}, {"params": head, "lr": config.head_lr_factor * config.lr}]
    # Adam's decay is beside the moments, not through them.
    name = "adamw" if config.optimiser == "adam" and config.weight_decay else config.optimiser
    return plain_optimizer(
        name,
        groups,
        config.lr,
        config.weight_decay,
        momentum=config.momentum,
        betas=config.betas,
        capturable=capturable,
    )


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
