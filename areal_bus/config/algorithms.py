"""Names of the parts of an algorithm, and which go together (docs/algorithms.md). Imports without torch."""

import difflib
import re
from collections.abc import Iterator

from areal_bus.config.learner import ActorConfig, LoraConfig
from areal_bus.config.names.engines import NumberFormats, kind_of
from areal_bus.config.sections import Config

LOSSES = ("ppo", "gspo", "gmpo", "cispo", "sapo", "reinforce", "oapl")
CORRECTIONS = ("decoupled", "tis", "tis_sequence", "icepop", "kpop", "entropy_scaled", "vcpo", "none")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
GROUP = ("grpo", "grpo_process", "dr_grpo", "rloo", "opo", "opo_offpolicy", "oapl")
BATCH_BASELINES = ("reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
GROUP_BASELINES = (*GROUP, "reinforce_plus_plus_baseline")
ADVANTAGES = (*GROUP, *BATCH_BASELINES, "gae", "none", "distill")
PARTS = {"advantage": ADVANTAGES, "loss": LOSSES, "correction": CORRECTIONS, "aggregation": AGGREGATIONS}
CLIPPING = ("ppo", "gspo", "gmpo", "cispo")  # losses that use eps_clip
OPTIMIZERS = ("adamw", "muon", "adamw8bit", "sgd")
DUAL_CLIPPING = ("ppo", "gspo")
MASKING = ("icepop", "kpop", "entropy_scaled")  # corrections that mask unless told otherwise
TEACHER_URL = re.compile(
    r"https?://(\[[0-9A-Fa-f:.]+\]|[^\s/:@?#\[\]]+)(:[0-9]{1,5})?(/[^\s?#]*)?"
)  # no secret: runs save it
OWN_METRIC = ("kpop", "entropy_scaled")  # of these, the ones whose metric is no weight


def correction_of(actor: ActorConfig) -> str:
    """The correction by name; use_decoupled_loss decides where `correction` is empty."""
    return actor.correction or ("decoupled" if actor.use_decoupled_loss else "none")


def uses_reference(actor: ActorConfig) -> bool:
    """Whether the learners hold a reference model."""
    return actor.kl_ctl > 0


def uses_teacher(actor: ActorConfig) -> bool:
    """Whether the learners hold a teacher model."""
    return actor.advantage == "distill" or actor.distill_coef > 0


def is_url(path: str) -> bool:
    """Whether teacher.path is a server, and no folder."""
    return "://" in path


def keeps_reference(c: Config) -> bool:
    """Whether checkpoints hold the reference model, because neither a folder nor the run's seed gives it again."""
    is_made_by_the_run = c.reference.update_every > 0 or (not c.reference.path and c.learner.warmup.steps > 0)
    return uses_reference(c.actor) and is_made_by_the_run


def is_users(name: str) -> bool:
    """Whether it is "module:function"."""
    module, colon, function = name.partition(":")
    return bool(module and colon and function)


def check_names(actor: ActorConfig) -> Iterator[str]:
    """Every part is known, or the user's own."""
    for key, names in PARTS.items():
        name = correction_of(actor) if key == "correction" else getattr(actor, key)
        if name not in names and not is_users(name):
            plain = {one.replace("-", "_"): one for one in names}
            near = difflib.get_close_matches(name.lower().replace("-", "_"), plain, 1, 0.5)
            hint = f"; the nearest is {plain[near[0]]!r}" if near else ""
            yield f'actor.{key} is one of {", ".join(names)}, or "module:function": {name!r} is neither{hint}'


def refusals(c: Config) -> Iterator[str]:
    """Rules for combinations of parts."""
    yield from check_names(c.actor)
    yield from _settings_without_use(c.actor)
    yield from _prox(c.actor)
    yield from _sequences(c.actor)
    yield from _bounds(c.actor)
    yield from _batch(c)
    yield from _frozen_models(c)
    yield from _remote_teacher(c)
    yield from _critic(c)
    yield from _lora(c)
    yield from _optimizer(c.actor)
    yield from _offload(c)
    yield from _simulated(c)
    yield from rounding_rules(c, NumberFormats.of_arguments(c.engine.arguments), "engine.arguments")


def rounding_rules(c: Config, served: NumberFormats, where: str) -> Iterator[str]:
    """Rules for generators whose numbers are not the learner's. `where`: their origin, a URL or a key."""
    nf4 = c.actor.lora is not None and "nf4" in c.actor.lora.variant
    rounded, loader = served.rounded(c.model.dtype), kind_of(c.rollout.engine).requantizes_with
    if served.torchao or (served.is_quantized and loader and served.loader != loader):
        with_loader = f" and --load-format {loader}" if loader else ""
        yield (
            f"{rounded} are refused ({where}), as {c.rollout.engine} would not quantize pushed weights again: use "
            f"--quantization fp8{with_loader}, or none"
        )
    if (nf4 or rounded) and ignores_sampler(c.actor):
        what = f"{rounded} ({where})" if rounded else 'actor.lora.variant "nf4"'
        named = '"decoupled" or "tis"' if c.actor.use_decoupled_loss else '"tis"'  # false contradicts "decoupled"
        remedy = f"actor.correction = {named}"
        remedy += "" if c.actor.recompute_logprobs else ", and actor.recompute_logprobs = true"
        remedy = "actor.recompute_logprobs = false" if c.actor.loss == "sapo" else remedy
        yield (
            f"missing correction with {what}: generators sample with other numbers than the learner computes with; set "
            f"{remedy}"
        )


def ignores_sampler(actor: ActorConfig) -> bool:
    """Whether neither a correction nor the loss has the ratio to the policy that sampled, though there is one."""
    has_own_ratio = actor.loss == "oapl" or (actor.loss != "reinforce" and not actor.recompute_logprobs)
    return correction_of(actor) == "none" and not has_own_ratio and not is_divergence_alone(actor)


def is_divergence_alone(actor: ActorConfig) -> bool:
    """Whether the loss is that from a teacher over the vocabulary, which no ratio weighs."""
    return actor.advantage == "distill" and actor.distill_beta is not None


def _prox(actor: ActorConfig) -> Iterator[str]:
    """Which corrections go with which proximal log-probs."""
    correction = correction_of(actor)
    has_prox = actor.recompute_logprobs or actor.prox_logp_method == "loglinear"
    if actor.loss == "sapo" and correction != "none":
        yield f'actor.loss = "sapo" takes no weight prox/behav: set actor.correction = "none" (it is "{correction}")'
    if correction not in ("none", "vcpo") and not has_prox:
        others = 'actor.prox_logp_method = "loglinear" (or actor.correction = "none")'
        needs = f'actor.correction = "{correction}" needs the proximal log-probs'
        yield f"{needs}: set actor.recompute_logprobs = true, or {others}"
    if actor.prox_logp_method == "loglinear" and correction in ("none", "vcpo"):
        method = 'actor.prox_logp_method = "loglinear"'
        yield f'{method} is for a correction: set actor.correction = "decoupled" (it is "{correction}")'
    if actor.correction and not actor.use_decoupled_loss and correction == "decoupled":
        yield 'actor.use_decoupled_loss = false contradicts actor.correction = "decoupled": remove the first'
    if actor.m2_threshold is not None and (not actor.recompute_logprobs or actor.prox_logp_method == "loglinear"):
        both = 'actor.recompute_logprobs = true and actor.prox_logp_method = "recompute"'
        yield f"actor.m2_threshold compares proximal policy and sampler over the whole minibatch: set {both}"
    if actor.advantage == "grpo_process" and actor.kl_ctl > 0 and actor.kl_in == "reward":
        rule = 'actor.advantage = "grpo_process" compares the rewards of turns'
        yield f'{rule}, and actor.kl_in = "reward" gives one to each token: set actor.kl_in = "loss"'
    if actor.ppo_epochs > 1 and (actor.loss == "reinforce" or actor.prox_logp_method == "loglinear"):
        cause = 'loss = "reinforce"' if actor.loss == "reinforce" else 'prox_logp_method = "loglinear"'
        why = f"needs a ratio to a policy that stays fixed during the update, which actor.{cause} lacks"
        others = 'actor.loss = "ppo" with actor.prox_logp_method = "recompute"'
        yield f"actor.ppo_epochs > 1 {why}: set actor.ppo_epochs = 1, or {others}"


def _sequences(actor: ActorConfig) -> Iterator[str]:
    """Rules for parts that weigh or fit whole trajectories against the sampler."""
    correction = correction_of(actor)
    if actor.loss == "oapl" and correction != "none":
        yield f'actor.loss = "oapl" takes no weight: set actor.correction = "none" (it is "{correction}")'
    if actor.loss == "oapl" and actor.m2_threshold is not None:
        yield 'actor.loss = "oapl" is a square over whole trajectories, and actor.m2_threshold masks tokens: remove it'
    if actor.loss == "oapl" and (actor.advantage in ("gae", "grpo_process") or uses_teacher(actor)):
        made = "a teacher" if uses_teacher(actor) else f'"{actor.advantage}"'
        one = 'actor.loss = "oapl" fits one advantage to each trajectory'
        yield f'{one}, and {made} gives one to each token: set actor.advantage = "oapl", without a teacher'
    if correction == "vcpo" and is_divergence_alone(actor):
        loss = 'the loss of actor.advantage = "distill" with actor.distill_beta'
        yield f'actor.correction = "vcpo" has nothing to weigh in {loss}: set actor.correction = "none"'
    if correction == "vcpo" and actor.loss != "reinforce" and not is_users(actor.loss):
        own = f'actor.loss = "{actor.loss}" has a ratio of its own'
        yield f'actor.correction = "vcpo" weighs by policy over sampler, and {own}: set actor.loss = "reinforce"'


def _bounds(actor: ActorConfig) -> Iterator[str]:
    """Rules of a correction: the quantity it bounds, and its action on tokens out of bounds."""
    correction = correction_of(actor)
    if correction in OWN_METRIC and actor.correction_action == "clamp":
        yield f'actor.correction = "{correction}" bounds no weight: set actor.correction_action = "mask"'
    if (
        actor.correction_metric not in (None, "ratio")
        and actor.correction_action != "mask"
        and not (correction in MASKING and actor.correction_action is None)
    ):
        metric = f'actor.correction_metric = "{actor.correction_metric}"'
        yield f'{metric} is no weight and cannot be clamped: set actor.correction_action = "mask"'
    lower, upper = actor.correction_lower, actor.correction_upper
    if lower is not None and upper is not None and lower > upper:
        yield f"actor.correction_lower ({lower}) must be at most actor.correction_upper ({upper})"


def _batch(c: Config) -> Iterator[str]:
    """Denominators, normalization over the batch, and reward shaping."""
    actor = c.actor
    if actor.reward_scaling == "running" and "oapl" in (actor.advantage, actor.loss):
        yield 'actor.reward_scaling is 1 / beta of "oapl": set a number, as "running" is none'
    if actor.reward_scaling == "running" and actor.reward_bias:
        bias = f"actor.reward_bias ({actor.reward_bias:g})"
        yield f'actor.reward_scaling = "running" subtracts the mean, so {bias} has no effect: remove it'
    if actor.aggregation == "seq-mean-token-sum-norm" and actor.aggregation_length is None:
        example = f"{c.gconfig.max_new_tokens}, gconfig.max_new_tokens"
        yield f'missing actor.aggregation_length of "seq-mean-token-sum-norm": set it (for example {example})'
    if actor.aggregation != "token-mean" and isinstance(actor.loss_denominator, float):
        others = 'actor.aggregation = "seq-mean-token-sum-norm" with actor.aggregation_length'
        yield f'actor.loss_denominator is a number for token-mean only: set it to "all" or "signal", or {others}'
    if actor.advantage in BATCH_BASELINES and actor.normalize_batch:
        yield f'actor.advantage = "{actor.advantage}" normalises by batch: set actor.normalize_batch = false'
    apart = [source.normalize_with for source in c.data.source if source.normalize_with]
    if apart and not (actor.normalize_batch or actor.advantage in BATCH_BASELINES):
        remedy = "set actor.normalize_batch = true, or remove it"
        yield f"normalize_with = {apart[0]!r} is for advantages that are normalised over the batch: {remedy}"
    if apart and len(apart) == len(c.data.source) and len(set(apart)) == 1:
        yield f"normalize_with = {apart[0]!r} of every [[data.source]] keeps none apart: remove it, or use two names"
    if actor.mask_repetition is None and (off := [one.label for one in c.data.source if one.mask_repetition == 1]):
        yield f"mask_repetition = 1 of source {off[0]!r} switches off actor.mask_repetition, which is unset: remove it"
    if actor.overlong_tokens > c.gconfig.max_new_tokens:
        most = f"gconfig.max_new_tokens ({c.gconfig.max_new_tokens})"
        yield f"actor.overlong_tokens ({actor.overlong_tokens}) is at most {most}"


def _lora(c: Config) -> Iterator[str]:
    """Rules for adapters: the reference model is the model without them."""
    lora, reference = c.actor.lora, "with actor.lora the reference is the model without adapters"
    if lora is None:
        return
    if uses_reference(c.actor) and not c.reference.path and c.learner.warmup.steps > 0:
        remedy = "set learner.warmup.steps = 0 or reference.path (or actor.kl_ctl = 0)"
        yield f"{reference}, and learner.warmup trains the adapters: {remedy}"
    if c.reference.update_every > 0:
        yield f"{reference}, which no update changes: set reference.update_every = 0"
    if "dora" in lora.variant and lora.dropout > 0:
        yield 'actor.lora.variant "dora" computes without dropout: set actor.lora.dropout = 0'
    if "nf4" in lora.variant:
        yield from _nf4(c, lora)
    if not kind_of(c.rollout.engine).takes_adapters:
        why = f"the engine {c.rollout.engine} takes no adapters"
        yield f'actor.lora is refused: {why}; remove [actor.lora], or set rollout.engine = "builtin"'


def _nf4(c: Config, lora: LoraConfig) -> Iterator[str]:
    """Rules for 4-bit weights under adapters."""
    others = {
        '"dora"': "dora" in lora.variant,
        f"topology.learners = {c.topology.learners}": c.topology.learners > 1,
        f'actor.offload = "{c.actor.offload}"': c.actor.offload in ("base", "all"),
        "learner.compile": c.learner.compile,
    }
    if wrong := [name for name, is_set in others.items() if is_set]:
        yield f'actor.lora.variant "nf4" is refused with {wrong[0]}: remove one of them'


def _optimizer(actor: ActorConfig) -> Iterator[str]:
    """Rules for the optimizer and its groups of parameters."""
    name, defaults = actor.optimizer, ActorConfig()
    adam = [key for key in ("adam_beta1", "adam_beta2", "adam_eps") if getattr(actor, key) != getattr(defaults, key)]
    by_file = ["group"] if actor.group else []
    by_file += ["weight_decay"] if actor.weight_decay else []
    wrong = [group.match for group in actor.group if not _is_pattern(group.match)]
    if name not in OPTIMIZERS and not is_users(name):
        yield f'unknown actor.optimizer {name!r}: it is one of {", ".join(OPTIMIZERS)}, or "module:make"'
    if actor.adamw_lr is not None and name != "muon":
        remedy = "remove it, or set a group's lr_scale"
        yield f'actor.adamw_lr is for actor.optimizer = "muon" (it is "{name}"): {remedy}'
    if name == "sgd" and adam:
        yield f'actor.{adam[0]} is for AdamW: actor.optimizer is "sgd"; remove it'
    if is_users(name) and by_file:
        yield f'actor.{by_file[0]} is for the named optimizers: "{name}" makes its own groups; remove it'
    if wrong:
        yield f"wrong match in [[actor.group]]: {wrong[0]!r} is not a regular expression"


def _offload(c: Config) -> Iterator[str]:
    """Rules for learners that keep a part of their memory on the host."""
    kind, lora = c.actor.offload, c.actor.lora
    if kind != "none" and c.topology.gpus_per_host == 0:
        yield f'actor.offload = "{kind}" needs GPUs, and topology.gpus_per_host is 0: remove the key'
    if kind == "optimizer" and c.actor.optimizer == "sgd":
        yield 'actor.offload = "optimizer" has nothing to move with actor.optimizer = "sgd": set "all" or "none"'
    if kind == "base" and (lora is None or "dora" in lora.variant or c.topology.learners > 1):
        remedy = 'set "all", or [actor.lora] without that variant and topology.learners = 1'
        yield f'actor.offload = "base" moves the weights under adapters, of one learner and without "dora": {remedy}'
    if kind == "base" and c.learner.compile:
        yield 'learner.compile needs the weights where they are used: set it to false, or actor.offload = "none"'
    if kind == "base" and not c.learner.gradient_checkpointing:
        remedy = "set learner.gradient_checkpointing = true, or all copies stay there"
        yield f'actor.offload = "base" copies weights to the GPU again in the backward pass: {remedy}'


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _critic(c: Config) -> Iterator[str]:
    """Settings that only GAE reads, and what GAE cannot have."""
    given, is_gae = c.critic.model_dump(exclude_defaults=True), c.actor.advantage == "gae"
    defaults = ActorConfig()
    lambdas = (c.actor.discount, c.actor.gae_lambda) != (defaults.discount, defaults.gae_lambda)
    if not is_gae and given:
        first = next(iter(given))
        yield f'[critic] is for actor.advantage = "gae": it is "{c.actor.advantage}"; remove critic.{first}'
    if not is_gae and c.actor.truncated_samples == "bootstrap":
        remedy = f'set actor.advantage = "gae" (it is "{c.actor.advantage}")'
        yield f'actor.truncated_samples = "bootstrap" needs the values of a critic: {remedy}'
    if is_gae and c.critic.warmup_updates >= c.run.total_train_steps:
        steps = f"run.total_train_steps ({c.run.total_train_steps})"
        yield f"critic.warmup_updates ({c.critic.warmup_updates}) must be below {steps}: else nothing trains the policy"
    if not is_gae and lambdas:
        yield f'actor.discount and actor.gae_lambda are for actor.advantage = "gae": it is "{c.actor.advantage}"'
    if is_gae and c.actor.normalize_batch is True and c.gconfig.n_samples < 2:
        yield 'a critic needs no groups: set actor.normalize_batch = "all"'


def _settings_without_use(actor: ActorConfig) -> Iterator[str]:
    """A setting that the chosen parts do not read is refused, so that none does nothing."""
    correction, defaults = correction_of(actor), ActorConfig()
    ours = not is_users(actor.loss)
    bounds = ("action", "metric", "aggregate", "lower", "upper")
    fixed = [f"correction_{key}" for key in bounds if getattr(actor, f"correction_{key}") is not None]
    if ours and actor.eps_clip_higher is not None and actor.loss not in CLIPPING:
        yield f'actor.eps_clip_higher is for losses that clip ({", ".join(CLIPPING)}): actor.loss is "{actor.loss}"'
    if ours and actor.c_clip is not None and actor.loss not in DUAL_CLIPPING:
        yield f'actor.c_clip is for {" and ".join(DUAL_CLIPPING)}: actor.loss is "{actor.loss}"'
    if min(actor.sapo_tau) <= 0:
        yield f"actor.sapo_tau must be two numbers above 0: it is {list(actor.sapo_tau)}"
    if ours and actor.loss != "sapo" and actor.sapo_tau != defaults.sapo_tau:
        yield f'actor.sapo_tau is for actor.loss = "sapo": it is "{actor.loss}"'
    if correction == "decoupled":
        fixed = [key for key in fixed if key != "correction_action"]
    if fixed and correction in ("decoupled", "none"):
        bounded = ": behav_imp_weight_cap bounds its weight" if correction == "decoupled" else ""
        which = f"is for the corrections {', '.join(CORRECTIONS[1:-1])}"
        yield f'actor.{fixed[0]} {which}: actor.correction is "{correction}"; remove it{bounded}'
    if correction == "decoupled" and actor.correction_action and actor.behav_imp_weight_cap is None:
        action = f'actor.correction_action = "{actor.correction_action}"'
        yield f"{action} is for tokens above a cap: set actor.behav_imp_weight_cap"
    if actor.aggregation_length is not None and actor.aggregation in {*AGGREGATIONS} - {"seq-mean-token-sum-norm"}:
        yield f'actor.aggregation_length is for "seq-mean-token-sum-norm": actor.aggregation is "{actor.aggregation}"'
    if actor.min_lr_ratio > 0 and actor.lr_schedule == "constant":
        yield 'actor.min_lr_ratio is for a schedule that falls: set actor.lr_schedule = "linear" or "cosine"'


def kl_estimator_of(actor: ActorConfig) -> str:
    """The estimator of the KL from the reference: as set, else "k3" in the loss and "k1" in the reward."""
    return actor.kl_estimator or ("k1" if actor.kl_in == "reward" else "k3")


def _frozen_models(c: Config) -> Iterator[str]:
    """Rules for the reference model and the teacher."""
    actor, reference, defaults = c.actor, c.reference, ActorConfig()
    rewards = ("reward_scaling", "reward_bias", "reward_clip", "overlong_tokens", "length_penalty", "normalize_batch")
    unread = [f"actor.{key}" for key in rewards if getattr(actor, key) != getattr(defaults, key)]
    unread += ["actor.truncated_samples"] if actor.truncated_samples == "zero" else []
    unread += [f"truncated_samples of source {one.label!r}" for one in c.data.source if one.truncated_samples == "zero"]
    unread += ["actor.kl_in"] if actor.kl_ctl and actor.kl_in == "reward" else []
    is_distilled = actor.advantage == "distill"
    if not uses_reference(actor) and (actor.kl_estimator, actor.kl_in) != (defaults.kl_estimator, defaults.kl_in):
        yield "actor.kl_estimator and kl_in describe the KL from a reference model: set actor.kl_ctl (it is 0)"
    if not uses_reference(actor) and (reference.path or reference.update_every):
        yield "[reference] is the model of the KL divergence: set actor.kl_ctl (it is 0), or remove the section"
    if uses_reference(actor) and actor.kl_in == "reward" and actor.kl_estimator in ("k2", "k3"):
        why = "its value has a slope near 0 where the policies agree"
        remedy = 'remove it ("k1" is the default there), or set actor.kl_in = "loss"'
        yield f'actor.kl_estimator = "{actor.kl_estimator}" is refused in the reward: {why}; {remedy}'
    if uses_reference(actor) and actor.kl_in == "loss" and actor.kl_estimator == "k1":
        remedy = 'set "k2" (whose gradient is that of the divergence) or "k3", or actor.kl_in = "reward"'
        yield f'actor.kl_estimator = "k1" has no use as a loss, because its gradient is 0 on average: {remedy}'
    distills = 'actor.advantage = "distill" (without the reward) or actor.distill_coef (beside the reward)'
    if uses_teacher(actor) and not c.teacher.path:
        yield f"missing teacher.path: actor.{'advantage' if is_distilled else 'distill_coef'} asks for a teacher"
    if c.teacher.path and not uses_teacher(actor):
        yield f"teacher.path names a model that nothing uses: set {distills}"
    if is_distilled and actor.distill_coef > 0:
        yield 'actor.advantage = "distill" leaves the reward out, and actor.distill_coef adds to it: remove one of them'
    if actor.distill_beta is not None and not uses_teacher(actor):
        yield f"actor.distill_beta ({actor.distill_beta:g}) is for distillation: set {distills}; or remove it"
    if actor.distill_top_k is not None and actor.distill_beta is None:
        top_k = f"actor.distill_top_k ({actor.distill_top_k})"
        yield f"{top_k} needs actor.distill_beta: set that (0 forward KL, 1 reverse KL), or remove it"
    if is_distilled and unread:
        yield f'actor.advantage = "distill" does not use the reward: remove {unread[0]}'


def _remote_teacher(c: Config) -> Iterator[str]:
    """Rules for a teacher behind a URL."""
    actor, heats = c.actor, {c.gconfig.temperature, *(one.gconfig.temperature or 1.0 for one in c.data.source)}
    if not is_url(c.teacher.path):
        return
    if not TEACHER_URL.fullmatch(c.teacher.path):
        form = "http://HOST:PORT or https://HOST, without a user, a password or a query"
        yield f"invalid URL in teacher.path: it must be {form} (a key goes into the variable TEACHER_API_KEY)"
    if heats != {1.0}:
        heat = max(heats, key=lambda heat: abs(heat - 1))
        yield f"a teacher behind a URL has temperature 1: set gconfig.temperature = 1 (it is {heat:g})"
    if actor.distill_beta is not None and actor.distill_top_k is None:
        most = "at most 20 for vLLM without --max-logprobs"
        yield f"missing actor.distill_top_k: a teacher behind a URL gives some words and not all; set it, to {most}"
    if actor.distill_beta is not None and actor.context_parallel > 1:
        width = f"actor.context_parallel ({actor.context_parallel})"
        yield f"{width} is refused with actor.distill_beta and a teacher behind a URL: set it to 1"


def _simulated(c: Config) -> Iterator[str]:
    """Rules for an update that computes nothing."""
    if c.learner.simulated is None:
        return
    passes = {
        'actor.advantage = "gae"': c.actor.advantage == "gae",
        "[actor.lora]": c.actor.lora is not None,
        "learner.warmup.steps": c.learner.warmup.steps > 0,
        "actor.offload": c.actor.offload != "none",
        "actor.optimizer": c.actor.optimizer != ActorConfig().optimizer,
        "learner.compile": c.learner.compile,
        "a reference model": uses_reference(c.actor),
        "a teacher": bool(c.teacher.path),
    }
    if not kind_of(c.rollout.engine).makes_up_tokens:
        yield '[learner.simulated] trains nothing: set rollout.engine = "simulated", or remove the table'
    if needed := [name for name, is_needed in passes.items() if is_needed]:
        yield f"[learner.simulated] runs no model: remove {', '.join(needed)}, or the table"
