"""What a process needs from the operating system: import path, parent, mpirun, terminal, names of commands."""
