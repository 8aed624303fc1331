"""The cards of the curves: which series are drawn together, and under which heading."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tools.report.facts.curves import Curve, CurveBin
from tools.report.page.charts import PlotLine, line_chart, number
from tools.report.page.parts import Card, of_place

Curves = Mapping[str, Curve]


@dataclass(frozen=True, slots=True)
class Plot:
    """One chart: series of tools.trackers with their short names."""

    title: str
    lines: Sequence[tuple[str, str]]  # (series, name)
    spread: str = ""  # series of the standard deviation or error of the first line
    note: str = ""
    bounds: tuple[str, str] = ("", "")  # series of the least and the largest value of the first line's members
    is_share: bool = False  # values are 0..1


PLOTS = (
    Plot("Reward", [("rollout/reward", "mean")], "rollout/reward_std",
         "Band: standard deviation within a batch, up to its least and largest reward.",
         ("rollout/reward_min", "rollout/reward_max")),
    Plot("Right answers in training",
         [("rollout/accuracy", "share right"), ("rollout/completed_accuracy", "right and ended")],
         note="Ended: by an accepted stop, not by the limit."),
    Plot("Lag of trained tokens", [("staleness/lag", "mean"), ("staleness/lag_max", "largest")], note="In versions."),
    Plot("Lag of trajectories", [("staleness/trajectory_lag", "mean"), ("staleness/trajectory_lag_max", "largest")],
         note="In versions, of the oldest token of each, masked tokens included."),
    Plot("Masked share", [("staleness/masked_share", "share")], note="Tokens that are too old to train."),
    Plot("KL mismatch", [("train/kl", "KL")], note="Sampler against learner, before the update."),
    Plot("Entropy", [("train/entropy", "mean")], note="Of the trained tokens."),
    Plot("Clip share", [("train/clip_share", "share")]),
    Plot("Effective sample size", [("train/ess", "share")]),
    Plot("Gradient norm", [("train/grad_norm", "norm"), ("train/critic_grad_norm", "critic")]),
    Plot("Lengths", [("rollout/length", "mean"), ("rollout/length_max", "longest")],
         note="Sampled tokens a trajectory."),
    Plot("Throughput", [("perf/tokens_per_s", "tokens/s")], note="Sampled tokens of a batch over its step's time."),
    Plot("Groups without a signal", [("rollout/zero_advantage_share", "share")]),
    Plot("Answers cut at the limit", [("rollout/truncated_share", "share")]),
    Plot("Loss", [("train/loss", "policy"), ("train/value_loss", "value")]),
    Plot("Learning rate", [("train/lr", "lr")]),
    Plot("KL to frozen models", [("train/kl_ref", "reference"), ("train/kl_teacher", "teacher")]),
    Plot("Critic", [("train/explained_variance", "explained variance")]),
    Plot("Time of a step", [("perf/step_s", "step"), ("perf/update_s", "update")], note="Seconds."),
)  # fmt: skip
HELD_OUT = ("avg_at_k", "accuracy", "reward")  # the first that the evaluations have


def curve_cards(curves: Curves) -> list[Card]:
    """One card for each plot that has a point, without the first ones."""
    drawn = [card for plot in PLOTS[1:] if (card := plot_card(curves, plot)) is not None]
    parts = [Plot("Rewards by name", named)] if (named := list(_named_rewards(curves))) else []
    more = [card for plot in parts if (card := plot_card(curves, plot)) is not None]
    return [*more, *drawn]


def first_cards(curves: Curves) -> list[Card]:
    """The reward and the held-out score."""
    plots = [PLOTS[0], *held_out_plots(curves)]
    return [card for plot in plots if (card := plot_card(curves, plot)) is not None]


def held_out_plots(curves: Curves) -> list[Plot]:
    """One plot for the evaluations: a line for each set of problems."""
    for field in HELD_OUT:
        named = [name for name in curves if name.startswith("eval/") and name.endswith(f"/{field}")]
        sets = sorted((name for name in named if "/reward/" not in name), key=len)
        if any(len(curves[name]) for name in sets):
            lines = [(name, name.split("/")[1] if name.count("/") > 1 else "held-out") for name in sets]
            error = "eval/avg_at_k_se" if field == "avg_at_k" else ""
            name = field.replace("_at_k", "@k").capitalize()
            note = f"{name} of each evaluation{'; band: standard error' if error else ''}."
            return [Plot("Held-out score", lines, error, note, is_share=field != "reward")]
    return []


def plot_card(curves: Curves, plot: Plot) -> Card | None:
    """The card of one run's curves; None without a point."""
    lines = []
    for place, (series, name) in enumerate(plot.lines):
        bins = curves[series].bins() if series in curves else []
        if place == 0 and plot.spread in curves:
            bins = within(with_spread(bins, curves[series], curves[plot.spread]), curves, plot)
        if bins:
            lines.append(PlotLine(name, of_place(place), bins))
    if not lines:
        return None
    first = next(series for series, name in plot.lines if name == lines[0].name)
    legend = [(line.name, line.colour) for line in lines] if len(lines) > 1 else []
    note = " ".join(filter(None, [plot.note, _not_finite(curves, plot)]))
    chart = line_chart(lines, f"{plot.title} over versions")
    return Card(plot.title, chart, number(curves[first].values[-1]), legend, note)


def with_spread(bins: Sequence[CurveBin], curve: Curve, spread: Curve) -> list[CurveBin]:
    """The bins with a band of mean +- spread. The spread of a bin is the mean of its points' spreads."""
    if len(bins) == len(curve):
        widths = [spread.at(int(one.x)) or 0.0 for one in bins]
    elif len(curve) == len(spread):
        widths = [one.mean for one in spread.bins()]
    else:
        return list(bins)
    return [CurveBin(one.x, one.mean, one.mean - w, one.mean + w) for one, w in zip(bins, widths, strict=True)]


def within(bins: Sequence[CurveBin], curves: Curves, plot: Plot) -> list[CurveBin]:
    """Bands that end where no value lies: at the least and the largest member, and at 0 and 1 of a share."""
    least, largest = (curves[name].bins() if name in curves else [] for name in plot.bounds)
    if len(least) == len(largest) == len(bins):
        edges = [(low.low, high.high) for low, high in zip(least, largest, strict=True)]
    else:
        edges = [(0.0, 1.0) if plot.is_share else (float("-inf"), float("inf"))] * len(bins)
    return [
        CurveBin(one.x, one.mean, min(max(one.low, low), one.mean), max(min(one.high, high), one.mean))
        for one, (low, high) in zip(bins, edges, strict=True)
    ]


def _named_rewards(curves: Curves) -> Iterator[tuple[str, str]]:
    for series in sorted(curves):
        if series.startswith("rollout/reward/"):
            yield series, series.removeprefix("rollout/reward/")


def _not_finite(curves: Curves, plot: Plot) -> str:
    n = sum(curves[series].n_not_finite for series, _ in plot.lines if series in curves)
    return f"{n} values are not finite and not drawn." if n else ""
