"""What a config stands for on a device: the data, the model, the optimiser with or without its correction, the step.

A correction keeps a few things in mind that are in no state dict: which layers it has looked at, where it looks next.
They may decide between two ways of computing one number, which differ by rounding. To be able to go on bit for bit, a
learner settles on a state, whether it comes from a checkpoint or was just written to one: the correction is attached
anew and takes two steps that change nothing. Both then know the same.
"""

import contextlib
import hashlib
import math
import warnings
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import consequent
from consequent import Consequentialism
from consequent.maths.bound import DEFAULT as BOUND
from consequent.reports.counters import Counters
from consequent.reports.errors import StandstillError
from consequent_lab.augmentation import moved_and_mirrored
from consequent_lab.datasets import Dataset, prepared
from consequent_lab.graphs import GraphedStep
from consequent_lab.models import mlp, residual_net
from consequent_lab.own_code import own_model
from consequent_lab.rank_group import RankGroup
from consequent_lab.schedules import rate_factor
from consequent_lab.train_config import TrainConfig, is_own
from consequent_lab.training_metrics import GradientNorms, Samples, Tally, loss_of

REHEARSED_STEPS = 2  # the correction looks at its layers in the first one, and may take its fast ways in the second


class Learner:
    """All that changes in training, and the step that changes it.

    Nothing is trained before :meth:`settle`.

    Args:
        config: what is asked for.
        dataset: as it was read.
        device: where everything is to live.
        ranks: the ranks that share the run out among themselves.
    """

    def __init__(
        self, config: TrainConfig, dataset: Dataset, device: torch.device, ranks: RankGroup | None = None
    ) -> None:
        if ranks is not None:
            ranks.check_batch_size(config.batch_size)
            if config.graph:
                raise ValueError("graph: the step of several ranks cannot be a CUDA graph; leave it to the default")
        if config.graph and device.type != "cuda":
            raise ValueError(f"graph: a CUDA graph needs a CUDA device, and this is {device}; leave it to the default")
        changing = _what_changes(config)
        if config.graph and changing:
            raise ValueError(
                f"graph: a CUDA graph is every step the same, and {changing} is not; leave out one of both"
            )
        shape = tuple(dataset.train_images.shape[1:])
        if len(shape) != 3 and (config.augment or config.is_convolutional):
            what = f"augment {' '.join(config.augment)}" if config.augment else f"model {config.model}"
            raise ValueError(
                f"{what} is for images [N, channels, height, width]; these inputs are [N, {str(shape)[1:-1]}]"
            )
        if dataset.classes is None and not is_own(config.model) and dataset.train_labels[0].ndim != 1:
            targets = list(dataset.train_labels.shape)
            raise ValueError(
                f"model {config.model} has outputs [N, n], and these targets are {targets}: give a model of your own"
            )
        self.config = config
        self._shape = shape
        self.device = device
        self._ranks = ranks
        flat = not config.is_convolutional
        data = prepared(dataset, config.normalisation, device, flat=flat)
        self._channels_last = channels_last = config.is_convolutional and config.channels_last
        self.train_samples = Samples(data.train_inputs, data.train_labels, channels_last=channels_last)
        self.test_samples = Samples(data.test_inputs, data.test_labels, channels_last=channels_last)
        self._generator = torch.Generator(device)  # of augmentations; seeded in every step
        self._augments = False
        self.model = _first_model(config, dataset).to(device)
        if channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._trained = self.model if ranks is None else ranks.wrap(self.model, device)
        self._wants_graph = device.type == "cuda" and config.graph is not False and ranks is None and not changing
        self.optimizer = build_optimizer(config, self.model, capturable=self._wants_graph)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.correction: Consequentialism | None = None
        self.tally = Tally(device, None if ranks is None else ranks.add_up)
        self.norms = GradientNorms(self.model, keep_plain=config.gradient_norms == "both")
        self._graphed: GraphedStep | None = None

    def step(self, indices: Tensor, iteration: int, total: int) -> None:
        """Trains on the samples with these indices, and counts them.

        Learning rate and random numbers depend on the iteration alone: nothing needs to be kept to go on with them.
        """
        config = self.config
        if config.schedule != "constant" or config.warm_up:
            factor = rate_factor(config, iteration, total)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = factor * rate
        if is_own(config.model):  # there may be dropout in it
            torch.manual_seed(_number(f"seed {config.seed}, iteration {iteration}"))
        if config.augment:
            self._generator.manual_seed(_number(f"seed {config.seed}, images of iteration {iteration}"))
            self._augments = True
        if self._graphed is None:
            self._eager_step(indices)
        else:
            self._graphed(indices)

    @property
    def is_graphed(self) -> bool:
        """Whether the step is replayed as a CUDA graph."""
        return self._graphed is not None

    def share_buffers(self) -> None:
        """Gives all ranks the same running statistics, as they have the same weights."""
        if self._ranks is not None:
            self._ranks.share_buffers(self.model)

    def counters(self) -> dict[str, int]:
        """Returns what the correction counted; waits for the device."""
        return {} if self.correction is None else asdict(self.correction.counters)

    def foresight(self) -> dict[str, dict[str, float]]:
        """Returns, by layer, how large the wanted and the produced change of its outputs was in the last step.

        Beside their lengths, the cosines between what was wanted and the step, and what the plain gradient would have
        had. Nothing if the last step was skipped.
        """
        assert self.correction is not None
        try:
            layers = self.correction.foresight()
        except RuntimeError:
            return {}
        return {
            name: {
                "wanted": _length(layer.wanted),
                "produced": _length(layer.produced),
                "cosine": layer.cosine,
                "backprop_cosine": layer.backprop_cosine,
            }
            for name, _ in self.model.named_modules()  # in their order
            if (layer := layers.get(name)) is not None
        }

    # ---- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of all that changes in training, on the CPU."""
        self.share_buffers()
        return {
            "model": {name: _copied(tensor) for name, tensor in self.model.state_dict().items()},
            "optimizer": [
                {key: _copied(value) for key, value in self.optimizer.state[parameter].items()}
                for parameter in self._parameters()
            ],
            "tally": _copied(self.tally.values),
            "counters": self.counters(),
        }

    def settle(self, state: dict[str, Any] | None = None) -> None:
        """Makes everything ready to train on from a state, always in the same way.

        Args:
            state: from :meth:`state_dict`; None is the present one.
        """
        state = self.state_dict() if state is None else state
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise ValueError(f"the checkpoint is of another model than {self.config.model} is now: {error}") from error
        self._attach()
        self._rehearse()
        if self._wants_graph:
            self._capture()
        self._restore(state)

    def _restore(self, state: dict[str, Any]) -> None:
        """Writes a state into the tensors that are there: a captured step knows them by their addresses."""
        self.model.load_state_dict(state["model"])
        with torch.no_grad():
            for parameter, saved in zip(self._parameters(), state["optimizer"], strict=True):
                for key, value in self.optimizer.state[parameter].items():
                    if not isinstance(value, Tensor):
                        raise TypeError(f"{type(self.optimizer).__name__} keeps {key!r} as a {type(value).__name__}")
                    if saved:
                        value.copy_(saved[key])
                    else:
                        value.zero_()  # what every one of the optimisers starts from
            self.tally.values.copy_(state["tally"])
        if self.correction is not None:
            counters = state["counters"] or asdict(Counters())
            self.correction.load_state_dict({**self.correction.state_dict(), "counters": counters})

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    # ---- getting ready ------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        if self.correction is not None:
            self.correction.detach()
        self.norms.watch(self.optimizer)  # first: it is to see the gradients before the correction does
        if self.config.consequentialist:
            self.correction = consequent.attach(
                self.optimizer,
                self.model,
                damping=self.config.damping,
                relative_damping=self.config.relative_damping,
                bound=None if self.config.damping is not None else BOUND,
                foresight=self.config.foresight,
            )

    def _rehearse(self) -> None:
        self._augments = False
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for _ in range(REHEARSED_STEPS):
            self._eager_step(self._first_indices())
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _capture(self) -> None:
        try:
            self._graphed = GraphedStep(self.model, self.optimizer, self._loss, (self._first_indices(),), warm_up=3)
        except RuntimeError as error:
            if self.config.graph:
                raise
            warnings.warn(f"the step cannot be captured in a CUDA graph and is run as it is: {error}", stacklevel=2)
            self._wants_graph = False
            self._attach()
            self._rehearse()

    def _first_indices(self) -> Tensor:
        return torch.arange(self.config.batch_size, device=self.device)

    # ---- the step -----------------------------------------------------------------------------------------------

    def _eager_step(self, indices: Tensor) -> None:
        self.optimizer.zero_grad()
        self._loss(self._trained, indices).backward()
        with contextlib.suppress(StandstillError):  # the next reading sees it, and ends the run
            self.optimizer.step()

    def _loss(self, model: nn.Module, indices: Tensor) -> Tensor:
        inputs, targets = self._batch(indices)
        outputs = model(inputs)
        loss = loss_of(outputs, targets, "mean")
        self.tally.add(loss.detach(), outputs.detach(), targets)
        return loss

    def _batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this rank's inputs and targets of a mini-batch."""
        share = (lambda tensor: tensor) if self._ranks is None else self._ranks.share
        if not self._augments:
            return self.train_samples.take(share(indices))
        inputs, targets = self.train_samples.take(indices)  # all of them: random numbers are drawn for the mini-batch
        images = moved_and_mirrored(inputs.reshape(-1, *self._shape), self.config.augment, self._generator)
        if self._channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return share(images.reshape(inputs.shape) if inputs.ndim == 2 else images), share(targets)


def _what_changes(config: TrainConfig) -> str:
    """Returns what makes a step another one than the step before, or needs more than its numbers."""
    changing = {
        f"the schedule {config.schedule}": config.schedule != "constant",
        "a warm-up": config.warm_up > 0,
        "augmentation": bool(config.augment),
        "a step that is looked at (foresight)": config.foresight,
        f"the model {config.model}, which may draw random numbers,": is_own(config.model),
    }
    return next((what for what, is_there in changing.items() if is_there), "")


def _first_model(config: TrainConfig, dataset: Dataset) -> nn.Module:
    if is_own(config.model):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return own_model(config.model, dataset)
    outputs = dataset.train_labels.shape[-1] if dataset.classes is None else dataset.classes
    return build_model(config, tuple(dataset.train_images.shape[1:]), outputs)


def build_model(config: TrainConfig, shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Returns the model with the seed's first weights, the same on every device.

    Args:
        config: names the model and the seed.
        shape: of an image: channels, height, width.
        classes: how many there are.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.model == "mlp":
            return mlp(torch.Size(shape).numel(), config.hidden, classes)
        batch_norm = config.model == "resnet20-bn"
        return residual_net(config.widths, config.blocks, batch_norm, channels=shape[0], classes=classes)


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
    decay = config.weight_decay
    if config.optimiser == "adam":
        kind = AdamW if decay else Adam  # decay beside the moments, not through them
        return kind(groups, lr=config.lr, betas=config.betas, weight_decay=decay, capturable=capturable)
    if config.optimiser == "rmsprop":
        return RMSprop(groups, lr=config.lr, weight_decay=decay, capturable=capturable)
    momentum = 0.0 if config.optimiser == "sgd" else config.momentum
    nesterov = config.optimiser == "nesterov"
    return SGD(groups, lr=config.lr, momentum=momentum, nesterov=nesterov, weight_decay=decay)


def permutation(seed: int, epoch: int, samples: int, device: torch.device) -> Tensor:
    """Returns the order of samples in an epoch, made on the device.

    It depends on the seed and the epoch alone: nothing needs to be kept to make it again.

    >>> first = permutation(0, 0, 5, torch.device("cpu"))
    >>> sorted(first.tolist()), torch.equal(first, permutation(0, 0, 5, torch.device("cpu")))
    ([0, 1, 2, 3, 4], True)
    """
    generator = torch.Generator(device).manual_seed(_number(f"seed {seed}, epoch {epoch}"))
    return torch.randperm(samples, generator=generator, device=device)


def _number(text: str) -> int:
    """Returns a seed that has nothing to do with those of other texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _length(tensors: tuple[Tensor, ...]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
