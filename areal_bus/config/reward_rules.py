"""Rules across the settings of [reward]: weighted terms and forms of a completion."""

import re

from areal_bus.config.rewards import RewardConfig
from areal_bus.messages import MAX_PARTS

WEIGHTED = "weighted"

Rule = tuple[bool, str]  # (whether it is violated, error text)


def reward_rules(reward: RewardConfig) -> list[Rule]:
    return [*_terms(reward), *_format(reward)]


def _terms(reward: RewardConfig) -> list[Rule]:
    labels = [term.label for term in reward.terms]
    twice = [label for label in labels if labels.count(label) > 1]
    is_weighted = reward.function == WEIGHTED
    return [
        (
            is_weighted and not reward.terms,
            'reward.function = "weighted" is the sum of reward.terms: add a table [[reward.terms]]',
        ),
        (
            bool(reward.terms) and not is_weighted,
            f'reward.terms are read by reward.function = "weighted" only: it is {reward.function!r}',
        ),
        (len(labels) > MAX_PARTS, f"reward.terms has at most {MAX_PARTS} tables: there are {len(labels)}"),
        (bool(twice), f"each of reward.terms needs a name of its own: set name where {twice[:1]} occurs again"),
        (
            WEIGHTED in [term.function for term in reward.terms],
            'a term cannot be "weighted" itself: name its terms in reward.terms',
        ),
        (
            bool(labels) and not any(term.weight for term in reward.terms),
            "one of reward.terms needs a weight other than 0: all weights are 0",
        ),
    ]


def _format(reward: RewardConfig) -> list[Rule]:
    pattern = reward.format.pattern
    return [
        (
            bool(error := pattern_error(pattern)),
            f"reward.format.pattern must be a regular expression: {pattern!r}: {error}",
        )
    ]


def pattern_error(pattern: str) -> str:
    """Why this is no regular expression; empty for one."""
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return ""
