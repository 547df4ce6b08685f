"""consequent: any PyTorch optimiser, made consequentialist.

Each weight gradient ``ΔZ Xᵀ`` is replaced by ``ΔZ (XᵀX + λI)⁻¹ Xᵀ``, which foresees what a step does to the whole
mini-batch.

* ``attach(optimizer, model)`` turns any torch optimiser into its consequentialist version, and gives a ``Correction``.
* ``CSGD``, ``CAdam``, ``CAdamW``, ``CRMSprop`` are ready-made ones, built from a model.
* ``WholeNetwork(model, residual)`` is an optimiser for residual problems (physics-informed networks, regression).
* ``consequential_gradient(inputs, output_grads, damping)`` is the formula itself.
* ``foresight(optimizer, model, closure)`` takes a step, and tells what it did to each layer's outputs.
* ``filters`` has LMS, NLMS and affine projection, the ancestors for a single layer.
* ``paper`` has the paper's own algorithms and examples, to be read.
* ``ConsequentWarning`` is what is warned with when something was done otherwise than asked.

>>> import torch, consequent
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> correction = consequent.attach(optimizer, model)   # the one added line
"""

from consequent import filters, paper
from consequent.attach import attach
from consequent.correction import Correction
from consequent.foresight import foresight
from consequent.maths.ridge import consequential_gradient
from consequent.minibatch.warning import ConsequentWarning
from consequent.optimizers import CSGD, CAdam, CAdamW, CRMSprop
from consequent.whole.network import WholeNetwork

__all__ = [
    "CSGD",
    "CAdam",
    "CAdamW",
    "CRMSprop",
    "ConsequentWarning",
    "Correction",
    "WholeNetwork",
    "attach",
    "consequential_gradient",
    "filters",
    "foresight",
    "paper",
]

__version__ = "0.3.0.dev0"
