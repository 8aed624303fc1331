"""Which rank runs which role, on which host and GPU, over which network interface. Begin with `topology.py`."""
