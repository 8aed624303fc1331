"""Calls a user's reward function: finds its signature, binds fields of the row, reads what it returned."""
