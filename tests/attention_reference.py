"""``nn.MultiheadAttention`` as sums over samples and heads, with the ΔZ of every projection seen.

Nothing of ``consequent`` is used here, nor torch's own function: a zero is added to what each projection comes to, and
the zero's gradient is ΔZ.
"""

import reference
import torch


class Projection:
    """Rows of a weight and a bias, and what they met."""

    def __init__(self, weight, bias, rows=slice(None), bias_rows=slice(None)):
        self.weight, self.bias, self.rows, self.bias_rows = weight, bias, rows, bias_rows
        self.seen = []

    def __call__(self, x):
        z = x @ self.weight[self.rows].T
        if self.bias is not None:
            z = z + self.bias[self.bias_rows]
        zero = torch.zeros_like(z, requires_grad=True)
        self.seen.append((x.detach(), zero))
        return z + zero

    def correct(self, damping, scale):
        X = torch.cat([x.flatten(0, -2) for x, _ in self.seen])
        if self.bias is not None:
            X = torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], dim=1)
        dZ = torch.cat([zero.grad.flatten(0, -2) for _, zero in self.seen])
        new = torch.as_tensor(reference.consequential_gradient(X.numpy(), dZ.numpy(), damping)) * scale
        self.weight.grad[self.rows] = new[:, : self.weight.shape[1]]
        if self.bias is not None:
            self.bias.grad[self.bias_rows] = new[:, -1]


class Naive:
    """``[samples, length, E]``, one after the other and head after head."""

    def __init__(self, module):
        self.module = module
        self.weights = None  # of the last call, the mean over heads
        size = module.embed_dim
        blocks = [slice(at * size, (at + 1) * size) for at in range(3)]
        weights = [(module.in_proj_weight, block) for block in blocks]
        if module.in_proj_weight is None:
            weights = [(getattr(module, f"{one}_proj_weight"), slice(None)) for one in "qkv"]
        bias = module.in_proj_bias
        self.ins = [Projection(w, bias, rows, block) for (w, rows), block in zip(weights, blocks, strict=True)]
        self.out = Projection(module.out_proj.weight, module.out_proj.bias)

    def __call__(self, query, key, value, mask=None, padding=None):
        q, k, v = (project(x) for project, x in zip(self.ins, (query, key, value), strict=True))
        if self.module.bias_k is not None:
            k = torch.cat([k, self.module.bias_k.expand(len(k), 1, -1)], dim=1)
            v = torch.cat([v, self.module.bias_v.expand(len(v), 1, -1)], dim=1)
        if self.module.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(len(x), 1, x.shape[-1])], dim=1) for x in (k, v))
        samples, weights = [], []
        for number in range(len(q)):
            heads, shares = [], []
            for head in torch.arange(q.shape[-1]).chunk(self.module.num_heads):
                scores = q[number][:, head] @ k[number][:, head].T / len(head) ** 0.5
                length = key.shape[1]
                if mask is not None:
                    scores = torch.cat([scores[:, :length].masked_fill(mask, -torch.inf), scores[:, length:]], dim=1)
                if padding is not None:
                    blank = torch.cat([padding[number], padding.new_zeros(scores.shape[1] - length)])
                    scores = scores.masked_fill(blank, -torch.inf)
                shares.append(scores.softmax(-1))
                heads.append(shares[-1] @ v[number][:, head])
            samples.append(torch.cat(heads, dim=-1))
            weights.append(torch.stack(shares).mean(0))
        self.weights = torch.stack(weights)
        return self.out(torch.stack(samples))

    def correct(self, damping, scale=1.0):
        for projection in (*self.ins, self.out):
            projection.correct(damping, scale)
