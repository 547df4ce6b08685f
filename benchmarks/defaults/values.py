"""Temporal differences: Q-learning with a target network, where the truth is known."""

import copy
import math

import torch
from torch import Tensor, nn

from benchmarks.defaults.task import Task, of, perceptron, random_numbers, shuffled

SIDE = 10
DISCOUNT = 0.9
SLIP = 0.1  # how often a move goes elsewhere
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


def maze(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A square with walls and a goal.

    Returns:
        Where each move leads without slipping, ``[states, moves]``, and the reward of being in a state, ``[states]``.
    """
    is_wall = torch.rand(SIDE, SIDE, generator=generator) < 0.2
    goal = torch.randint(SIDE, (2,), generator=generator)
    is_wall[goal[0], goal[1]] = False
    places = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))
    there = (places[:, None] + MOVES).clamp(0, SIDE - 1)
    there = torch.where(is_wall[there[..., 0], there[..., 1]][..., None], places[:, None], there)
    rewards = torch.zeros(SIDE, SIDE)
    rewards[goal[0], goal[1]] = 1.0
    return there[..., 0] * SIDE + there[..., 1], rewards.flatten()


def true_values(leads_to: Tensor, rewards: Tensor) -> Tensor:
    """Q of the best policy, ``[states, moves]``, by value iteration."""
    values = torch.zeros(leads_to.shape)
    for _ in range(300):
        of_moves = rewards[leads_to] + DISCOUNT * values.amax(1)[leads_to]
        values = (1 - SLIP) * of_moves + SLIP * of_moves.mean(1, keepdim=True)
    return values


def fourier_features() -> Tensor:
    """Coordinates of all places and some of their waves, ``[states, 14]``."""
    places = torch.cartesian_prod(*(2 * [torch.linspace(-1, 1, SIDE)]))
    waves = [wave(math.pi / 2 * k * places) for k in (1, 2, 4) for wave in (torch.sin, torch.cos)]
    return torch.cat([places, *waves], 1)


def q_learning(seed: int) -> Task:
    """The values of moves in a maze from remembered transitions; the measure is the distance from the true values."""
    generator = random_numbers(seed)
    leads_to, rewards = maze(generator)
    transitions = 8192
    states = torch.randint(SIDE**2, (transitions,), generator=generator)
    moves = torch.randint(4, (transitions,), generator=generator)
    slips = torch.rand(transitions, generator=generator) < SLIP
    real_moves = torch.where(slips, torch.randint(4, (transitions,), generator=generator), moves)
    nexts = leads_to[states, real_moves]
    features, truth = fourier_features(), true_values(leads_to, rewards)

    torch.manual_seed(seed)
    model = perceptron(14, 64, 64, 4)
    target_network = copy.deepcopy(model)

    def loss(states: Tensor, moves: Tensor, nexts: Tensor) -> Tensor:
        with torch.no_grad():
            targets = rewards[nexts] + DISCOUNT * target_network(features[nexts]).amax(1)
        values = model(features[states]).gather(1, moves[:, None]).squeeze(1)
        return nn.functional.mse_loss(values, targets)

    def update_target_network(steps: int) -> None:
        if steps % 20 == 0:
            target_network.load_state_dict(model.state_dict())

    def distance() -> Tensor:
        return nn.functional.mse_loss(model(features), truth)

    return Task(
        model,
        shuffled(64, states, moves, nexts, seed=seed),
        loss,
        steps=600,
        measure=of(distance),
        loss_reduction=lambda samples: samples * 1 / 2,
        after_step=update_target_network,
    )
