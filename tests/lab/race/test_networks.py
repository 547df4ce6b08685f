from functools import partial

import torch
from torch import nn

from consequent_lab.models import residual_net
from consequent_lab.race.networks import InBfloat16, residual


def test_blocks_without_batch_norm_nearly_begin_as_their_shortcuts():
    def first_weights(make):
        torch.manual_seed(0)
        return {name: weight for name, weight in make((4, 8), 2).named_parameters() if weight.ndim > 1}

    usual = first_weights(partial(residual_net, batch_norm=False))
    for name, weight in first_weights(partial(residual, batch_norm=False)).items():
        torch.testing.assert_close(weight, 0.1 * usual[name] if "second" in name else usual[name])
    usual = first_weights(partial(residual_net, batch_norm=True))
    for name, weight in first_weights(partial(residual, batch_norm=True)).items():
        assert torch.equal(weight, usual[name])


def test_no_channel_of_it_is_dead():
    torch.manual_seed(0)
    model = residual((4, 8, 16), 1, batch_norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(64, 3, 16, 16), torch.randint(0, 10, (64,))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    for name, weight in model.named_parameters():
        assert (weight != before[name]).flatten(1).any(1).all() if weight.ndim > 1 else True, name


def test_in_bfloat16_nothing_changes_on_a_cpu():
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    assert torch.equal(InBfloat16(network)(torch.ones(1, 3)), network(torch.ones(1, 3)))
