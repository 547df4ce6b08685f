"""Compiles every kernel for real GPUs, without one: what Triton's interpreter takes, its compiler need not take.

A script of its own, since Triton decides when it is imported whether to interpret. Prints what it has compiled.
"""

import sys

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from consequent.engines.gpu.kernels import (
    counting,
    dense,
    factor,
    features,
    lag_products,
    lag_sums,
    lag_turn,
    lags,
    moment,
    padded_rows,
    table,
)

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_instead(capability):
    """Takes the place of `launch`: the kernel is compiled for these arguments, and nothing runs."""

    def compiled(kernel, grid, arguments, constants=(), **options):
        source = source_of(kernel, arguments, constants)
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert "cubin" in binary.asm
        print(f"sm_{capability} {kernel.fn.__name__}", flush=True)

    return compiled


def source_of(kernel, arguments, constants):
    """What Triton compiles for these arguments: it makes use of ones, and of multiples of 16."""
    types = [kernel.params[place].annotation_type or kind_of(one) for place, one in enumerate(arguments)]
    known = {(len(arguments) + place,): value for place, value in enumerate(constants)}
    attributes = {}
    for place, argument in enumerate(arguments):
        parameter = kernel.params[place]
        if isinstance(argument, float) or parameter.do_not_specialize:
            continue
        if isinstance(argument, int) and argument == 1:
            types[place], known[place,] = "constexpr", 1
        elif parameter.do_not_specialize_on_alignment:
            continue
        elif (argument.data_ptr() if isinstance(argument, Tensor) else argument) % 16 == 0:
            attributes[place,] = [["tt.divisibility", 16]]
    signature = dict(zip(kernel.arg_names, types + ["constexpr"] * len(constants), strict=True))
    return ASTSource(kernel, signature, known, attributes)


def kind_of(argument):
    if isinstance(argument, Tensor):
        return TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32" if -(2**31) <= argument < 2**31 else "i64"


def launch_all():
    for rows in (20, 40, 100):
        layers = [
            dense.DenseLayer(
                torch.ones(rows, 48), torch.ones(rows, 40), torch.ones(40, 48), torch.ones(40), 0.1, False, 1.0, 1e-4
            )
        ]
        step = dense.DenseStep(layers, torch.zeros(2, dtype=torch.int32))
        step.factorise()
        step.solve()
        step.look()
        step.write(torch.zeros(6, dtype=torch.int64))
    for outputs, size in ((16, 145), (4200, 250), (1100, 1000)):
        layer = features.FeatureLayer(
            torch.ones(outputs, size - 1), torch.ones(outputs), torch.ones(1, size, size), torch.ones(1, 4), 1.0
        )
        prepared = features.prepare_features([layer], torch.zeros(1, dtype=torch.int32))
        features.write_features(prepared, torch.zeros(6, dtype=torch.int64))
    for members in (1, 11):
        factor.factor_by(factor.Team(members), torch.ones(2, 145, 145), 0.1)
        factor.factor_by(factor.Team(members), torch.ones(2, 145, 145), 0.1, of_trace=True)
    for channels in (16, 32, 64):
        images = torch.ones(4, channels, 8, 8).contiguous(memory_format=torch.channels_last)
        lags.lag_moments([images, images], ones=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        moment.patch_moment(torch.ones(4, 16, 8, 8, dtype=dtype), (3, 3), (2, 2), (1, 1), (1, 1), ones=True)
    for rounded in (False, True):
        padded_rows.padded_rows([torch.ones(200, 300)] * 2, ones=True, rounded=rounded)
    counting.count_factors(torch.ones(2, 4), torch.zeros(6, dtype=torch.int64))


def main():
    for capability in map(int, sys.argv[1:]):
        lag_sums.INTERPRETED_PART = lag_sums.PART
        lag_steps = (lag_turn, lag_products, lag_sums)
        for module in (counting, dense, features, factor, *lag_steps, moment, padded_rows):
            module.launch = compile_instead(capability)
        launch_all()
        compile_instead(capability)(table._writer(96), (1,), (torch.ones(1, dtype=torch.int64), 0, *range(96)))


if __name__ == "__main__":
    main()
