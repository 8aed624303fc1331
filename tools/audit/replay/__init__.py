"""Replays a run's journal and recounts clock, prompts, batches and pushes. Begin with `head_replay.py`."""
