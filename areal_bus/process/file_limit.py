"""The limit of open files of this process (ulimit -n)."""

import resource


def raise_file_limit(most: int) -> int:
    """Raise the soft limit to `most`, or as far as the hard limit allows. Returns the limit, at most `most`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
