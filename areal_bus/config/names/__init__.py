"""Names that settings may hold and what each stands for: tasks, workflows, trackers, GPUs, keys of other systems.

Imports nothing of `config`; no torch.
"""
