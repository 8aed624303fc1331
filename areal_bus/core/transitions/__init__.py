"""What changes the head's state, a module a concern. Begin with `rollouts.py` (prompts) and `training.py` (batches)."""
