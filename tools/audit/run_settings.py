"""The settings of a run that its audit needs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from areal_bus.config.data import SourceConfig
from areal_bus.core.rows import PassRateWindow

T = TypeVar("T")

POLICIES = ("mask", "hold", "drop", "paper")


class RowOrderSettings(NamedTuple):
    """The arguments of RowOrder."""

    n_rows: int
    seed: int | str
    shuffle: bool


@dataclass(frozen=True, slots=True)
class RunSettings:
    """B, eta and others; None if the config does not set them."""

    batch_size: int | None  # B
    eta: int | None
    policy: str | None
    n_samples: int | str | None  # "8, 16": by stage
    total_steps: int | None
    push_timeout_s: float | None
    silent_s: float | None
    earlier_totals: tuple[int, ...] = ()  # run.total_train_steps of earlier starts
    stops_early: bool = False  # a start had evaluate.early_stop_patience
    on_timeout: float | None = None  # reward that is declared for such a verdict; None: "refund"
    on_error: float | None = None
    partial_groups: bool = False
    compares: bool = False  # reward.group
    max_refill: int | None = None  # groups without signal that may be replaced for a batch
    own_samples: Mapping[str, int] = field(default_factory=dict)  # of a group, of sources that set it themselves
    sources: tuple[tuple[str, float], ...] = ()  # names and weights of [[data.source]], in order
    loaders: tuple[str, ...] = ()  # names of the sources that are loaders
    window: PassRateWindow | None = None  # of the curriculum
    n_passes: int | None = None  # data.total_train_epochs
    orders: Mapping[str, RowOrderSettings] = field(default_factory=dict)  # of each source whose order is known
    trains: Literal["all", "signal"] | None = None  # groups that train: all, those whose rewards differ; None: unknown
    leaves_truncated_out: bool = False  # actor.truncated_samples = "mask"
    evaluates_every: int | None = None  # evaluate.every_steps

    def declared(self, status: str) -> float | None:
        """The declared reward of a verdict `timeout` or `error`."""
        return self.on_timeout if status == "timeout" else self.on_error if status == "error" else None

    def group_sizes(self, source: str) -> tuple[int, ...]:
        """Samples of a group of a source, in all stages; () if unknown."""
        if source in self.own_samples:
            return (self.own_samples[source],)
        return () if self.n_samples is None else tuple(map(int, str(self.n_samples).split(", ")))

    @property
    def limit(self) -> int | None:
        """Number of credits (I1)."""
        return None if self.batch_size is None or self.eta is None else (self.eta + 1) * self.batch_size

    @property
    def patience_s(self) -> float | None:
        """Longest standstill of a ring without work in progress: every deadline has passed by then (I11)."""
        deadlines = [s for s in (self.push_timeout_s, self.silent_s) if s is not None]
        return max(deadlines) + 10.0 if deadlines else None


def read(
    config: dict[str, Any], earlier: Iterable[dict[str, Any]] = (), origin: Mapping[str, Any] = MappingProxyType({})
) -> RunSettings:
    """Read from config.json as plain JSON; {} without. `earlier`: of earlier starts; `origin`: with the row count."""
    earlier = tuple(earlier)

    def number(section: str, key: str) -> Any:
        value = config.get(section, {}).get(key)
        return value if isinstance(value, (int, float)) else None

    policy = config.get("rollout", {}).get("staleness_policy")
    return RunSettings(
        batch_size=number("data", "batch_size"),
        eta=number("rollout", "max_head_offpolicyness"),
        policy=policy if policy in POLICIES else None,
        n_samples=_group_sizes(config, number("gconfig", "n_samples")),
        total_steps=number("run", "total_train_steps"),
        push_timeout_s=number("weights", "timeout_s"),
        silent_s=number("bus", "silent_s"),
        earlier_totals=tuple(t for old in earlier if isinstance(t := old.get("run", {}).get("total_train_steps"), int)),
        stops_early=any(start.get("evaluate", {}).get("early_stop_patience") for start in (config, *earlier)),
        on_timeout=number("reward", "on_timeout"),
        on_error=number("reward", "on_error"),
        max_refill=config["data"].get("max_refill", 0) if "data" in config else None,
        partial_groups=config.get("reward", {}).get("partial_groups") is True,
        compares=bool(config.get("reward", {}).get("group")),
        orders=_orders(origin, config, *earlier),
        trains=None if _filters_apart(config) else _trains(*(start.get("actor") for start in (config, *earlier))),
        leaves_truncated_out=config.get("actor", {}).get("truncated_samples") == "mask",
        evaluates_every=_only({start.get("evaluate", {}).get("every_steps") for start in (config, *earlier)}),
        **_data(config.get("data", {})),
    )


def _only(values: set[T]) -> T | None:
    """The value of all starts; None where they differ."""
    return next(iter(values)) if len(values) == 1 else None


def _orders(origin: Mapping[str, Any], *starts: dict[str, Any]) -> dict[str, RowOrderSettings]:
    """The order of the rows of each source. A curriculum's depends on results, and a loader has its own."""
    data, seed = starts[0].get("data", {}), _only({start.get("run", {}).get("seed") for start in starts})
    shuffle = _only({start.get("data", {}).get("shuffle") for start in starts})
    if seed is None or shuffle is None or data.get("curriculum") is not None or data.get("function"):
        return {}
    if not data.get("source"):
        n_rows = origin.get("rows")
        return {"": RowOrderSettings(n_rows, seed, shuffle)} if n_rows else {}
    counts = origin.get("rows_by_source", {})
    return {name: RowOrderSettings(n, f"{seed}:{name}", shuffle) for name, n in counts.items()}


SHAPING = {"overlong_tokens": 0, "length_penalty": 0.0, "reward_clip": None, "distill_coef": 0.0, "sft_coef": 0.0}


def _filters_apart(config: dict[str, Any]) -> bool:
    """Whether a source has its own rule for answers that are cut off, or repeat themselves."""
    sources = config.get("data", {}).get("source", ())
    return any(source.get(key) is not None for source in sources for key in ("truncated_samples", "mask_repetition"))


def _trains(*actors: dict[str, Any] | None) -> Literal["all", "signal"] | None:
    """Which groups train, the same in all starts; None if unknown."""
    found = [_trains_by(actor) for actor in actors]
    return found[0] if all(one == found[0] for one in found) else None


def _trains_by(actor: dict[str, Any] | None) -> Literal["all", "signal"] | None:
    """Which groups train, where the advantage compares rewards within the group and nothing else moves them."""
    if not actor or actor.get("advantage") not in ("grpo", "dr_grpo", "rloo", "opo"):
        return None
    has_kl = actor.get("kl_ctl", 0.0) > 0
    if any(actor.get(key, plain) != plain for key, plain in SHAPING.items()) or not actor.get("reward_scaling", 1.0):
        return None
    if actor.get("normalize_batch") or actor.get("mask_repetition") or (has_kl and actor.get("kl_in") == "reward"):
        return None
    return "all" if has_kl or actor.get("entropy_coef") else "signal"


def _group_sizes(config: dict[str, Any], first: int | None) -> int | str | None:
    """gconfig.n_samples; of several stages all values, in order."""
    stages = config.get("run", {}).get("stage", ())
    sizes = [first, *(stage["gconfig"].get("n_samples") for stage in stages)]
    if stages and stages[0]["from_step"] == 0 and sizes[1] is not None:
        del sizes[0]
    known = dict.fromkeys(size for size in sizes if size is not None)
    return ", ".join(map(str, known)) if len(known) > 1 else next(iter(known), None)


def _data(data: dict[str, Any]) -> dict[str, Any]:
    """Sources, curriculum and passes."""
    sources = {label(source): source for source in data.get("source", ())}
    sizes = {name: source.get("gconfig", {}).get("n_samples") for name, source in sources.items()}
    window = data.get("curriculum")
    return {
        "sources": tuple((name, source["weight"]) for name, source in sources.items()),
        "own_samples": {name: n for name, n in sizes.items() if n},
        "loaders": tuple(name for name, source in (sources or {"": data}).items() if source.get("function")),
        "window": None if window is None else PassRateWindow(window["low"], window["high"], window.get("every", 4)),
        "n_passes": data.get("total_train_epochs"),
    }


def label(source: dict[str, Any]) -> str:
    """The name of a source in config.json."""
    return SourceConfig.model_validate(source).label
