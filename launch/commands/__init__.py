"""The commands: `areal-bus NAME`, the options of a job, --dry-run, --slurm, --explain."""
