"""What holds for embeddings and for bags of them."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from embedding_cases import ROWS, WIDTH
from torch import nn

from consequent.layers.embedding import Embedding
from consequent.layers.embedding_bag import EmbeddingBag


@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_indices_have_no_gradient(kind):
    module = nn.Embedding(2, 2) if kind is Embedding else nn.EmbeddingBag(2, 2)
    with pytest.raises(TypeError, match="indices"):
        kind.of(module).input_gradient(torch.ones(1, 2), torch.ones(2, 2), torch.zeros(1, dtype=torch.int64))


def test_calls_of_the_functions_may_count_padding_from_the_end():
    weight, offsets = torch.randn(ROWS, WIDTH), torch.tensor([0])
    for kind, layer, function in (
        (Embedding, nn.Embedding, F.embedding),
        (EmbeddingBag, nn.EmbeddingBag, F.embedding_bag),
    ):
        operation = kind.of(layer(ROWS, WIDTH))
        given = {"padding_idx": -2} | ({"offsets": offsets} if kind is EmbeddingBag else {})
        call = operation.product_called(function, (torch.tensor([1, 5]), weight), given)
        assert call.operation.padding_idx == 5
        assert call.operation.input_rows(call.inputs).sum() == 1


@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
@pytest.mark.parametrize(
    ("setting", "value"), [("padding_idx", 1), ("max_norm", 2.0), ("norm_type", 1.0), ("sparse", True)]
)
def test_changed_settings_are_seen(kind, setting, value):
    module = nn.Embedding(ROWS, WIDTH) if kind is Embedding else nn.EmbeddingBag(ROWS, WIDTH)
    operation = kind.of(module)
    assert operation.is_current(module)
    setattr(module, setting, value)
    assert not operation.is_current(module)


def test_sparse_tensors_do_not_warn():
    """Torch warns of sparse tensors once per process: so in one of its own."""
    script = """
import torch
from consequent.layers.embedding import Embedding
from consequent.layers.embedding_bag import EmbeddingBag
table = torch.nn.Embedding(5, 2, sparse=True)
lookup, indices, *_ = Embedding.of(table).canonical(torch.tensor([1, 2, 2]))
lookup.corrected(lookup.weight_gradient(indices, torch.ones(3, 2)), lookup.counts(indices), 0.1)
module = torch.nn.EmbeddingBag(5, 2)
operation, inputs, *_ = EmbeddingBag.of(module).canonical(torch.tensor([[1, 2], [2, 4]]))
operation.gram(inputs)
operation.second_moment(inputs, ones=True)
operation.weight_gradient(inputs, operation.apply(inputs, module.weight, None).detach())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Sparse" not in done.stderr
