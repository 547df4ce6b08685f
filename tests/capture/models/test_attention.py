"""nn.MultiheadAttention multiplies with out_proj's weight without calling it: plain; the rest is corrected."""

import pytest
import torch
from torch import nn

import consequent
from models.expected import check_training, half_squares


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("length", [1, 6])
def test_transformer_encoder_layer(length, training):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, dropout=0.0, batch_first=True), nn.Linear(8, 2)
    ).double()
    model.train(training)
    x = torch.randn(3, length, 8, dtype=torch.float64)
    correction = check_training(
        model, lambda m: half_squares(m(x)), 3, corrected=["0.linear1", "0.linear2", "1"], damping=0.1
    )
    assert list(correction.corrected) == ["0.linear1", "0.linear2", "1"]
    assert correction.plain["0.self_attn.out_proj"] == "nn.MultiheadAttention uses its weight without calling it"
    assert set(correction.plain) == {"0.self_attn", "0.self_attn.out_proj", "0.norm1", "0.norm2"}


def test_attention_with_separate_projections_between_layers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(3, 4)
            self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True)

        def forward(self, x):
            return self.attention(self.embed(x), x, x, need_weights=False)[0]

    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    correction = check_training(Model().double(), lambda m: half_squares(m(x)), 2, corrected=["embed"])
    assert list(correction.corrected) == ["embed"]


def test_attention_alone_has_nothing_to_correct():
    model = nn.MultiheadAttention(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="nothing in this model can be corrected") as raised:
        consequent.attach(optimizer, model)
    assert "out_proj: nn.MultiheadAttention uses its weight without calling it" in str(raised.value)
