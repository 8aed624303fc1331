"""Figures at which training goes wrong: one set for the console, the alarms, the report and the learner's warnings."""

MASKED_SHARE = 0.1  # of sampled tokens that are too old to train
FEW_SIGNALS_SHARE = 0.5  # of groups whose rewards are all equal: training is slow
NO_SIGNAL_SHARE = 0.8  # of them: it learns almost nothing
TRUNCATED_SHARE = 0.5  # of answers that the length limit cuts
LEAST_ESS = 0.5  # effective sample share of an update
