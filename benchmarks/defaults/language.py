"""A small GPT: on characters of Python's own documentation, and on symbols to be sorted."""

import importlib
import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.defaults.task import LEARNED_BY_HEART, Batch, Task, of, random_numbers

MODULES = ("argparse", "collections", "datetime", "decimal", "doctest", "heapq", "json", "pathlib", "pickle")
MODULES += ("random", "statistics", "string", "textwrap", "tokenize", "unittest", "warnings", "zipfile")


class Attention(nn.Module):
    """Causal self-attention with two heads."""

    heads = 2

    def __init__(self, width: int) -> None:
        super().__init__()
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[sequences, length, width]`` to the same."""
        sequences, length, width = inputs.shape
        separate = self.queries_keys_values(inputs).view(sequences, length, 3, self.heads, width // self.heads)
        queries, keys, values = separate.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.output(attended.transpose(1, 2).reshape(sequences, length, width))


class Layer(nn.Module):
    """Attention and a perceptron, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.second_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        """``[sequences, length, width]`` to the same."""
        inputs = inputs + self.attention(self.first_norm(inputs))
        return inputs + self.perceptron(self.second_norm(inputs))


class GPT(nn.Module):
    """Two layers, 32 wide."""

    def __init__(self, symbols: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(Layer(width), Layer(width), nn.LayerNorm(width))
        self.head = nn.Linear(width, symbols)
        nn.init.normal_(self.symbols.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[sequences, length]`` to logits of the next ones ``[sequences, length, symbols]``."""
        embedded = self.symbols(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.layers(embedded))


def documentation() -> str:
    """Docstrings of Python's standard library; their text depends on the version of Python."""
    texts = []
    for module in map(importlib.import_module, MODULES):
        members = [value for _, value in inspect.getmembers(module)]
        own = [value for value in members if getattr(value, "__module__", "") == module.__name__]
        texts += [inspect.getdoc(value) or "" for value in (module, *own)]
    text = "\n\n".join(texts)
    if len(text) < 50_000:
        raise RuntimeError("Python's docstrings are missing (python -OO?): there is no text to learn from")
    return "".join(character for character in text if character == "\n" or " " <= character <= "~")


def characters(seed: int) -> Task:
    """The next character of a text, a mean over tokens."""
    context, sequences = 32, 16
    text = documentation()
    alphabet = sorted(set(text))
    number = {character: index for index, character in enumerate(alphabet)}
    tokens = torch.tensor([number[character] for character in text])
    end = int(0.9 * len(tokens))
    generator = random_numbers(seed)

    def windows(count: int, first: int, last: int) -> Batch:
        starts = torch.randint(first, last - context - 1, (count, 1), generator=generator)
        chosen = tokens[starts + torch.arange(context + 1)]
        return chosen[:, :-1], chosen[:, 1:]

    def batches() -> Iterator[Batch]:
        while True:
            yield windows(sequences, 0, end)

    torch.manual_seed(seed)
    model = GPT(len(alphabet), context)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    return Task(
        model,
        batches(),
        loss,
        steps=300,
        measure=of(loss, *windows(256, 0, end)),
        loss_reduction=lambda sequences: sequences * context,
        test=of(loss, *windows(256, end, len(tokens))),
    )


def sorting(seed: int) -> Task:
    """Eight random symbols, a mark, and the symbols in order; a mean over the ordered tokens."""
    symbols, length, sequences = 16, 8, 32
    generator = random_numbers(seed)

    def examples(count: int) -> Batch:
        given = torch.randint(symbols, (count, length), generator=generator)
        mark = torch.full((count, 1), symbols)
        return (torch.cat([given, mark, given.sort(1).values], 1),)

    def batches() -> Iterator[Batch]:
        while True:
            yield examples(sequences)

    torch.manual_seed(seed)
    model = GPT(symbols + 1, 2 * length)

    def loss(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])[:, length:]
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, length + 1 :].flatten())

    return Task(
        model,
        batches(),
        loss,
        steps=300,
        measure=of(loss, *examples(512)),
        loss_reduction=lambda sequences: sequences * length,
        floor=LEARNED_BY_HEART,
    )
