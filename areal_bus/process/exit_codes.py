"""Names of signals, for texts about processes that have ended."""

import signal


def signal_name(number: int) -> str:
    """ "SIGKILL"; "signal 35" for a real-time signal, which has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
