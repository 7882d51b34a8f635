"""The kernel compiles to machine code for the GPUs we aim at, without one: Turing, A100, Jetson Orin, Hopper."""

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

from common.losses import triton_kernel  # noqa: E402  # as above
from common.losses.prototype_terms import Call, prepared_rows, wanted_counts  # noqa: E402  # as above

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


class Recorder:
    """Stands for the kernel: ``recorder[grid](...)`` notes what would have been launched."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *values, **options: self.calls.append((grid, values, options))


def launched(monkeypatch, case):
    """What a case launches the kernel with."""
    recorder = Recorder()
    with monkeypatch.context() as patched:
        patched.setattr(triton_kernel, "prototype_kernel", recorder)
        features, labels, prototypes, class_rows, terms, bias = kernel_cases.inputs(case)
        rows, wanted = (prepared_rows(prototypes), prepared_rows(class_rows)), wanted_counts(prototypes, terms)
        triton_kernel.launch(Call(features, labels, *rows, wanted, terms, bias, len(features), case.with_gradient))
    return recorder.calls[0]


POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


def compiled(monkeypatch, case, architecture):
    """Compile a launch as the just-in-time compiler would: a size of 1 is a constant, multiples of 16 are known."""
    grid, values, options = launched(monkeypatch, case)
    assert grid[0] >= 1
    kernel = triton_kernel.prototype_kernel
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


CASES = {
    "fpl, 10 prototypes": (64, 10, 512, 10, TERMS["fpl"]),
    "fedplcc, 200 prototypes": (64, 200, 512, 10, TERMS["fedplcc"]),
    "everything, 2000 prototypes of long features": (64, 2000, 2048, 10, TERMS["everything"]),
    "raw lengths and weights": (64, 50, 512, 10, TERMS["raw negatives, weighted"]),
    # a size of 1 becomes a compile-time constant, which is no tensor: a trap that only a compiler shows
    "sizes of one": (1, 1, 1, 1, TERMS["everything"]),
}


LARGEST = "everything, 2000 prototypes of long features"


TARGETS = [*((name, 90) for name in CASES), *((LARGEST, architecture) for architecture in (75, 80, 87))]


@pytest.mark.parametrize(("name", "architecture"), TARGETS)
@pytest.mark.long
def test_compiles_to_machine_code(monkeypatch, name, architecture):
    found = compiled(monkeypatch, make(*CASES[name], dtype="bfloat16"), architecture)
    assert len(found.asm["cubin"]) > 1000
    assert f".target sm_{architecture}" in found.asm["ptx"]
    assert found.metadata.shared <= 48 * 1024  # what every GPU gives without opting in
    if architecture not in (80, 90) or not PTXAS.exists():
        return
    report = subprocess.run(
        [PTXAS, "-v", "--gpu-name", "sm_90a" if architecture == 90 else "sm_80", "-o", "/dev/null", "/dev/stdin"],
        input=found.asm["ptx"], text=True, capture_output=True, check=True,
    ).stderr  # fmt: skip
    spilled = int(re.search(r"(\d+) bytes spill stores", report).group(1))
    assert spilled <= 128, report  # registers hold the blocks


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("terms", TERMS)
def test_every_launch_compiles(monkeypatch, terms, dtype):
    assert compiled(monkeypatch, make(64, 50, 512, 10, TERMS[terms], dtype=dtype), 90).asm["cubin"]
    without = make(1, 40, 33, 3, TERMS[terms], dtype=dtype, with_gradient=False, bias=np.zeros(1, np.float32))
    assert compiled(monkeypatch, without, 75).asm["cubin"]
