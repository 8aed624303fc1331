"""Bench `parity`: does a job learn as TRL's GRPOTrainer does, and is one step the same?"""
