"""What a process of a job needs of the operating system: import path, parent, mpirun, terminal, names of commands."""
