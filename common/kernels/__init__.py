"""What computes the prototype losses: closed forms in PyTorch, and a Triton kernel on CUDA.

Callers take them through :mod:`common.losses.prototype`; ``docs/kernels.md`` has the maths.
"""
