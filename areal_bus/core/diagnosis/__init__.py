"""What reads the head's state to explain it: the wait-for graph, and when each part last made progress.

Changes nothing. Begin with `wait_graph.py`.
"""
