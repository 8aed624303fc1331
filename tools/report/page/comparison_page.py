"""The page of several runs: their curves in one chart, seeds as mean and band."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from tools.report.facts.run_facts import RunFacts
from tools.report.facts.seeds import SeedGroup, groups_of, mean_and_range, paired
from tools.report.facts.settings_rows import SEED, differences
from tools.report.page.charts import Layer, PlotLine, bar_rows, legend_of, line_chart, number
from tools.report.page.curve_cards import HELD_OUT, PLOTS
from tools.report.page.parts import N_COLOURS, Card, Page, PageTable, Section, of_labels, of_place
from tools.report.verdict.learning import METRICS, parts
from tools.report.verdict.remarks import Grade, Remark, Verdict, seconds

OF_THE_TASK = ("model.path", "data.path", "data.task", "reward.function")
ROLES = ("learner", "generator", "reward", "head")


def comparison_page(runs: Sequence[RunFacts], verdicts: Sequence[Verdict]) -> Page:
    """The page. Runs whose configs differ in the seed only are one line with a band."""
    groups = groups_of(runs)
    differing = differences([group.runs[0].config for group in groups])
    answers = [
        ("How do they differ?", differing_remark(groups, differing)),
        ("Which is better?", better_remark(groups, is_one_task=not any(key in differing for key in OF_THE_TASK))),
        ("Which is faster?", faster_remark(groups)),
    ]
    sections = [verdicts_section(runs, verdicts), curves_section(groups), times_section(runs)]
    sections.append(differences_section(groups, differing))
    folders = ", ".join(str(one.where.folder) for one in runs)
    return Page(f"{len(runs)} runs compared", folders, answers, (), (), sections, first_cards(groups))


def differing_remark(groups: Sequence[SeedGroup], differing: Mapping[str, Sequence[str]]) -> Remark:
    """In what the settings differ. Runs of different tasks are compared with a warning."""
    if len(groups) == 1:
        return Remark(Grade.GOOD, "In their seeds only.")
    if any(not group.runs[0].config for group in groups):
        return Remark(Grade.NOTE, "Not known: not every run has a config.json.")
    keys = ", ".join(list(differing)[:6]) + (f" and {len(differing) - 6} more" if len(differing) > 6 else "")
    task = [key for key in OF_THE_TASK if key in differing]
    if task:
        return Remark(Grade.NOTE, "In model, data or reward.", f"Different: {keys}.")
    return Remark(Grade.GOOD, f"In {len(differing)} settings.", f"{keys}.")


def better_remark(groups: Sequence[SeedGroup], *, is_one_task: bool) -> Remark:
    """The group with the best held-out score, or the best late reward, over the seeds of each."""
    if not is_one_task:
        return Remark(Grade.NOTE, "Their scores do not compare: they have different tasks.")
    for metric in (*METRICS, "rollout/reward"):
        scores = [(group.name, _scores(group, metric)) for group in groups]
        if all(of_seed for _, of_seed in scores):
            break
    else:
        return Remark(Grade.NOTE, "Not known: they have no score in common.")
    what = "reward of the last fifth of the updates" if metric.startswith("rollout") else f"held-out {metric[5:]}"
    scores.sort(key=lambda one: -fmean(one[1].values()))
    told = "; ".join(f"{name}: {number(fmean(of.values()))}" for name, of in scores[:N_COLOURS])
    if len(groups) == 1:
        return Remark(Grade.GOOD, "They are seeds of one setting.", f"Mean {what}: {told}.")
    (best, of_best), (_, of_next) = scores[:2]
    difference = paired(of_best, of_next)
    verdict = difference.verdict if difference else "no common seed"
    if verdict == "higher":
        return Remark(Grade.GOOD, f"{best} has the highest score.", f"Mean {what}: {told}. Paired by seed, 95 %.")
    why = {"one seed only": "one seed of each cannot tell a difference from noise"}.get(verdict, verdict)
    return Remark(Grade.NOTE, f"{best} scores highest, but it is not certain: {why}.", f"Mean {what}: {told}.")


def _scores(group: SeedGroup, metric: str) -> dict[int, float]:
    """Seed -> the last held-out score, or the mean reward of the last fifth of the updates."""
    found = {}
    for place, one in enumerate(group.runs):
        values, seed = one.curve(metric).values, one.setting(SEED)
        if values:
            late = parts(values)[1] if metric.startswith("rollout") else values[-1:]
            found[seed if isinstance(seed, int) else -1 - place] = fmean(late)
    return found


def faster_remark(groups: Sequence[SeedGroup]) -> Remark:
    """The group with the most sampled tokens a second."""
    speeds = {}
    for group in groups:
        each = [fmean(curve.values) for curve in group.curves("perf/tokens_per_s")]
        if each:
            speeds[group.name] = fmean(each)
    if len(speeds) < len(groups):
        return Remark(Grade.NOTE, "Not known: not every run has two updates.")
    best = max(speeds, key=lambda name: speeds[name])
    told = "; ".join(f"{name}: {number(speed)} tokens/s" for name, speed in speeds.items())
    sentence = f"{best}." if len(groups) > 1 else f"{number(speeds[best])} tokens/s."
    return Remark(Grade.GOOD, sentence, f"Sampled tokens of a batch over the time of its step, mean: {told}.")


def verdicts_section(runs: Sequence[RunFacts], verdicts: Sequence[Verdict]) -> Section:
    rows = [
        [one.name, str(one.n_versions), seconds(one.wall_s), of.limit.sentence, of.learning.sentence,
         of.health_summary.sentence] for one, of in zip(runs, verdicts, strict=True)
    ]  # fmt: skip
    columns = ["run", "updates", "duration", "what limits it", "does it learn", "is it healthy"]
    return Section("runs", "Each run", tables=[PageTable(columns, rows, right=frozenset({1, 2}))])


def curves_section(groups: Sequence[SeedGroup]) -> Section:
    """One chart a series that any run has, one line a group."""
    has_seeds = any(len(group.runs) > 1 for group in groups)
    intro = "By version; reward and held-out score are above."
    intro += " A line is the mean over seeds, its band the least and the largest." if has_seeds else ""
    section = Section("curves", "Curves", intro)
    for plot in PLOTS[1:]:
        card = overlay_card(plot.title, plot.lines[0][0], groups[:N_COLOURS])
        section.cards += [card] if card is not None else []
    if len(groups) > N_COLOURS:
        section.note = f"The first {N_COLOURS} of {len(groups)} settings are drawn."
    elif not section.cards:
        section.note = "No update and no evaluation yet."
    return section


def first_cards(groups: Sequence[SeedGroup]) -> list[Card]:
    """The reward, and the first held-out score that any run has."""
    held_out = next((field for field in HELD_OUT if any(group.curves(f"eval/{field}") for group in groups)), None)
    plots = [(PLOTS[0].title, PLOTS[0].lines[0][0])]
    plots += [(f"Held-out {held_out.replace('_at_k', '@k')}", f"eval/{held_out}")] if held_out else []
    cards = [overlay_card(title, series, groups[:N_COLOURS]) for title, series in plots]
    return [card for card in cards if card is not None]


def overlay_card(title: str, series: str, groups: Sequence[SeedGroup]) -> Card | None:
    """One series of all groups; None without a point."""
    lines = []
    for place, group in enumerate(groups):
        curves = group.curves(series)
        if curves:
            lines.append(PlotLine(group.name, of_place(place), mean_and_range(curves)))
    if not lines:
        return None
    chart = line_chart(lines, f"{title} over versions, {len(lines)} lines")
    return Card(title, chart, "", [(line.name, line.colour) for line in lines])


def times_section(runs: Sequence[RunFacts]) -> Section:
    """The labels of each role, a bar a run."""
    section = Section("time", "Where the time went", "Seconds of all processes of a role by label. Grey is waiting.")
    for role in ROLES:
        each = [share.label for one in runs for share in (one.breakdown.shares if one.breakdown else [])
                if share.role == role]  # fmt: skip
        colours, rows = of_labels(each), []
        for one in runs:
            shares = [share for share in (one.breakdown.shares if one.breakdown else []) if share.role == role]
            if shares:
                layers = [Layer(share.label, colours[share.label], [share.seconds]) for share in shares]
                rows.append((one.name, layers))
        if rows:
            section.cards.append(Card(role, bar_rows(rows, f"Time of role {role}"), "% of its time", legend_of(rows)))
    if not section.cards:
        section.note = "No run has labelled seconds."
    return section


def differences_section(groups: Sequence[SeedGroup], differing: Mapping[str, Sequence[str]]) -> Section:
    section = Section("settings", "Settings that differ")
    if differing:
        rows = [[key, *values] for key, values in differing.items()]
        section.tables.append(PageTable(["key", *(group.name for group in groups)], rows))
    else:
        section.note = "None, apart from seeds, names and folders."
    return section
