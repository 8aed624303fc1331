"""Checkpoints of the learner: when they are written and pruned, their content, and the shards of each rank."""
