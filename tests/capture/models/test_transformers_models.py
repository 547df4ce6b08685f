"""Real models of transformers, tiny and with random weights: each layer is corrected, or listed with the reason."""

import copy

import pytest
import torch
from torch import nn

import consequent
from consequent.engines.engine import Work
from consequent.engines.unwatched import Unwatched
from consequent.maths.damping import Damping
from models.expected import check_training

transformers = pytest.importorskip("transformers")
WORDS, SAMPLES, LENGTH, CLASSES = 11, 3, 5, 2


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=1,
            n_embd=8,
            n_head=2,
            vocab_size=WORDS,
            n_positions=8,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def bert():
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            num_hidden_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            intermediate_size=6,
            vocab_size=WORDS,
            num_labels=CLASSES,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
    )


def vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            num_hidden_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            intermediate_size=6,
            image_size=6,
            patch_size=3,
            num_channels=2,
            num_labels=CLASSES,
        )
    )


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=1,
            hidden_size=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=6,
            vocab_size=WORDS,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )


def convnext():
    return transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(
            num_channels=2,
            patch_size=2,
            num_stages=2,
            hidden_sizes=[3, 4],
            depths=[1, 1],
            num_labels=CLASSES,
            layer_scale_init_value=0.3,
        )
    )


def words(labels):
    return {"input_ids": torch.randint(0, WORDS, (SAMPLES, LENGTH)), "labels": labels}


def language():
    inputs = words(None)
    return inputs | {"labels": inputs["input_ids"].clone()}, SAMPLES * (LENGTH - 1)


def text():
    return words(torch.randint(0, CLASSES, (SAMPLES,))), SAMPLES


def pictures(side):
    pixels = torch.randn(SAMPLES, 2, side, side, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (SAMPLES,))}, SAMPLES


# name: (model, inputs and what the loss is divided by, how many layers are corrected, types of the plain ones)
MODELS = {
    "gpt2": (gpt2, language, 4, {"Embedding", "LayerNorm", "Linear"}),  # the tied readout is the Linear one
    "bert": (bert, text, 8, {"Embedding", "LayerNorm"}),
    "vit": (vit, lambda: pictures(6), 8, {"ViTEmbeddings", "LayerNorm"}),
    "llama": (llama, language, 8, {"Embedding", "LlamaRMSNorm"}),
    "convnext": (convnext, lambda: pictures(8), 9, {"ConvNextLayer", "ConvNextLayerNorm", "LayerNorm"}),
}


def linear_of(layer):
    """The Linear layer that a Conv1D is."""
    result = nn.Linear(*layer.weight.shape, dtype=layer.weight.dtype)
    with torch.no_grad():
        result.weight.copy_(layer.weight.mT)
        result.bias.copy_(layer.bias)
    return result


def with_linear(model):
    """A copy of the model in which every Conv1D is a Linear layer."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "Conv1D":
                setattr(module, name, linear_of(child))
    return model


def build(name):
    torch.manual_seed(0)
    make, inputs, _, _ = MODELS[name]
    batch, divisor = inputs()
    model = make().double()
    for parameter in model.parameters():  # the usual 0.02 leaves nothing to see in so small a model
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model, (lambda m: m(**batch).loss), divisor


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_reference(name):
    model, loss, divisor = build(name)
    _, _, count, plain_types = MODELS[name]
    original, model = model, with_linear(model)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d) and n != "lm_head"]
    if name == "llama":
        names.append("lm_head")  # not tied
    correction = check_training(model, loss, divisor, damping=0.1, corrected=names, loss_reduction=float(divisor))
    assert sorted(correction.corrected) == sorted(names)
    assert len(names) == count
    modules = dict(model.named_modules())
    assert {type(modules[name]).__name__ for name in correction.plain} == plain_types
    listed = {*correction.corrected, *correction.plain}
    assert listed == {n for n, m in original.named_modules() if list(m.parameters(recurse=False))}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("samples", [1, SAMPLES, 40])
def test_conv1d_of_gpt2_is_a_linear_layer(samples, optimizer):
    """Samples and features as the smaller side; the same weights as with Linear layers in its place."""
    model, _, _ = build("gpt2")
    twin = with_linear(model)
    tokens = torch.randint(0, WORDS, (samples, LENGTH))
    for m in (model, twin):
        steps = optimizer(m.parameters(), lr=0.01)
        correction = consequent.attach(steps, m, damping=0.1, foresight=m is model, loss_reduction="tokens")
        for _ in range(3):
            steps.zero_grad()
            m(input_ids=tokens, labels=tokens).loss.backward()
            steps.step()
        assert len(correction.corrected) == 4
    assert correction.plain["lm_head"] == "its weight is shared with 'transformer.wte', which is not corrected"
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        expected = theirs[name].mT if ".c_" in name and parameter.ndim == 2 else theirs[name]
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_conv1d_with_edited_gradients(clip):
    model, _, _ = build("gpt2")
    twin = with_linear(model)
    tokens = torch.randint(0, WORDS, (1, LENGTH))
    for m in (model, twin):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.01)
        consequent.attach(optimizer, m, damping=0.1, loss_reduction="tokens")
        m(input_ids=tokens, labels=tokens).loss.backward()
        if clip == "norm":
            nn.utils.clip_grad_norm_(m.parameters(), 0.01)
            optimizer.step()
        else:
            nn.utils.clip_grad_value_(m.parameters(), 0.001)
            with pytest.warns(consequent.ConsequentWarning):
                optimizer.step()
    ours, theirs = model.transformer.h[0].mlp.c_fc, twin.transformer.h[0].mlp.c_fc
    torch.testing.assert_close(ours.weight.mT, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


def test_conv1d_that_computes_something_else_is_listed():
    class Exponential(transformers.pytorch_utils.Conv1D):
        def forward(self, x):
            return super().forward(x).exp()

    model = nn.Sequential(Exponential(4, 3), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    model(torch.randn(6, 3)).square().mean().backward()
    with pytest.warns(consequent.ConsequentWarning, match="'0' keeps its plain gradient"):
        optimizer.step()
    assert correction.plain == {"0": "its forward does not multiply inputs with its weight as it is"}


def test_conv1d_shows_up_by_its_name():
    model, loss, _ = build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, model, loss_reduction="tokens")
    loss(model).backward()
    optimizer.step()
    assert "transformer.h.0.mlp.c_proj   Conv1D, 33 input columns" in repr(correction)


@pytest.mark.parametrize("edited", [False, True])
def test_conv1d_on_a_device_that_is_not_waited_for(edited):
    torch.manual_seed(0)
    conv1d = transformers.pytorch_utils.Conv1D(3, 12)
    gradients = []
    inputs = torch.randn(5, 12)
    for layer in (conv1d, linear_of(conv1d)):
        correction = consequent.Consequentialism(layer)
        layer(inputs).square().sum().backward()
        if edited:
            layer.weight.grad.clamp_(-0.1, 0.1)
        (record,) = correction._parts.corrector.filled_records()
        (solution,) = Unwatched().solve([Work(record, Damping(0.1), may_wait=False, scale=1.0)])
        assert bool(solution.edited) == edited
        solution.write(torch.tensor(True))
        gradients.append(layer.weight.grad)
    torch.testing.assert_close(gradients[0].mT, gradients[1])
