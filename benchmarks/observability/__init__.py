"""Bench `observability`: what the journal, a tracker and a watched page cost beside a real job."""
