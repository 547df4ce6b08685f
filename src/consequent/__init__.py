"""consequent: any PyTorch optimiser, made consequentialist.

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
