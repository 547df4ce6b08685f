"""The residuals around the present parameters, to first order, and steps tried there. Nothing here waits for a GPU."""

import torch
from torch import Tensor, nn

from consequent.whole.cuda_graph import captured, copy_all
from consequent.whole.jacobian import Jacobian
from consequent.whole.residuals import Batch, Residual, weigh

BEND = 0.1  # how far along a step the curvature is measured

Terms = list[tuple[Residual, Batch, float]]  # some samples of a term, and the weight of each in the loss


class LocalModel:
    """The decrease that a step predicts, and the one that comes.

    Args:
        terms: the samples of the loss.
        trained: parameters by name.
    """

    def __init__(self, terms: Terms, trained: dict[str, nn.Parameter]) -> None:
        self.terms = terms
        self.parameters: list[Tensor] = list(trained.values())
        self.sizes = {name: p.numel() for name, p in trained.items()}
        self.before = [p.clone() for p in self.parameters]

    def remember(self) -> None:
        """Keep the present parameters."""
        copy_all(self.parameters, self.before)

    def put_back(self) -> None:
        """Take the last step back."""
        copy_all(self.before, self.parameters)

    def linearise(self) -> Tensor:
        """Find J and the smaller system; return the loss, and the mean diagonal element of ``J Jᵀ``."""
        rows = [one for residual, some, weight in self.terms for one in residual.rows(some, weight)]
        self.jacobian = Jacobian(rows, self.sizes)
        self.values, self.system = self.jacobian.values, self.jacobian.smaller_system()
        self.gradient = self.jacobian.transposed_times(self.values)
        return torch.stack([self.values.square().sum(), self.system.diagonal().sum() / len(self.values)])

    def attempt(self, damping: Tensor) -> Tensor:
        """Take a step with this λ; return 0 if it could be solved, the predicted decrease, the loss after the step."""
        damped, jacobian = self.system.clone(), self.jacobian
        damped.diagonal().add_(damping)
        factor, info = torch.linalg.cholesky_ex(damped)

        def solve(right: Tensor) -> Tensor:
            return torch.where(info == 0, torch.cholesky_solve(right[:, None], factor)[:, 0], 0)

        right = jacobian.into_system(self.values)
        solution = solve(right)
        change = jacobian.out_of_system(solution)
        predicted = self.gradient @ change + damping * change @ change
        straight = right - damping * solution  # the system times the solution
        bend = jacobian.into_system(self.residuals_after(BEND * change) - self.values) + BEND * straight
        change += jacobian.out_of_system(solve(bend)) / BEND**2
        return torch.stack([info, predicted, self.residuals_after(change).square().sum()])

    def residuals_after(self, change: Tensor) -> Tensor:
        """The residuals when this is subtracted from the parameters, which it is."""
        for p, old, its in zip(self.parameters, self.before, change.split(list(self.sizes.values())), strict=True):
            torch.sub(old, its.view_as(p), out=p)
        return torch.cat([weigh(one.values(some), weight).mT.flatten() for one, some, weight in self.terms])

    def capture(self) -> None:
        """Make CUDA graphs of both."""
        try:
            with torch.cuda.device(self.before[0].device):
                self.linearise = captured(self.linearise)  # type: ignore[method-assign]
                self.linearise()
                self.attempt = captured(self.attempt, self.system.new_tensor(1.0))  # type: ignore[method-assign]
        except RuntimeError as error:
            raise RuntimeError(
                f"a CUDA graph of the residuals cannot be made: {error}. They must not wait for the GPU, as item(), "
                "tensors of Python's numbers, derivatives of prod() and, with torch.set_default_device, hessian() do. "
                "Or leave cuda_graph=True out"
            ) from error
        finally:
            self.put_back()
