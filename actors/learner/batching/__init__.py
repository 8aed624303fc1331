"""Batches of a learner rank: tensors of its share, the staleness mask, minibatches and micro-batches."""
