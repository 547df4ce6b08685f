"""Every kernel compiles for a GPU, without one."""

import pytest

SPECIAL = {  # parameters that are neither constants nor pointers to float32
    "i32": {"size", "step", "place"},
    "fp32": {"rate", "limit", "damping"},
    "*i64": {"gradients", "problems", "addresses", "table"},
    "*i32": {"blocks", "programs", "sizes", "ranges", "positions"},
    "i64": {f"n{place}" for place in range(8)},
}
TILES, BOUND = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128, "BLOCK_INNER": 32}, {"BLOCK_ROWS": 8, "BLOCK_COLUMNS": 256}
UPDATES = [(16, 64, 256, "tf32x3"), (128, 64, 256, "tf32"), (128, 64, 128, "tf32x3"), (128, 32, 64, "tf32x3")]
CASES = [
    *(("multiply.products", {"SIMPLE": simple, **TILES}) for simple in (True, False)),
    *(("multiply.write", {"SIMPLE": told, "BOUNDED": not told, "TOLD": told, **BOUND}) for told in (True, False)),
    ("multiply.tell", {}),
    *(("samples.inverses", {"SIZE": size, "BLOCK": block}) for size, block in ((16, 64), (128, 64), (128, 32))),
    *(
        ("samples.updates", {"SIZE": n, "BLOCK_OUTPUTS": o, "BLOCK_FEATURES": d, "PRECISION": digits, "MEASURED": True})
        for n, o, d, digits in UPDATES
    ),
    ("samples.tell", {"MEASURED": True}),
    ("shorten.squares", {"BLOCK": 4096}),
    ("shorten.shorten", {"BLOCK": 4096}),
    *(("moments.parts", {"KIND": kind, "TILE": 64, "BLOCK": 16}) for kind in ("float32", "bfloat16", "float16")),
    ("moments.combine", {"TILE": 64}),
    *((f"inverses.{name}", {"TILE": 64}) for name in ("start", "invert_pivot", "eliminate", "finish")),
    ("table.fill", {}),
]


@pytest.fixture(scope="module")
def kernels():
    """All that are launched, by file and name."""
    pytest.importorskip("triton", reason="Triton is not installed, whose kernels these are")
    import importlib

    files = {case[0].split(".")[0] for case in CASES}
    return {file: importlib.import_module(f"consequent.gpu.{file}_kernels") for file in files}


def test_no_kernel_is_left_out(kernels):
    from triton.runtime.jit import JITFunction

    there = {
        f"{file}.{name}"
        for file, module in kernels.items()
        for name, one in vars(module).items()
        if isinstance(one, JITFunction) and one.fn.__module__ == module.__name__ and not name.startswith("_")
    }
    assert there == {name for name, _ in CASES}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "constants"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_it_compiles(name, constants, kernels, monkeypatch, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    file, _, kernel = name.partition(".")
    function, values = getattr(kernels[file], kernel), {"LEAST": 1e-5, "PRECISION": "tf32x3", **constants}
    if "KIND" in values:
        values["KIND"] = getattr(triton.language, values["KIND"])
    signature, known = {}, {}
    for place, parameter in enumerate(function.params):
        special = {kind for kind, names in SPECIAL.items() if parameter.name in names}
        if parameter.name == "tiles":
            special = {"i32" if file == "inverses" else "*i32"}
        elif parameter.name == "damping" and file == "inverses":
            special = set()
        if parameter.is_constexpr:
            special, known[(place,)] = {"constexpr"}, values[parameter.name]
        signature[parameter.name] = special.pop() if special else "*fp32"
    warps = 8 if name == "samples.updates" or values.get("SIZE", 0) > 32 else 4
    source = ASTSource(fn=function, signature=signature, constexprs=known)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert len(compiled.asm["cubin"]) > 0
    assert compiled.metadata.shared <= 227 * 2**10  # what a block of such a GPU may have
