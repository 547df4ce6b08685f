"""consequent: any PyTorch optimiser, made consequentialist.

Each weight gradient ``ΔZ Xᵀ`` is replaced by ``ΔZ (XᵀX + λI)⁻¹ Xᵀ``, which foresees what a step does to the whole
mini-batch.

* ``attach(optimizer, model)`` turns any torch optimiser into its consequentialist version.
* ``CSGD``, ``CAdam``, ``CAdamW``, ``CRMSprop`` are ready-made ones, built from a model.
* ``Consequentialism`` is what ``attach`` returns: ``print`` it, ``step()`` by hand, ``detach()``.
* ``consequential_gradient(inputs, output_grads, damping)`` is the formula itself.
* ``filters`` has LMS, NLMS and affine projection, the ancestors for a single layer.
* ``paper`` has the paper's own algorithms and examples, to be read.
* ``ConsequentWarning`` is what is warned with when something was done otherwise than asked.
* ``NonFiniteError`` is what ``check=True`` raises on NaN or inf.

>>> import torch, consequent
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> correction = consequent.attach(optimizer, model, damping=0.01)   # the one added line
"""

from consequent import filters, paper
from consequent.correction import Consequentialism, attach
from consequent.maths.ridge import consequential_gradient
from consequent.optimizers import CSGD, CAdam, CAdamW, CRMSprop
from consequent.reports.errors import ConsequentWarning, NonFiniteError

__all__ = [
    "CSGD",
    "CAdam",
    "CAdamW",
    "CRMSprop",
    "ConsequentWarning",
    "Consequentialism",
    "NonFiniteError",
    "attach",
    "consequential_gradient",
    "filters",
    "paper",
]

__version__ = "0.1.0"
