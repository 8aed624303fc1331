"""Where the time went: a stacked chart for each actor and for a step, totals, pushes, occupancy and waiting."""

from collections.abc import Sequence
from math import fsum
from statistics import fmean

from tools.breakdown.flops import FORMULA
from tools.breakdown.steps import COLUMNS, Step, summary
from tools.breakdown.waits import MEANING
from tools.report.facts.curves import CurveBin, StepBins
from tools.report.facts.run_facts import Breakdown, RunFacts
from tools.report.page.charts import Layer, PlotLine, bar_rows, legend_of, line_chart, number, stacked_chart
from tools.report.page.curve_cards import Plot, plot_card
from tools.report.page.parts import N_COLOURS, Card, PageTable, Section, of_label, of_labels, of_place

MAX_ACTORS = 16  # with a chart of their own
MAX_ROWS = 48  # actors with a bar
STEP_BINS = 120
ROLES = ("learner", "generator", "reward", "head")
QUANTILES = ("median", "p90", "max")


def time_section(facts: RunFacts) -> Section:
    """Where each actor's time went, by step."""
    intro = "Each second of a process has one label; it counts for the version in the making. Grey is waiting."
    section = Section("time", "Where the time went", intro)
    order = sorted(facts.time.labels, key=lambda name: (_role_place(name), _rank(name)))
    if facts.breakdown is not None:
        section.cards += step_cards(facts.breakdown.steps)
    section.cards += [actor_card(name, facts.time.labels[name]) for name in order[:MAX_ACTORS]]
    if len(order) > MAX_ACTORS:
        section.note = f"{len(order) - MAX_ACTORS} more actors have no chart: their totals are in the bars."
    if order:
        section.cards.append(totals_card(facts, order))
    tables = [step_table(facts.breakdown), wait_table(facts.breakdown)] if facts.breakdown else []
    section.tables += [table for table in tables if table.rows]
    reused, of = facts.time.n_reused, facts.time.n_prompt
    prefixes = f"Generators reused the keys of {reused / of:.1%} of {of:,} prompt tokens." if of else ""
    section.note = " ".join(filter(None, [section.note, prefixes, facts.gap]))
    return section


def _role_place(name: str) -> int:
    role = name.partition("-")[0]
    return ROLES.index(role) if role in ROLES else len(ROLES)


def _rank(name: str) -> int:
    return int(name.rpartition("-")[2])


def edges_of(bins: StepBins) -> list[float]:
    """Versions at the edges of the bins, from the first to the last one that is used."""
    places = [place for values in bins.sums.values() for place in values]
    return [place * bins.width for place in range(min(places), max(places) + 2)]


def layers_of(bins: StepBins, edges: Sequence[float]) -> list[Layer]:
    """A layer a label, the largest first; greys last, so that work is at the bottom."""
    first = int(edges[0] // bins.width)
    names = sorted(bins.sums, key=lambda name: (of_label(name).startswith("w"), -bins.total(name)))
    colours = of_labels(names)
    places = range(first, first + len(edges) - 1)
    return [Layer(name, colours[name], [bins.sums[name].get(i, 0.0) for i in places]) for name in names]


def actor_card(name: str, bins: StepBins) -> Card:
    """The shares of one actor's labels by version."""
    edges = edges_of(bins)
    layers = layers_of(bins, edges)
    chart = stacked_chart(edges, layers, f"Time of {name} by label", unit=" %", of_all=True)
    total = sum(bins.total(label) for label in bins.sums) or 1.0
    legend = [(f"{one.name} {bins.total(one.name) / total:.0%}", one.colour) for one in layers]
    return Card(name, chart, "% of its time", [one for one in legend if not one[0].endswith(" 0%")])


def totals_card(facts: RunFacts, order: Sequence[str]) -> Card:
    """One bar an actor, or one a role in a large ring."""
    totals: dict[str, dict[str, float]] = {}
    for name in order:
        row = totals.setdefault(name if len(order) <= MAX_ROWS else name.partition("-")[0], {})
        bins = facts.time.labels[name]
        for label in bins.sums:
            row[label] = row.get(label, 0.0) + bins.total(label)
    colours = of_labels(label for row in totals.values() for label in row)
    ordered = {name: sorted(row.items(), key=lambda item: -item[1]) for name, row in totals.items()}
    rows = [(name, [Layer(label, colours[label], [s]) for label, s in row]) for name, row in ordered.items()]
    what = "Totals by actor" if len(order) <= MAX_ROWS else f"Totals by role ({len(order)} actors)"
    return Card(what, bar_rows(rows, what), "whole run", legend_of(rows))


def step_cards(steps: Sequence[Step]) -> list[Card]:
    """The seconds of a step by cause, over versions."""
    whole = [step for step in steps if step.step_s is not None]
    if not whole:
        return []
    size = -(-len(whole) // STEP_BINS)
    chunks = [whole[i : i + size] for i in range(0, len(whole), size)]
    edges = [chunk[0].version - 0.5 for chunk in chunks] + [whole[-1].version + 0.5]
    names = {attribute: heading for heading, attribute in COLUMNS.items()}
    colours = of_labels(("update_s", "wait_push_s", "wait_reward_s", "wait_sampling_s"))
    layers = [
        Layer(names[part], colour, [fmean(getattr(step, part) or 0.0 for step in chunk) for chunk in chunks])
        for part, colour in colours.items()
    ]
    chart = stacked_chart(edges, layers, "Seconds of a step by cause", unit=" s", of_all=False)
    mean = f"{number(fmean(step.step_s or 0.0 for step in whole))} s"
    return [Card("A step of the learner", chart, mean, [(one.name, one.colour) for one in layers], "Seconds.")]


def step_table(found: Breakdown) -> PageTable:
    """Median, 90 % quantile and maximum over the steps."""
    from_steps = summary(found.steps)
    known = {heading: from_steps[attribute] for heading, attribute in COLUMNS.items() if attribute in from_steps}
    rows = [[heading, *(number(values[name]) for name in QUANTILES)] for heading, values in known.items()]
    return PageTable(["seconds of a step", "median", "90 %", "longest"], rows, right=frozenset({1, 2, 3}))


def wait_table(found: Breakdown) -> PageTable:
    waits = [(one, MEANING.get(one.cause, "")) for one in found.waits if one.seconds > 0]
    rows = [[one.role, one.cause, number(one.seconds), f"{one.share:.1%}", why] for one, why in waits]
    return PageTable(["role", "waited for", "seconds", "share", "meaning"], rows, "Waits", frozenset({2, 3}))


def push_section(facts: RunFacts) -> Section:
    section = Section("push", "Weight pushes")
    plots = (
        Plot("From begin to publish", [("perf/push_s", "seconds")], note="Seconds. The next update runs meanwhile."),
        Plot("Decoding pause", [("perf/push_stall_s", "seconds")], note="Seconds, the longest of a generator."),
    )
    section.cards += [card for plot in plots if (card := plot_card(facts.curves, plot)) is not None]
    cost = facts.breakdown.pushes if facts.breakdown else None
    if cost is None or not cost.n:
        section.note = "No push was published."
        return section
    rows = [
        ["pushes published", str(cost.n), ""],
        ["begin to publish, mean", f"{number(cost.published_s / cost.n)} s", "the next update runs meanwhile"],
        ["receive, all generators", f"{number(cost.receive_s)} s", "beside decoding"],
        ["swap, all generators", f"{number(cost.stall_s)} s", f"{cost.stall_share:.1%} of their time: decoding stands"],
        ["snapshot, all learners", f"{number(cost.snapshot_s)} s", f"{cost.snapshot_share:.1%} of their time"],
    ]
    if cost.n_sent:
        rows.append(["bytes sent", cost.sent, cost.forms])
    section.tables.append(PageTable(["cost", "time", ""], rows, right=frozenset({1})))
    return section


def utilisation_table(facts: RunFacts) -> PageTable | None:
    """Model FLOP utilisation by role; None when the journal has no `model` line."""
    used = facts.breakdown.used if facts.breakdown else []
    rows = [
        [one.role, f"{one.rate / 1e12:.4g} TFLOP/s", "peak not known" if one.mfu is None else f"{one.mfu:.1%}"]
        for one in used
    ]
    title = f"Model FLOP utilisation: {' '.join(FORMULA.splitlines()[:2])}"
    table = PageTable(["role", "a process", "utilisation"], rows, title, frozenset({1, 2}), is_folded=True)
    return table if rows else None


def generator_section(facts: RunFacts) -> Section:
    """How full the generators are, and for what they wait."""
    section = Section("generators", "Generators: occupancy and waiting")
    lines = occupancy_lines(facts)
    slots = facts.setting("rollout.max_concurrent_rollouts")
    if lines:
        note = "Samples begun and not finished, mean over time."
        if isinstance(slots, int):
            has = f"{slots} slots (rollout.max_concurrent_rollouts)"
            note += f" A generator has {has}; more samples wait in the engine."
        legend = [(line.name, line.colour) for line in lines]
        chart = line_chart(lines, "Samples in flight of each generator over versions", from_zero=True)
        section.cards.append(Card("Samples in flight", chart, _mean_in_flight(facts), legend, note))
    waiting = waiting_card(facts)
    section.cards += [waiting] if waiting else []
    if not section.cards:
        section.note = "No generator has written its samples or its time."
    return section


def _mean_in_flight(facts: RunFacts) -> str:
    used = [bins for bins in facts.time.in_flight.values() if bins.total("seconds")]
    each = [bins.total("samples") / bins.total("seconds") for bins in used]
    return f"{number(fmean(each))} a generator" if each else ""


def occupancy_lines(facts: RunFacts) -> list[PlotLine]:
    """Samples in flight by version: a line a generator, or the mean with the band of all in a large ring."""
    each = {name: bins for name, bins in sorted(facts.time.in_flight.items()) if bins.total("seconds") > 0}
    found = {name: _in_flight(bins) for name, bins in each.items()}
    if len(found) <= N_COLOURS:
        return [
            PlotLine(name, of_place(place), [CurveBin(x, n, n, n) for x, n in values.items()])
            for place, (name, values) in enumerate(found.items())
        ]
    versions: dict[float, list[float]] = {}
    for values in found.values():
        for x, n in values.items():
            versions.setdefault(x, []).append(n)
    bins = [CurveBin(x, fmean(all_n), min(all_n), max(all_n)) for x, all_n in sorted(versions.items())]
    return [PlotLine(f"mean, least and most of {len(found)}", of_place(0), bins)]


def _in_flight(bins: StepBins) -> dict[float, float]:
    """Mean number of samples by the last version of each bin."""
    samples, seconds = bins.sums.get("samples", {}), bins.sums["seconds"]
    used = {place: s for place, s in sorted(seconds.items()) if s > 0}
    return {(place + 1) * bins.width - 1.0: samples.get(place, 0.0) / s for place, s in used.items()}


def waiting_card(facts: RunFacts) -> Card | None:
    """Share of all generators' time without decoding, by cause."""
    together = StepBins()
    for name, bins in facts.time.labels.items():
        if name.startswith("generator-"):
            for label, values in bins.sums.items():
                for place, seconds in values.items():
                    together.add(label, place * bins.width, seconds)
    causes = [label for label in together.sums if label.partition(":")[0] in ("idle", "swap")]
    if not causes:
        return None
    edges = edges_of(together)
    layers = [one for one in layers_of(together, edges) if one.name in causes]
    totals = [fsum(column) for column in zip(*(one.values for one in layers_of(together, edges)), strict=True)]
    shares = [one.shares(totals) for one in layers]
    whole = fsum(together.total(label) for label in together.sums)
    legend = [(f"{one.name} {together.total(one.name) / whole:.1%}", one.colour) for one in shares]
    chart = stacked_chart(edges, shares, "Share of the generators' time without decoding", unit=" %", of_all=False)
    lost = f"{fsum(together.total(label) for label in causes) / whole:.0%}"
    whys = {label: MEANING.get(label.partition(":")[2]) for label in causes}
    explained = ". ".join(f"{label}: {why}" for label, why in whys.items() if why)
    note = f"Percent of the time of all generators. {explained}"
    return Card("Waiting and swaps", chart, lost, legend, f"{note.rstrip('. ')}.")
