"""Keys that are gone: refused in new settings, left out of those that an older version saved with its run."""

import json
from collections.abc import Mapping
from typing import Any

from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError

ALARMS = "the rules of alarms have fixed thresholds (docs/alarms.md); turn an alarm off with watch.off"
PLANNED = "the planner chooses from one learner rank to as many as leave one generator; set topology.adapt.schedule"
LOOP = "a ring cannot have it; train {} in one process by `python -m areal_lab.loops.{} CONFIG.toml --out FOLDER`"
THRESHOLDS = {
    "window": 5,
    "horizon": 20,
    "held_out_drop": 0.05,
    "reward_drop": 0.5,
    "length_ratio": 1.5,
    "repeated_share": 0.2,
    "template_share": 0.5,
    "entropy_ratio": 0.35,
    "mismatch_kl": 0.1,
    "masked_share": 0.1,
    "no_signal_share": 0.8,
    "learner_wait_share": 0.9,
    "generator_wait_share": 0.75,
}
REMOVED: Mapping[str, tuple[Any, str]] = {  # key: its default, which is ignored, and why the key is gone
    "rollout.exact_lag": ([], LOOP.format("with a given lag", "exact_lag")),
    "virtual_time.seconds": (None, LOOP.format("in virtual time", "virtual_time")),
    "learner.helpers": (0, "its threads shortened an update by a tenth, only for very small models; sums differed"),
    "topology.adapt.eta_min": (None, "it cost 2 % of throughput; set the eta itself, rollout.max_head_offpolicyness"),
    "topology.adapt.slots_min": (
        None,
        "it cost 1 % of speed; set the slots themselves, rollout.max_concurrent_rollouts",
    ),
    "topology.adapt.hysteresis": (0.03, "the split changes for a predicted gain of 3 %"),
    "topology.adapt.min_learners": (1, PLANNED),
    "topology.adapt.max_learners": (None, PLANNED),
    "data.curriculum.every": (4, "a row outside of the window comes in one of four passes; set low and high"),
    "learner.warmup.batch_size": (64, "a supervised step has 64 demonstrations; set learner.warmup.steps"),
    "actor.correction_level": (None, 'set actor.correction = "tis_sequence", for icepop correction_action = "mask"'),
    "actor.sft_coef": (0.0, "no run trained good samples a second time; weigh them in a loss, actor.loss"),
    "actor.sft_min_reward": (1.0, "it chose samples for actor.sft_coef, which is gone, too"),
    "actor.normalize_batch_over": ("signal", 'it was for actor.normalize_batch alone; set that to "all"'),
    "actor.sapo_tau_pos": (1.0, "one key has both temperatures; set actor.sapo_tau = [1.0, 1.05]"),
    "actor.sapo_tau_neg": (1.05, "one key has both temperatures; set actor.sapo_tau = [1.0, 1.05]"),
    "actor.lora.offload": (False, 'one key says what is in host memory; set actor.offload = "base"'),
    "actor.behav_imp_weight_mode": ("clamp", "actor.correction_action has it for each correction; set that"),
    "critic.lr_warmup_steps": (0, "the critic warms up as the policy does; set actor.lr_warmup_steps"),
    "critic.weight_decay": (0.0, "the critic has the weight decay of the policy; set actor.weight_decay"),
    "critic.max_grad_norm": (1.0, "the critic's gradient is clipped as the policy's; set actor.max_grad_norm"),
    "reward.judge.call_timeout_s": (30.0, "one call waits for 30 s at most; set reward.timeout_s, of a whole score"),
    "reward.judge.max_retries": (8, "a call is repeated until the score's deadline; set reward.timeout_s"),
    "reward.judge.max_concurrent": (8, "each worker has one call in flight at most; set reward.workers"),
    "reward.judge.max_budget_tokens": (None, "limit the cost by reward.judge.max_calls and reward.judge.max_tokens"),
    "reward.judge.cache": (True, "replies are kept; start a new run to ask again"),
    "launch.grace_s": (5.0, "actors have 5 s to exit, which mpirun and Slurm allow"),
    "bus.port": (0, "the head takes a free port; the other ranks learn it at the start"),
    "bus.heartbeat_s": (1.0, "three heartbeats are sent in bus.silent_s; set that"),
    "bus.resend_s": (120.0, "a trajectory without acknowledgement is sent again after 120 s"),
    "bus.inbox_mib": (256, "a receive queue holds 256 MiB; its senders keep what does not fit"),
    "rollout.report_mib": (256, "the head stores 256 MiB of unfinished samples; set rollout.report_tokens for fewer"),
    "learner.max_logits_mib": (512, "logits above 512 MiB are computed in chunks; set learner.max_tokens_per_mb"),
    "weights.bucket_mib": (64, "a broadcast has 256 MiB at most, whatever the model"),
    "weights.delta_versions": (8, "a member that missed more than 8 versions gets all bytes"),
    "evaluate.slots_share": (0.25, "an evaluation has a quarter of the slots; set rollout.max_concurrent_rollouts"),
    "watchdog.absent_action": ("abort", "a job without rewards or generators ends after watchdog.act_s; set that"),
    "journal.detail_mib": (64, "the first 64 MiB of a process's journal keep the times of single spans"),
    "journal.segment_mib": (8, "a file of a journal ends at 8 MiB and is compressed; `zcat -f` reads both kinds"),
    "profile.seconds": (10.0, "a recording on demand takes 10 s; record a number of steps with profile.steps"),
    **{f"watch.{name}": (default, ALARMS) for name, default in THRESHOLDS.items()},
}
OF_LABORATORY = {"virtual_time": "virtual_time.seconds", "exact_lag": "rollout.exact_lag"}
"""Tables of areal_lab, and the former key that says so; older rings saved the first, too."""


def why(key: str) -> str:
    """Why a former key is gone; "" for another."""
    return REMOVED.get(OF_LABORATORY.get(key.partition(".")[0], key), (None, ""))[1]


def refuse(tree: dict[str, Any], origins: Mapping[str, str]) -> None:
    """Delete keys that are gone. Raises ConfigError for a value other than the former default."""
    for key, (default, reason) in REMOVED.items():
        *sections, name = key.split(".")
        table = _table(tree, sections)
        if name in table and (value := table.pop(name)) != default:
            remedy = f"remove it (it is {json.dumps(value)}; {origins[key]})"
            raise ConfigError(f"{key} no longer exists: {reason}; {remedy}")


def ignored(tree: dict[str, Any]) -> list[str]:
    """A note on each key that is gone and that these saved settings give a value of its own."""
    found = []
    _move(tree)
    for key, (default, why) in REMOVED.items():
        *sections, name = key.split(".")
        if (value := _table(tree, sections).get(name, default)) not in (default, None):
            found.append(f"{key} = {json.dumps(value)} is ignored, as the key no longer exists: {why}")
    return found


def left_out(tree: dict[str, Any]) -> dict[str, Any]:
    """These saved settings without the keys that are gone, whatever their values. They are deleted in place."""
    _move(tree)
    for key in (*REMOVED, *OF_LABORATORY):
        *sections, name = key.split(".")
        _table(tree, sections).pop(name, None)
    return tree


def _move(tree: dict[str, Any]) -> None:
    """Set the successor of a saved key that has one."""
    actor = _table(tree, ["actor"])
    is_decoupled = actor.get("correction") in (None, "", "decoupled") and actor.get("behav_imp_weight_cap") is not None
    if actor.get("behav_imp_weight_mode") == "mask" and is_decoupled:
        del actor["behav_imp_weight_mode"]
        actor["correction_action"] = "mask"
    if actor.pop("normalize_batch_over", "") == "all" and actor.get("normalize_batch"):
        actor["normalize_batch"] = "all"
    taus = [actor.pop(f"sapo_tau_{sign}", default) for sign, default in (("pos", 1.0), ("neg", 1.05))]
    if taus != [1.0, 1.05]:
        actor["sapo_tau"] = taus
    if _table(actor, ["lora"]).get("offload"):
        del actor["lora"]["offload"]
        actor["offload"] = "base"


def saved(text: str) -> Config:
    """The settings in the config.json of a run, also of an older version. Raises ValueError."""
    tree = json.loads(text)
    return Config.model_validate_json(json.dumps(left_out(tree)) if isinstance(tree, dict) else text)


def _table(tree: dict[str, Any], sections: list[str]) -> dict[str, Any]:
    """The table at this place; an empty one if there is none."""
    table: Any = tree
    for section in sections:
        table = table.get(section) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}
