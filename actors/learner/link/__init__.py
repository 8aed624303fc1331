"""What connects a learner rank: its inbox, batches from the head, the other ranks, and the push thread."""
