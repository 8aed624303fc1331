"""Fast paths on a CPU: C kernels (in `csrc`) and layers written by hand; optional, a package of its own.

Imports `areal_bus.native` only. `actors.learner`, `actors.models` and `actors.engines.builtin` call it. Begin with
`build.py`.
"""
