"""Fast paths on a CPU: C kernels (in `csrc`), layers written by hand, a paged KV cache; a package of its own.

Imports `areal_bus.native` only. `actors.learner`, `actors.models` and `actors.engines.builtin` call it. Begin with
`build.py`.
"""
