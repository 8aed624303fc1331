"""Worker processes in sessions of their own: frames over pipes, deadlines, and kills of the whole group."""
