"""verl's on-policy distillation: one teacher, beside the reward or in its place."""

import re

from areal_convert.mapping import Absent, Foreign, Key, Ours
from areal_convert.values import number, path_of, skip, truth, unless, whole

ENABLED, LOSS = "distillation.enabled", "distillation.distillation_loss."
PATH = "distillation.teacher_models.teacher_model.model_path"
ANY_PATH = re.compile(r"distillation\.(teacher_models\.[^.]+|teacher_model)\.model_path")
MEAN = {  # estimators of the sampled token -> actor.distill_beta of the divergence that has the mean of their gradient
    "k2": 1.0,
    "mse": 1.0,
    "k3": 0.0,
    "low_var_kl": 0.0,
}
KEYS = (
    Key(ENABLED, "teacher.path", "with one teacher", None, skip),
    Key(PATH, "teacher.path", "with enabled; on the learners here", None, skip),
    Key(f"{LOSS}loss_mode", "actor.distill_beta, actor.advantage", "forward_kl_topk: 0; k1 with use_policy_gradient: "
        "an advantage; k2 and k3: the KL with their mean gradient", "k3", skip),
    Key(f"{LOSS}topk", "actor.distill_top_k", "with forward_kl_topk", 32, skip),
    Key(f"{LOSS}use_policy_gradient", "actor.advantage", "with k1", False, skip),
    Key(f"{LOSS}use_task_rewards", "actor.distill_coef", "false: actor.advantage = distill", True, skip),
    Key(f"{LOSS}distillation_loss_coef", "actor.distill_coef", "with use_task_rewards", 1.0, skip),
)  # fmt: skip


def is_off(value: object, foreign: Foreign) -> bool:
    return not foreign.get(ENABLED, False)


def as_policys(value: object, foreign: Foreign) -> bool:
    """A bound of the teacher's own policy loss, unless it is that of the reward's."""
    low, high = (foreign.get(f"actor_rollout_ref.actor.clip_ratio{end}", 0.2) for end in ("_low", "_high"))
    return is_off(value, foreign) or value in (None, low, high)


ABSENT = (
    Absent(f"{LOSS}loss_max_clamp", "the teacher's loss is not clamped", lambda value, foreign: value is None or is_off(
        value, foreign)),
    Absent(f"{LOSS}log_prob_min_clamp", "the teacher's log-probs are not clamped", lambda value, foreign: (
        value is None or is_off(value, foreign))),
    Absent(f"{LOSS}policy_loss_mode", "the advantage of the teacher is in actor.loss", lambda value, foreign: (
        unless("vanilla")(value, foreign) or is_off(value, foreign))),
    Absent(f"{LOSS}clip_ratio*", "the advantage of the teacher is in actor.loss, with its range", as_policys),
    Absent("distillation.*model_path", "one teacher for all rows: teacher.path", is_off),
    Absent("distillation.n_gpus_per_node"),
    Absent("distillation.nnodes"),
    Absent("distillation.teacher_key", "one teacher for all rows: teacher.path", lambda value, foreign: (
        unless("data_source")(value, foreign) or is_off(value, foreign))),
    Absent("distillation.teacher_models.*.num_replicas"),
    Absent("distillation.teacher_models.*.key", "one teacher for all rows: teacher.path", is_off),
    Absent("distillation.teacher_models.*.inference*"),
    Absent("distillation.*", "no counterpart: docs/algorithms.md has what there is", is_off),
)  # fmt: skip


def distillation(ours: Ours, foreign: Foreign) -> None:
    """Sets teacher.path and what is trained from it; of several teachers, or an unknown loss, nothing."""
    if not truth(foreign.get(ENABLED, False)):
        return
    paths = {key: value for key, value in foreign.values.items() if ANY_PATH.fullmatch(key) and value}
    settings = loss_settings(foreign)
    if len(paths) != 1:
        foreign.lose(ENABLED, f"one teacher for all rows, and the file names {len(paths)}: set teacher.path")
    elif settings is None:
        foreign.lose(ENABLED, "no teacher without a loss from it: set teacher.path and actor.distill_beta")
    if len(paths) != 1 or settings is None:
        return
    ((where, path),) = paths.items()
    foreign.put(ours, path_of("teacher.path")(path, foreign), ENABLED, where)
    foreign.put(ours, settings, f"{LOSS}loss_mode", f"{LOSS}topk", f"{LOSS}use_policy_gradient")
    beside, weight = f"{LOSS}use_task_rewards", f"{LOSS}distillation_loss_coef"
    factor = number(foreign.get(weight))
    if truth(foreign.get(beside)) and factor > 0:
        foreign.put(ours, {"actor.distill_coef": factor}, weight, beside)
        return
    if factor != 1:
        foreign.lose(weight, "the only loss: scale actor.lr")
    without_reward(ours, foreign)
    foreign.put(ours, {"actor.advantage": "distill"}, beside)


def loss_settings(foreign: Foreign) -> Ours | None:
    """Of a loss over the vocabulary; {} for the log-ratio as an advantage, None where there is none like it."""
    mode, key = str(foreign.get(f"{LOSS}loss_mode")).lower(), f"{LOSS}loss_mode"
    is_advantage = truth(foreign.get(f"{LOSS}use_policy_gradient"))
    if mode == "forward_kl_topk":
        foreign.notes["actor.distill_top_k"] = "all other words are one class here, and left out there"
        return {"actor.distill_beta": 0.0, "actor.distill_top_k": whole(foreign.get(f"{LOSS}topk"))}
    if mode in ("kl", "k1") and is_advantage:
        return {}
    if mode in MEAN and not is_advantage:
        foreign.notes["actor.distill_beta"] = f"the KL over the vocabulary, whose gradient {mode} has on average"
        return {"actor.distill_beta": MEAN[mode]}
    foreign.lose(key, f"{mode!r} is not there as {'an advantage' if is_advantage else 'a loss'}: docs/algorithms.md")
    return None


def without_reward(ours: Ours, foreign: Foreign) -> None:
    """Remove what only changes the reward."""
    why = "the teacher alone is learned from: no reward is used"
    foreign.remove(ours, why, "actor.overlong", "actor.normalize_batch")
    if ours.get("actor.kl_in") == "reward":
        foreign.remove(ours, why, "actor.kl_")
