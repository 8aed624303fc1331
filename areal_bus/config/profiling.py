"""Settings of recordings by torch.profiler: [profile]."""

from pydantic import Field

from areal_bus.config.section import Section


class ProfileConfig(Section):
    actor: str = Field("", pattern=r"^((learner|generator)-\d+(\.\d+)?)?$")
    """Actor that is recorded at `steps`: "learner-0.0"; without an incarnation each of them (docs/profiling.md)."""
    steps: tuple[int, int] | None = None
    """First and last step that are recorded. A generator takes part in step N while it holds version N."""
    seconds: float = Field(10.0, gt=0)
    """Length of a recording on demand (SIGUSR2), and the longest of a generator."""
