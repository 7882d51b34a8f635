"""Every kernel compiles to machine code for the GPUs we aim at, without one: Turing, A100, Jetson Orin, Hopper."""

import re
import subprocess
from pathlib import Path

import kernel_cases
import numpy as np
import pytest
import torch
from kernel_cases import TERMS, make

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402  # after the check that Triton is there
from triton.compiler import ASTSource  # noqa: E402  # as above

from common.kernels import finish_kernels, launch, row_kernel, stream_kernels  # noqa: E402  # as above
from common.kernels.inputs import kernel_inputs  # noqa: E402  # as above
from common.kernels.launch import plan, top_blocks  # noqa: E402  # as above

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
SIZES = {
    "feature_stride", "samples", "dimensions", "rows", "class_count", "class_row_count", "splits", "tiles_per_split",
    "buffers",
}  # fmt: skip
INDICES = {"labels": "*i64", "offsets": "*i64", "class_offsets": "*i64", "wanted_counts": "*i32"}
ARRAYS = {
    "units", "weights", "lengths", "positive_bias", "class_vectors", "values", "gradient", "statistics", "partials",
    "radials", "alignments", "means", "total",
}  # fmt: skip
ALL = {
    "has_contrast": True, "has_alignment": True, "has_mse": True, "has_cosine_square": True, "has_bias": True,
    "with_gradient": True, "weighted": True, "raw": False, "negatives_only": False, "top": True, "align_all": True,
    "exponent": "any", "form": "clamp", "difference": False, "precision": "ieee", "block_b": 256,
}  # fmt: skip


def blocks(samples, rows, dimensions, tiling):
    chosen = plan(samples, rows, dimensions, 132, tiling, True)
    sizes = {"block_b": chosen.block_b, "block_m": chosen.block_m, "block_d": chosen.block_d}
    return sizes, chosen.warps


def top(largest):
    block_m, block_d, warps = top_blocks(largest)
    return {"block_m": block_m, "block_d": block_d}, warps


KERNELS = {
    "row, 10 prototypes": (row_kernel.row_kernel, *blocks(64, 10, 512, "row")),
    "row, 200 prototypes": (row_kernel.row_kernel, *blocks(64, 200, 512, "row")),
    "row, 512 prototypes": (row_kernel.row_kernel, *blocks(64, 512, 2048, "row")),
    "total": (row_kernel.total_kernel, {}, 4),
    "statistics, small batch": (stream_kernels.statistics_kernel, *blocks(64, 8192, 512, "stream")),
    "statistics, large batch": (stream_kernels.statistics_kernel, *blocks(4096, 8192, 2048, "stream")),
    "gradient, small batch": (stream_kernels.gradient_kernel, *blocks(64, 8192, 512, "stream")),
    "gradient, middling batch": (stream_kernels.gradient_kernel, *blocks(1024, 8192, 512, "stream")),
    "gradient, large batch": (stream_kernels.gradient_kernel, *blocks(4096, 8192, 2048, "stream")),
    "top-k, small class": (finish_kernels.top_kernel, *top(20)),
    "top-k, largest class": (finish_kernels.top_kernel, *top(2048)),
    "finish": (finish_kernels.finish_kernel, {"block_d": 512}, 4),
}


def build(kernel, constants, warps, architecture, features="bf16"):
    signature = {}
    for parameter in kernel.params:
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
        elif name == "features":
            signature[name] = "*" + features
        elif name in SIZES:
            signature[name] = "i32"
        else:
            signature[name] = INDICES.get(name) or ("*fp32" if name in ARRAYS else "fp32")
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, parameter in enumerate(kernel.params)
        if signature[parameter.name].startswith("*")
    }
    constants = {name: constants[name] for name, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})


@pytest.mark.parametrize("architecture", [75, 80, 87, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_to_machine_code(name, architecture):
    kernel, sizes, warps = KERNELS[name]
    compiled = build(kernel, ALL | sizes, warps, architecture)
    assert len(compiled.asm["cubin"]) > 1000
    assert f".target sm_{architecture}" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 48 * 1024  # what every GPU gives without opting in
    if architecture not in (80, 90) or not PTXAS.exists():
        return
    report = subprocess.run(
        [PTXAS, "-v", "--gpu-name", "sm_90a" if architecture == 90 else "sm_80", "-o", "/dev/null", "/dev/stdin"],
        input=compiled.asm["ptx"], text=True, capture_output=True, check=True,
    ).stderr  # fmt: skip
    spilled = int(re.search(r"(\d+) bytes spill stores", report).group(1))
    assert spilled <= 128, report  # registers hold the tiles


class Recorder:
    """Stands for a kernel: ``recorder[grid](...)`` notes what would have been launched."""

    def __init__(self, kernel, launched):
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid):
        return lambda *values, **options: self.launched.append((self.kernel, grid, values, options))


def launched(monkeypatch, case):
    """The kernels that a case launches, with their actual arguments."""
    found = []
    for name in ("row_kernel", "total_kernel", "statistics_kernel", "gradient_kernel", "top_kernel", "finish_kernel"):
        monkeypatch.setattr(launch, name, Recorder(getattr(launch, name), found))
    features, labels, prototypes, class_rows, terms, bias, divisor = kernel_cases.inputs(case)
    rows = kernel_inputs(prototypes)
    launch.launch(
        features, labels, rows, rows.wanted_counts(terms.fraction), kernel_inputs(class_rows), terms, bias, divisor,
        with_gradient=case.with_gradient, tiling=case.tiling,
    )  # fmt: skip
    monkeypatch.undo()
    return found


POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


def compile_launch(kernel, values, options, architecture):
    """Compile a launch as the just-in-time compiler would: a size of 1 is a constant, multiples of 16 are known."""
    signature, constants, attributes = {}, {}, {}
    arguments = dict(zip([parameter.name for parameter in kernel.params], values, strict=False))
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        value = options[name] if parameter.is_constexpr else arguments[name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={"num_warps": options.get("num_warps", 4)})


def check_launches(monkeypatch, case, architecture=80):
    for kernel, grid, values, options in launched(monkeypatch, case):
        assert all(size >= 1 for size in grid)
        assert compile_launch(kernel, values, options, architecture).asm["cubin"]


@pytest.mark.parametrize("tiling", ["row", "stream"])
@pytest.mark.parametrize("terms", ["fpl", "fedplcc"])
def test_what_is_launched_compiles(monkeypatch, terms, tiling):
    check_launches(monkeypatch, make(64, 50, 512, 10, TERMS[terms], tiling=tiling))


@pytest.mark.parametrize("tiling", ["row", "stream"])
def test_sizes_of_one_compile(monkeypatch, tiling):
    """A size of 1 becomes a compile-time constant, which is no tensor: a trap that only a compiler shows."""
    check_launches(monkeypatch, make(1, 1, 1, 1, TERMS["everything"], tiling=tiling))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tiling", ["row", "stream"])
@pytest.mark.parametrize("terms", TERMS)
def test_every_launch_compiles(monkeypatch, terms, tiling, dtype):
    check_launches(monkeypatch, make(64, 50, 512, 10, TERMS[terms], tiling=tiling, dtype=dtype), 90)
    without = make(1, 40, 33, 3, TERMS[terms], tiling=tiling, dtype=dtype, with_gradient=False)
    check_launches(monkeypatch, without.but(bias=np.zeros(1, np.float32)), 75)
