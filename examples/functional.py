"""The formula as a pure function, for users of torch.func: an ensemble trained by functional_call under vmap.

``ΔZ`` of a layer is the gradient of the loss for a zero that is added to the layer's outputs.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state
from torch.nn.functional import cross_entropy

import consequent

LR, DAMPING = 0.1, 0.01


class Network(nn.Module):
    """Two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 50), nn.Linear(50, 10)]).double()

    def forward(self, x: Tensor, zeros: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The outputs, and the inputs of each layer."""
        inputs = []
        for layer, zero in zip(self.layers, zeros, strict=True):
            inputs.append(x.relu() if inputs else x)
            x = layer(inputs[-1]) + zero
        return x, inputs


def step(params: dict[str, Tensor], x: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """One step of C-SGD for one network: its new parameters, and the loss before."""

    def loss_of(zeros: list[Tensor]) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        outputs, inputs = functional_call(network, params, (x, zeros))
        loss = cross_entropy(outputs, labels, reduction="sum")  # a sum, as in the paper: no factor N
        return loss, (loss / len(labels), inputs)

    zeros = [x.new_zeros(len(x), 50), x.new_zeros(len(x), 10)]
    output_grads, (loss, inputs) = grad(loss_of, has_aux=True)(zeros)
    new = dict(params)
    for layer, (X, dZ) in enumerate(zip(inputs, output_grads, strict=True)):
        X = torch.cat([X, torch.ones_like(X[:, :1])], dim=1)  # the bias is the weight of a constant 1
        update = LR * consequent.consequential_gradient(X, dZ, DAMPING)
        new[f"layers.{layer}.weight"] = params[f"layers.{layer}.weight"] - update[:, :-1]
        new[f"layers.{layer}.bias"] = params[f"layers.{layer}.bias"] - update[:, -1]
    return new, loss


torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
batches = [batch for _ in range(5) for batch in torch.randperm(len(images)).split(32)]

ensemble = [Network() for _ in range(4)]
network = ensemble[0]  # what functional_call takes the forward from
params, _ = stack_module_state(ensemble)
for batch in batches:
    params, losses = torch.vmap(step, in_dims=(0, None, None))(params, images[batch], labels[batch])
print("last losses of four networks:", ", ".join(f"{loss:.4f}" for loss in losses))

# The same with an optimiser, for the first of them.
optimizer = consequent.CSGD(network, lr=LR, damping=DAMPING)
for batch in batches:
    optimizer.zero_grad()
    outputs, _ = network(images[batch], [torch.zeros(50), torch.zeros(10)])
    cross_entropy(outputs, labels[batch]).backward()
    optimizer.step()
difference = max((params[name][0] - value).abs().max() for name, value in network.named_parameters())
print(f"largest difference to consequent.CSGD: {difference:.1e}")
