"""The prototype losses as one fused operator: closed forms in PyTorch, and a Triton kernel on CUDA.

Callers take them through :mod:`common.losses`; ``docs/kernels.md`` has the maths.
"""
