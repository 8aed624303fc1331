"""Readers of journals, planners and benches; each is `python -m tools.NAME`.

Imports `areal_bus`; parts of `bench` import `actors` in processes of their own. Begin with `run.py`.
"""
