"""The networks of the experiments are the ones they are named after."""

import pytest
import torch
from torch import nn

import consequent
from consequent_lab.models import BasicBlock, LanguageModel, residual_net, resnet20, resnet50


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("batch_norm", "count"), [(True, 269_722), (False, 269_034)])
def test_resnet20_has_the_size_of_the_paper(batch_norm, count):
    model = resnet20(batch_norm)
    assert parameters(model) == count
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 20
    assert all((layer.bias is None) == batch_norm for layer in layers[:-1])
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == (19 if batch_norm else 0)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_resnet20_starts_from_kaimings_numbers_and_no_bias():
    layers = [m for m in resnet20(False).modules() if isinstance(m, nn.Conv2d)]
    assert all(not layer.bias.any() for layer in layers)
    fan_in = layers[-1].weight[0].numel()
    assert layers[-1].weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.02)


def test_shortcut_skips_pixels_and_adds_channels_of_zeros():
    block = BasicBlock(2, 4, stride=2, batch_norm=False)
    nn.init.zeros_(block.second.weight)
    images = torch.rand(1, 2, 4, 4)
    outputs = block(images)
    assert torch.equal(outputs[:, :2], images[:, :, ::2, ::2])
    assert not outputs[:, 2:].any()


def test_residual_net_is_as_deep_and_wide_as_asked():
    model = residual_net((5, 7), blocks=2)
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 9
    assert model[:-3](torch.zeros(1, 3, 8, 8)).shape == (1, 7, 4, 4)


def test_resnet50_has_the_size_of_torchvisions():
    with torch.device("meta"):
        model = resnet50()
        assert parameters(model) == 25_557_032
        assert model[:-3](torch.zeros(1, 3, 224, 224)).shape == (1, 2048, 7, 7)
        assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)
    strided = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
    assert [m.kernel_size[0] for m in strided] == [7, 3, 1, 3, 1, 3, 1]


def test_language_model_has_the_size_of_gpt2_small():
    with torch.device("meta"):
        model = LanguageModel()
        assert parameters(model) == 124_439_808
        assert model(torch.zeros(2, 16, dtype=torch.long)).shape == (2, 16, 50257)


def test_language_model_shares_its_head_and_looks_only_back():
    model = LanguageModel(layers=2, width=32, heads=4, context=8, vocabulary=11)
    assert model.head.weight is model.tokens.weight
    tokens = torch.randint(0, 11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    difference = (model(tokens) - model(changed)).abs().sum(-1)[0]
    assert difference[:5].max() < 1e-5
    assert difference[5:].min() > 1e-5


def test_every_dense_layer_of_the_language_model_but_its_head_is_corrected():
    model = LanguageModel(layers=2, width=16, heads=2, context=8, vocabulary=11)
    correction = consequent.attach(torch.optim.AdamW(model.parameters()), model, exclude="head")
    assert len(correction.corrected) == 2 * 4
