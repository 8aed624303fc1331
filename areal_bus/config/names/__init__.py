"""Names in settings: tasks, workflows, trackers, GPUs, other systems' keys. Imports nothing of `config`; no torch."""
