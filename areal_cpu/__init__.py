"""Fast paths on a CPU: C kernels (in `csrc`) and layers written by hand; optional.

Imports `models` and `areal_bus.native`. Only `learner` and `engines/builtin` import it. Begin with `build.py`.
"""
