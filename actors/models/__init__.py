"""Models as folders, and how they load."""
