"""What torch has no fast operation for on a CPU, in C: compiled where it runs, left out where no compiler is."""
