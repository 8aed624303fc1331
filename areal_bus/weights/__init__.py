"""The weight push: learner rank 0 sends, generators verify every byte (docs/weights.md). Imports torch."""
