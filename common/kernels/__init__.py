"""The prototype losses as kernels: one family, four tiers (batched, closed form, Triton, and the tests' reference).

Callers take them through :mod:`common.losses`; ``docs/kernels.md`` has the maths and says when which tier is chosen.
"""
