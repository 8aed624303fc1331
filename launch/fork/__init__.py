"""launch.start = "fork": ranks as forks of one process per host, for many ranks on few cores.

Begin with `fork_server.py`.
"""
