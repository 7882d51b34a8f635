"""Where kernels run in these tests: Triton's interpreter (a process of its own), and CUDA where there is one."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import kernel_cases
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "losses"))  # the oracles


@pytest.fixture(scope="session")
def interpreter():
    """Runs kernel cases in Triton's interpreter.

    The interpreter is chosen when Triton is imported, for a whole process; a process of its own leaves the other tests,
    which compile kernels, as they are.
    """
    previous = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # inherited by the worker, which starts at the first submit
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(kernel_cases.ready).result(timeout=120) == "interpreter"
        if previous is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = previous
        yield lambda case: pool.submit(kernel_cases.run, case).result(timeout=300)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.cuda)])
def run(request):
    """A function from a case to what the kernels make of it."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return lambda case: kernel_cases.run(case, "cuda")
    return request.getfixturevalue("interpreter")
