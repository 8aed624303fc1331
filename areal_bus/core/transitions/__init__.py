"""What changes the head's state: each module handles the messages of one concern and records effects.

Imports everything below `state.py`, and the state. Begin with `rollouts.py` (prompts) and `training.py` (batches).
"""
