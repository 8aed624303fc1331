"""The files of a checkpoint, a part a rank: staged on the host, written beside training, loaded by any ranks.

Imports torch's distributed checkpoint (planner, safetensors form) and areal_bus.
Begin with `plan.py`: which rank writes which piece.
"""
