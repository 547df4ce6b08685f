"""The consequentialist gradient of one weight inside of a backward pass: the same solves, nothing to compare with."""

from typing import NamedTuple

import torch
from torch import Tensor

from consequent.capture.at_backward import Gathered
from consequent.capture.torch_internals import answers_at_once
from consequent.capture.use import JointUse, Use
from consequent.layers.embedding import Embedding
from consequent.layers.embedding_bag import EmbeddingBag
from consequent.maths.damping import Damping
from consequent.maths.precision import in_full_precision
from consequent.maths.ridge import solve_on
from consequent.statistics.blocks import Cuts, block_moments, cuts_of, solve_in_blocks
from consequent.statistics.gradients import trace_of
from consequent.statistics.joint import JointInputs
from consequent.statistics.moment import moment_of
from consequent.statistics.row_matrices import RowMatrices
from consequent.statistics.tables import coefficients_of_bags, divided_by_counts


class Corrected(NamedTuple):
    """New gradients of a weight and its biases.

    Attributes:
        gradients: by parameter, in its shape and dtype. All NaN where NaN or inf was met.
        side: on which it was solved.
        finite: whether neither was met: a bool, or a tensor on a device that is not waited for.
        rescued: factorisations that needed float64, or more damping.
        fallen_back: factorisations that failed: a shortened plain gradient instead.
    """

    gradients: dict[Tensor, Tensor]
    side: str
    finite: bool | Tensor
    rescued: int | Tensor = 0
    fallen_back: int | Tensor = 0


@in_full_precision
def corrected_in_backward(
    gathered: Gathered, damping: Damping, scale: float, *, check: bool, largest_block: int | None = None
) -> Corrected:
    """The gradients that go to ``.grad`` from one backward pass.

    Args:
        gathered: what the pass said of the weight.
        damping: λ.
        scale: what they are multiplied by: the loss's divisor.
        check: whether the host may wait for the device to look.
        largest_block: how many features are solved for together; None: all of them.
    """
    first = gathered.products[0].use
    if isinstance(first, JointUse):
        return _of_joint(gathered, damping, scale, may_wait=check or answers_at_once(first.key))
    if first.operation.is_sparse:
        corrected = _of_table(gathered, damping, scale)
        _add_arrived(corrected.gradients, gathered, damping, scale)
        return corrected
    cuts = cuts_of(first.operation, first.features, sum(use.rows for use, *_ in gathered.products), largest_block)
    if torch.is_grad_enabled():
        if cuts:
            raise RuntimeError(
                f"largest_block={largest_block}: the blocks of {first.layer} cannot be differentiated in turn "
                "(create_graph=True); leave largest_block= out, or give the layer a parameter group with None"
            )
        corrected = _differentiable(gathered, damping, scale)
        _add_arrived(corrected.gradients, gathered, damping, scale)
        return corrected
    uses = []
    for use, inputs, output_grad in gathered.products:
        use.take(inputs, output_grad)
        uses.append(use)
    biases = list(dict.fromkeys(use.bias for use in uses if use.bias is not None))
    may_wait = check or answers_at_once(uses[0].key)
    features = uses[0].features
    rows = sum(use.rows for use in uses)
    if rows < features + len(biases) and not cuts:
        corrected = _by_rows(uses, biases, damping, scale, may_wait=may_wait)
    else:
        corrected = _by_moment(gathered, uses, biases, damping, scale, cuts, may_wait=may_wait)
    _add_arrived(corrected.gradients, gathered, damping, scale)
    for use in uses:
        use.let_go()
    return corrected


def _of_joint(gathered: Gathered, damping: Damping, scale: float, *, may_wait: bool) -> Corrected:
    """New gradients of a unit of several parameters; what else arrived for them is added as it is."""
    uses = [product.use for product in gathered.products]
    statistic = JointInputs.of(uses[0])
    for use in uses[1:]:
        statistic = statistic.add(use)
    parameters = statistic.use.parameters
    plain: list[Tensor | None] = [None] * len(parameters)
    for use in uses:
        assert isinstance(use, JointUse)
        plain = [g if p is None else p if g is None else p + g for p, g in zip(plain, use.grads, strict=True)]
    solved = statistic.reduced(damping).solve_for(plain, damping, may_wait=may_wait)
    gradients: dict[Tensor, Tensor] = {}
    for parameter, gradient in zip(parameters, solved.gradients, strict=True):
        if parameter is not None and gradient is not None:
            gradient = gradient * scale
            if solved.finite is not True:
                gradient = torch.where(torch.as_tensor(solved.finite, device=gradient.device), gradient, torch.nan)
            gradients[parameter] = gradient
    for parameter, arrived in gathered.arrived.items():
        gradients[parameter] = gradients[parameter] + arrived if parameter in gradients else arrived
    for use in uses:
        use.let_go()
    return Corrected(gradients, solved.side, solved.finite, solved.rescued, solved.fallen_back)


def _add_arrived(gradients: dict[Tensor, Tensor], gathered: Gathered, damping: Damping, scale: float) -> None:
    """Add what came otherwise than from products: from ``Wᵀ ΔZ``, where the weight acted in that, too.

    As in :mod:`consequent.engines.plain` it is not solved for, but made so short that it cannot overshoot.

    Args:
        gradients: of the weight and its biases, which are added to.
        gathered: what the pass said of the weight.
        damping: λ.
        scale: what all are multiplied by.
    """
    if not gathered.arrived:
        return
    trace = _trace_of(gathered)
    products = gathered.products
    biases = {use.bias for use, *_ in products if use.bias is not None}
    rows, columns = sum(use.rows for use, *_ in products), products[0].use.features + len(biases)
    bound = trace + damping.level(rows, columns).at(trace)
    for parameter, arrived in gathered.arrived.items():
        part = arrived
        if gathered.transposed is not None:
            part = arrived * (scale / (bound + gathered.transposed))
        gradients[parameter] = gradients[parameter] + part if parameter in gradients else part


def _trace_of(gathered: Gathered) -> Tensor:
    """That of the inputs' second moment, all groups together: a bound of its eigenvalues."""
    trace = torch.zeros((), device=gathered.products[0].output_grad.device)
    for use, inputs, _ in gathered.products:
        trace = trace + float(use.rows if use.bias is not None else 0)
        if inputs is None or use.operation.is_sparse:
            trace = trace + float(use.rows)
        else:
            trace = trace + trace_of(use.operation.second_moment(inputs.detach(), ones=False)).sum()
    return trace


def _of_table(gathered: Gathered, damping: Damping, scale: float) -> Corrected:
    """New gradients of a table of embeddings; differentiable where that is asked for."""
    products = gathered.products
    operation, weight = products[0].use.operation, products[0].use.weight
    rescued = fallen_back = 0
    if isinstance(operation, EmbeddingBag):
        side = "samples"
        X = torch.cat([inputs for _, inputs, _ in products if inputs is not None])
        dZ = torch.cat([grad for _, _, grad in products])
        coefficients, rescued, fallen_back = coefficients_of_bags(operation, X, dZ, damping)
        table = operation.weight_gradient(X, coefficients.to(dZ.dtype)) * scale
    else:
        side = "features"
        assert isinstance(operation, Embedding)
        counts = _sum([operation.counts(inputs) for _, inputs, _ in products if inputs is not None])
        plain = _sum([operation.weight_gradient(inputs, grad) for _, inputs, grad in products if inputs is not None])
        rows = sum(use.rows for use, *_ in products)
        table = divided_by_counts(operation, plain, counts, rows, damping) * scale
    finite = _sum([grad.sum() for _, _, grad in products]).detach().isfinite()
    table = table * torch.where(finite, 1.0, torch.nan).to(table.dtype)
    return Corrected({weight: table.to(weight.dtype)}, side, finite, rescued, fallen_back)


def _by_rows(uses: list[Use], biases: list[Tensor], damping: Damping, scale: float, *, may_wait: bool) -> Corrected:
    """New gradients on the sample side."""
    rows = RowMatrices(uses, biases, with_features=uses[0].trains_weight)
    if damping.value == 0:
        X, dZ = rows.whole(), rows.output_grads
        finite = (X.sum() + dZ.sum()).isfinite()
        gradient = (torch.linalg.pinv(X) @ dZ).mT if finite else torch.full_like(dZ.mT @ X, torch.nan)
        return Corrected(_split(uses, biases, gradient * scale), "samples", bool(finite))
    values, is_finite, rescued, fallen_back, shortening, *_ = rows.solve(damping, may_wait=may_wait)
    if values is None:
        values = torch.full_like(rows.output_grads, torch.nan)
    if shortening is not None:  # ΔZ itself, shortened, where there is no factor
        values = values + shortening[:, None, None] * rows.output_grads
    if isinstance(is_finite, Tensor):
        values = torch.where(is_finite, values, torch.nan)
    elif not is_finite:
        values.fill_(torch.nan)
    weight_gradient, bias_gradients = rows.combined(values.mul_(scale))
    gradients = {} if weight_gradient is None else {uses[0].weight: weight_gradient.to(uses[0].weight.dtype)}
    for bias, gradient in zip(biases, bias_gradients, strict=True):
        gradients[bias] = gradient.reshape(-1).to(bias.dtype)
    return Corrected(gradients, "samples", is_finite, rescued, fallen_back)


def _by_moment(
    gathered: Gathered,
    uses: list[Use],
    biases: list[Tensor],
    damping: Damping,
    scale: float,
    cuts: Cuts,
    *,
    may_wait: bool,
) -> Corrected:
    """New gradients on the feature side, in blocks where there are cuts."""
    operation, features = uses[0].operation, uses[0].features
    moments = block_moments(uses, cuts, biases) if cuts else (moment_of(uses, features, biases),)
    parts = []
    if features:
        plain = _sum([_plain_weight_gradient(use, u, g) for use, u, g in gathered.products if u is not None])
        parts.append(operation.weight_matrix(plain).to(moments[0].dtype))
    for bias in biases:
        plain = _sum([use.operation.bias_gradient(g) for use, _, g in gathered.products if use.bias is bias])
        parts.append(plain.view(operation.groups, -1, 1).to(moments[0].dtype))
    gradient = torch.cat(parts, dim=-1)
    rows = sum(use.rows for use in uses)
    solved = solve_in_blocks(moments, gradient, rows, damping, may_wait=may_wait)
    matrix = solved.gradient * scale
    if not isinstance(solved.finite, bool):
        matrix = torch.where(solved.finite, matrix, torch.nan)
    elif not solved.finite:
        matrix = torch.full_like(matrix, torch.nan)
    gradients = _split(uses, biases, matrix)
    return Corrected(gradients, "blocks" if cuts else "features", solved.finite, solved.rescued, solved.fallen_back)


def _plain_weight_gradient(use: Use, inputs: Tensor, output_grad: Tensor) -> Tensor:
    """``ΔZ Xᵀ``, unless it is known already."""
    if use.plain_grads is not None:
        return use.plain_grads[0]
    return use.operation.weight_gradient(inputs, output_grad)


def _differentiable(gathered: Gathered, damping: Damping, scale: float) -> Corrected:
    """Where the gradient is to be differentiated in turn (``create_graph=True``): plain operations only."""
    products = gathered.products
    uses = [product.use for product in products]
    biases = list(dict.fromkeys(use.bias for use in uses if use.bias is not None))
    columns = []
    dZ = torch.cat([use.operation.output_rows(grad) for use, _, grad in products], dim=1)
    if uses[0].trains_weight:
        columns.append(torch.cat([use.operation.input_rows(inputs) for use, inputs, _ in products], dim=1))  # type: ignore[arg-type]
    for bias in biases:
        ones = [dZ.new_full((use.rows,), float(use.bias is bias)) for use in uses]
        columns.append(torch.cat(ones)[None, :, None].expand(dZ.shape[0], -1, 1))
    X = torch.cat(columns, dim=-1)
    side = "samples" if X.shape[-2] < X.shape[-1] else "features"
    finite = (X.sum() + dZ.sum()).detach().isfinite()
    if not finite:
        gradient = (dZ.mT @ X) * torch.nan
    elif damping.value == 0:
        gradient = (torch.linalg.pinv(X) @ dZ).mT * scale
    else:
        level = damping.level(X.shape[-2], X.shape[-1])((X.mT @ X).detach())
        gradient = solve_on(side, X, dZ, level) * scale
    return Corrected(_split(uses, biases, gradient), side, finite)


def _split(uses: list[Use], biases: list[Tensor], matrix: Tensor) -> dict[Tensor, Tensor]:
    """From ``[groups, out_features, columns]`` to the gradient of each parameter."""
    use = uses[0]
    gradients: dict[Tensor, Tensor] = {}
    if use.trains_weight:
        weight_part = matrix[..., : use.features]
        gradients[use.weight] = use.operation.shaped_like_weight(weight_part).to(use.weight.dtype)
    for place, bias in enumerate(biases):
        gradients[bias] = matrix[..., use.features + place].reshape(-1).to(bias.dtype)
    return gradients


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
