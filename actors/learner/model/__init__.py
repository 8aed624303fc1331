"""Models of a learner rank: policy, critic, reference and teacher, adapters, and how they are loaded."""
