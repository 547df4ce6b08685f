"""The mathematics once more, naively: explicit loops, no torch, nothing shared with the library.

Rows are samples, as everywhere in the code: ``X`` is N×D, ``dZ`` is N×O. Results are float64. Sums, products and the
elimination run in numpy's ``longdouble`` (80 bits on x86), so that the error measured against this file is the
library's own.
"""

from itertools import product

import numpy as np

# A damping is λ, or a pair ("relative", ρ). These are taken where users name none, with SGD and with others; the
# library has them written down in another place.
DEFAULT_DAMPING = ("relative", 0.1)
DEFAULT_DAMPING_OF_OTHERS = ("relative", 1.0)


def damping_options(damping):
    """How a user gives this damping."""
    return {"relative_damping": damping[1]} if isinstance(damping, tuple) else {"damping": damping}


def absolute_damping(damping, X):
    """λ for a matrix of rows: of ("relative", ρ) it is ``ρ · trace(X Xᵀ) / min(N, D)``, and 1 if X is all zeros."""
    if not isinstance(damping, tuple):
        return damping
    _, fraction = damping
    trace = sum(float(row @ row) for row in np.asarray(X, dtype=np.float64))
    if fraction == 0:
        return 0.0
    return fraction * trace / min(X.shape) if trace > 0 else 1.0


def consequential_gradient(X, dZ, damping, side=None):
    """ΔZ(XᵀX + λI)⁻¹Xᵀ of the paper, which is ``dZᵀ (X Xᵀ + λI)⁻¹ X`` with rows as samples; λ = 0 is ``dZᵀ X†ᵀ``.

    Of the two equal forms the one with the smaller Gram matrix is taken, which is the better conditioned one, unless
    ``side`` ("samples" or "features") says otherwise.
    """
    X, dZ = np.asarray(X, dtype=np.float64), np.asarray(dZ, dtype=np.float64)
    samples, features = X.shape
    if samples == 0:
        return np.zeros((dZ.shape[1], features))
    lam = absolute_damping(damping, X)
    if lam == 0:
        return (np.linalg.pinv(X) @ dZ).T
    if side is None:
        side = "samples" if samples <= features else "features"
    if side == "samples":
        weights = solve(add_damping(matmul(X, X.T), lam), dZ)  # (X Xᵀ + λI)⁻¹ dZ
        return matmul(weights.T, X).astype(np.float64)
    return solve(add_damping(matmul(X.T, X), lam), matmul(X.T, dZ)).T.astype(np.float64)


def matmul(A, B):
    A, B = A.astype(np.longdouble), B.astype(np.longdouble)
    result = np.zeros((A.shape[0], B.shape[1]), dtype=np.longdouble)
    for row in range(A.shape[0]):
        for k in range(A.shape[1]):
            result[row] += A[row, k] * B[k]
    return result


def add_damping(gram, lam):
    damped = gram.copy()
    for i in range(len(damped)):
        damped[i, i] += np.longdouble(lam)
    return damped


def solve(A, B):
    """Gaussian elimination with partial pivoting."""
    A, B = A.astype(np.longdouble), B.astype(np.longdouble)
    size = len(A)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(A[row, column]))
        A[[column, pivot]], B[[column, pivot]] = A[[pivot, column]], B[[pivot, column]]
        for row in range(column + 1, size):
            factor = A[row, column] / A[column, column]
            A[row] -= factor * A[column]
            B[row] -= factor * B[column]
    solution = np.zeros_like(B)
    for row in reversed(range(size)):
        rest = B[row].copy()
        for column in range(row + 1, size):
            rest -= A[row, column] * solution[column]
        solution[row] = rest / A[row, row]
    return solution


def condition_number(X, damping, side=None):
    """κ(Gram + λI) of the N×N ("samples"), the D×D ("features") or the smaller Gram matrix, in float64.

    For λ = 0 the zero eigenvalues, which the pseudo-inverse leaves alone, do not count.
    """
    X = np.asarray(X, dtype=np.float64)
    if X.size == 0:
        return 1.0
    lam = absolute_damping(damping, X)
    eigenvalues = np.linalg.svd(X, compute_uv=False) ** 2
    if lam == 0:
        nonzero = [value for value in eigenvalues if value > eigenvalues[0] * (1e-13 * max(X.shape)) ** 2]
        return nonzero[0] / nonzero[-1] if nonzero else 1.0
    size = {"samples": X.shape[0], "features": X.shape[1], None: min(X.shape)}[side]
    smallest = eigenvalues[-1] if size == len(eigenvalues) else 0.0
    return (eigenvalues[0] + lam) / (smallest + lam)


def relative_error(actual, expected):
    """Frobenius norm of the difference over that of the expected matrix."""
    actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    difference, size = np.linalg.norm(actual - expected), np.linalg.norm(expected)
    return difference / size if size else (0.0 if difference == 0 else np.inf)


# ---------------------------------------------------------------------------------------------------------------------
# Layers: brought to rows of inputs and rows of output gradients.
# ---------------------------------------------------------------------------------------------------------------------


def to_numpy(tensor):
    return tensor.detach().double().cpu().numpy()


def linear_rows(x):
    """[..., D] -> N×D, a row per leading index."""
    x = to_numpy(x)
    rows = [x[index] for index in np.ndindex(*x.shape[:-1])]
    return np.array(rows).reshape(len(rows), x.shape[-1])


def conv_paddings(module):
    """How many pixels are added before and after, per dimension; an odd number of 'same' has the extra one after."""
    if module.padding == "valid":
        return [(0, 0) for _ in module.kernel_size]
    if module.padding == "same":
        totals = [d * (k - 1) for k, d in zip(module.kernel_size, module.dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in module.padding]


def source_pixel(index, size, mode):
    """Where the padded pixel ``index`` (below 0 or beyond ``size``) takes its value from; None where it is 0."""
    if 0 <= index < size:
        return index
    if mode == "zeros":
        return None
    if mode == "replicate":
        return 0 if index < 0 else size - 1
    if mode == "circular":
        return index + size if index < 0 else index - size
    assert mode == "reflect", mode
    return -index if index < 0 else 2 * (size - 1) - index


def conv_batched(x, module):
    """Numpy array with a batch dimension, also for unbatched input."""
    x = to_numpy(x)
    return x if x.ndim == len(module.kernel_size) + 2 else x[None]


def conv_taps(module, group):
    """The features of one group in the order of the weight tensor: (channel, offset in the kernel)."""
    channels = module.in_channels // module.groups
    for channel in range(group * channels, (group + 1) * channels):
        for offset in product(*(range(k) for k in module.kernel_size)):
            yield channel, offset


def conv_patches(x, module):
    """A row matrix per group: one row per sample and output position, one column per channel and kernel offset."""
    x = conv_batched(x, module)
    paddings = conv_paddings(module)
    sizes = x.shape[2:]
    dimensions = range(len(sizes))
    positions = []
    for i in dimensions:
        reach = module.dilation[i] * (module.kernel_size[i] - 1)
        positions.append(range((sizes[i] + sum(paddings[i]) - reach - 1) // module.stride[i] + 1))
    matrices = []
    for group in range(module.groups):
        taps = list(conv_taps(module, group))
        rows = []
        for image in x:
            for position in product(*positions):
                row = []
                for channel, offset in taps:
                    pixel = [
                        source_pixel(
                            position[i] * module.stride[i] + offset[i] * module.dilation[i] - paddings[i][0],
                            sizes[i],
                            module.padding_mode,
                        )
                        for i in dimensions
                    ]
                    row.append(0.0 if None in pixel else image[(channel, *pixel)])
                rows.append(row)
        matrices.append(np.array(rows).reshape(len(rows), len(taps)))
    return matrices


def transposed_conv_sizes(module, sizes):
    """How large the outputs are, per dimension."""
    return [
        (size - 1) * module.stride[i]
        - 2 * module.padding[i]
        + module.dilation[i] * (module.kernel_size[i] - 1)
        + module.output_padding[i]
        + 1
        for i, size in enumerate(sizes)
    ]


def transposed_conv_rows(x, module):
    """As ``conv_patches``, a row per sample and output position: every pixel is put where its taps take it."""
    x = conv_batched(x, module)
    sizes = transposed_conv_sizes(module, x.shape[2:])
    positions = list(product(*(range(size) for size in sizes)))
    matrices = []
    for group in range(module.groups):
        taps = list(conv_taps(module, group))
        rows = np.zeros((len(x) * len(positions), len(taps)))
        for sample, image in enumerate(x):
            for column, (channel, offset) in enumerate(taps):
                for pixel in np.ndindex(*image.shape[1:]):
                    position = tuple(
                        pixel[i] * module.stride[i] + offset[i] * module.dilation[i] - module.padding[i]
                        for i in range(len(sizes))
                    )
                    if position in positions:
                        row = sample * len(positions) + positions.index(position)
                        rows[row, column] = image[(channel, *pixel)]
        matrices.append(rows)
    return matrices


def conv_output_rows(output, module):
    """A row matrix per group, rows ordered as those of ``conv_patches``, one column per output channel."""
    output = conv_batched(output, module)
    channels = module.out_channels // module.groups
    matrices = []
    for group in range(module.groups):
        rows = []
        for image in output:
            for position in np.ndindex(*output.shape[2:]):
                rows.append([image[(group * channels + channel, *position)] for channel in range(channels)])
        matrices.append(np.array(rows).reshape(len(rows), channels))
    return matrices


def is_conv(module):
    return hasattr(module, "kernel_size")


def is_transposed_conv(module):
    return is_conv(module) and module.transposed


def bias_of(module):
    return getattr(module, "bias", None)


def input_rows(module, x):
    """A row matrix per group, for every layer."""
    if is_transposed_conv(module):
        return transposed_conv_rows(x, module)
    return conv_patches(x, module) if is_conv(module) else [linear_rows(x)]


def output_rows(module, output):
    return conv_output_rows(output, module) if is_conv(module) else [linear_rows(output)]


def trainable(module, bias=True):
    """Whether the weight and the bias take part in the solve."""
    return module.weight.requires_grad, bias and bias_of(module) is not None and bias_of(module).requires_grad


def design_matrices(module, x, bias=True):
    """``input_rows`` as the solve sees them: with the constant 1 for a bias, alone if only the bias is trainable."""
    with_weight, with_bias = trainable(module, bias)
    matrices = []
    for rows in input_rows(module, x):
        columns = [rows] if with_weight else []
        if with_bias:
            columns.append(np.ones((len(rows), 1)))
        matrices.append(np.concatenate(columns, axis=1))
    return matrices


def corrected_matrices(module, x, output_grad, damping, bias=True):
    """One matrix per group, [outputs of the group, features (and the constant)]."""
    designs, grads = design_matrices(module, x, bias), output_rows(module, output_grad)
    return [consequential_gradient(X, dZ, damping) for X, dZ in zip(designs, grads, strict=True)]


def corrected_gradients(module, x, output_grad, damping, bias=True):
    """(gradient of the weight, gradient of the bias), corrected together; None for what is absent or frozen.

    ``bias=False`` leaves a bias out as if it were frozen.
    """
    with_weight, with_bias = trainable(module, bias)
    weight_grad = np.zeros(tuple(module.weight.shape)) if with_weight else None
    bias_grad = np.zeros(outputs_of(module)) if with_bias else None
    matrices = corrected_matrices(module, x, output_grad, damping, bias)
    for group, matrix in enumerate(matrices):
        for row in range(len(matrix)):
            output = group * len(matrix) + row
            if with_bias:
                bias_grad[output] = matrix[row, -1]
            if not with_weight:
                continue
            for column in range(features_of(module)):
                weight_grad[place_in_weight(module, group, row, column)] = matrix[row, column]
    return weight_grad, bias_grad


def outputs_of(module):
    """Columns of Z, of all groups together."""
    return module.out_channels if is_conv(module) else module.out_features


def features_of(module):
    """Columns of X, of one group."""
    return len(list(conv_taps(module, 0))) if is_conv(module) else module.in_features


def place_in_weight(module, group, output, feature):
    """Where the weight tensor has what takes a feature to an output, both counted within the group."""
    if not is_conv(module):
        return output, feature
    channel, offset = list(conv_taps(module, group))[feature]
    outputs = module.out_channels // module.groups
    if module.transposed:
        return (channel, output, *offset)
    return (group * outputs + output, channel - group * (module.in_channels // module.groups), *offset)


def gradient_matrices(module, weight_grad, bias_grad):
    """The inverse arrangement: gradients, or parameters, as a layer holds them -> one matrix per group."""
    groups = module.groups if is_conv(module) else 1
    outputs = outputs_of(module) // groups
    weight_grad = None if weight_grad is None else np.asarray(weight_grad)
    matrices = []
    for group in range(groups):
        features = range(0 if weight_grad is None else features_of(module))
        places = [
            [place_in_weight(module, group, output, feature) for feature in features] for output in range(outputs)
        ]
        rows = [[weight_grad[place] for place in of_output] for of_output in places]
        if bias_grad is not None:
            rows = [[*row, bias_grad[group * outputs + output]] for output, row in enumerate(rows)]
        matrices.append(np.array(rows, dtype=np.float64).reshape(outputs, -1))
    return matrices
