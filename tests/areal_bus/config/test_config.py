"""Settings: where values come from, and what is said when they cannot be used."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from areal_bus.config.capacity import capacity, together
from areal_bus.config.loader import bounds, fields, load, nearest, read
from areal_bus.config.names import packaged
from areal_bus.config.names.packaged import find_config
from areal_bus.config.names.synonyms import OURS_TO_THEIRS
from areal_bus.config.section import Section
from areal_bus.config.sections import Config
from areal_bus.config.stages import largest, settings_by_stage
from areal_bus.errors import ConfigError
from launch.commands import main as launch
from launch.commands.main import staleness_warning
from launch.commands.settings_help import explain
from launch.plan.settings_text import as_toml

CONFIGS = sorted(p for p in (Path(__file__).parents[3] / "configs").glob("*.toml") if p.name != "paper.toml")
SMALL = '[model]\npath = "m"\n[data]\ntask = "sums"\n'
LOADER = '[model]\npath = "m"\n[data]\nfunction = "my:loader"\n'
SOURCES = '[model]\npath = "m"\n[[data.source]]\npath = "one.jsonl"\nweight = 1\n[[data.source]]\n{}\n'
TERMS = SMALL + "[[reward.terms]]\n{}\n"
WEIGHTED = '[reward]\nfunction = "weighted"\n'


def write(folder: Path, text: str, name: str = "c.toml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def refusal(file: Path, *overrides: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, overrides, environ)
    return str(caught.value)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda p: p.name)
def test_every_config_that_we_ship_loads_and_prints_as_toml_that_loads_to_the_same(tmp_path: Path, file: Path) -> None:
    config = load(file, (), {})
    assert load(write(tmp_path, as_toml(config)), (), {}) == config
    assert set(tomllib.loads(file.read_text(encoding="utf-8"))) <= {"extends", *Config.model_fields}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["actor.use_decoupled_loss=false", "rollout.max_head_offpolicyness=4"], "naive PPO lost a tenth"),
        (["actor.correction=none", "rollout.max_head_offpolicyness=4"], "naive PPO lost a tenth"),
        (["actor.correction=tis", "rollout.max_head_offpolicyness=4"], ""),
        (["actor.use_decoupled_loss=false", "rollout.max_head_offpolicyness=2"], ""),
        (["rollout.max_head_offpolicyness=16"], ""),
        (["rollout.max_head_offpolicyness=2", "actor.lr=4e-4"], "also cost decoupled PPO"),
        (["rollout.max_head_offpolicyness=1", "actor.lr=8e-4"], "see docs/tolerance.md"),
        (["rollout.max_head_offpolicyness=1", "actor.lr=4e-4"], ""),
        (["rollout.max_head_offpolicyness=0", "actor.use_decoupled_loss=false", "actor.lr=1"], ""),
    ],
)
def test_a_lag_and_learning_rate_beyond_the_measured_border_are_named(
    tmp_path: Path, changes: list[str], says: str
) -> None:
    file = write(tmp_path, SMALL + "[actor]\nlr = 1e-4\n")
    found = staleness_warning(load(file, changes, {}))
    assert says in found
    assert bool(says) == bool(found)


def test_set_wins_over_the_environment_over_the_file_over_its_base(tmp_path: Path) -> None:
    write(tmp_path, SMALL + "[actor]\nlr = 1.0\neps_clip = 0.1\nweight_decay = 0.1\nadam_eps = 0.1\n", "base.toml")
    file = write(tmp_path, 'extends = "base.toml"\n[actor]\neps_clip = 0.2\nweight_decay = 0.2\nadam_eps = 0.2\n')
    environ = {"AREAL_BUS_ACTOR__WEIGHT_DECAY": "0.3", "AREAL_BUS_ACTOR__ADAM_EPS": "0.3", "AREAL_BUS_OTHER": "x"}
    actor = load(file, ["actor.adam_eps=0.4"], environ).actor
    assert (actor.lr, actor.eps_clip, actor.weight_decay, actor.adam_eps) == (1.0, 0.2, 0.3, 0.4)


def test_a_bare_word_is_text_where_text_is_wanted_even_if_it_looks_like_a_number(tmp_path: Path) -> None:
    config = load(write(tmp_path, SMALL), ["run.name=007", "reward.function=my:score", "data.system='x y'"], {})
    assert (config.run.name, config.reward.function, config.data.system) == ("007", "my:score", "x y")


ADAPT = "topology.adapt.every_steps=5"
REFUSED = [  # options, apart by blanks; what the sentence says
    ("actor.lrr=1", "unknown key actor.lrr (--set actor.lrr=1): the nearest is actor.lr"),
    ("gconfig.batch_size=1", "the nearest is data.batch_size"),
    ("model.scratch={}", "model.scratch is a section, not a value: set its keys, each as model.scratch.NAME"),
    ("optim.lr=1", "the nearest is actor.lr"),
    ("rollout.top_k=1", "the nearest is gconfig.top_k"),
    ("lora.rank=8", "the nearest is actor.lora.rank"),
    ("gconfig.stop_words=['a']", "here it is gconfig.stop"),
    ("settings.clip_eps=0.2", "here it is actor.eps_clip"),
    ("actr.lr=1", "the nearest is actor.lr"),
    ("actor.lr=-1", "actor.lr must be a number, above 0: it is -1 (--set actor.lr=-1)"),
    ("actor.lr=inf", "actor.lr must be a number, above 0"),
    ("actor.adam_beta1=1.0", "at least 0 and below 1: it is 1.0"),
    ("rollout.max_head_offpolicyness=1025", "at least 0 and at most 1024: it is 1025"),
    ("data.batch_size=2.5", "data.batch_size must be a whole number, at least 1: it is 2.5"),
    ("data.batch_size=four", 'must be a whole number, at least 1: it is "four"'),
    ("data.shuffle=1", "data.shuffle must be true or false: it is 1"),
    ("actor.advantage=rlo", "or \"module:function\": 'rlo' is neither; the nearest is 'rloo'"),
    ("actor.loss_denominator=mean", 'must be one of "all", "signal" or a number, above 0: it is "mean" (--set'),
    ("actor.loss_denominator=0", '"signal" or a number, above 0: it is 0 (--set actor.loss_denominator=0)'),
    ("run.name=a/b", 'run.name must be a string, of letters, digits, ".", "_" and "-": it is "a/b"'),
    (
        "reward.group=abc",
        'reward.group must be a string, "module:function", "url", "model" or "verifiers": it is "abc"',
    ),
    ("run.name=..", "run.name must be a folder's name of its own"),
    ("model=7", "--set takes section.key=value"),
    ("bus.interface=*", "bus.interface must name one interface"),
    ("launch.rendezvous=tcp://*:5", "launch.rendezvous must name one interface"),
    ("launch.rendezvous=foo", 'launch.rendezvous must be "tcp://HOST:PORT"'),
    ("launch.rendezvous=tcp://host", "or \"ipc://PATH\": it is 'tcp://host'"),
    ("launch.rendezvous=tcp://host:70000", "a port from 1 to 65535"),
    ("launch.rendezvous=ipc://", 'launch.rendezvous must be "tcp://HOST:PORT"'),
    ("actor.recompute_logprobs=false", 'actor.correction = "decoupled" needs the proximal log-probs'),
    ("actor.context_parallel=2", "actor.context_parallel divides topology.learners: 1 learners are no groups of 2"),
    ("actor.algorithm=dap", "unknown actor.algorithm 'dap': it is one of"),
    ("gconfig.n_samples=1", "needs at least 2 samples: gconfig.n_samples is 1"),
    ("gconfig.n_samples=1 actor.advantage=none actor.normalize_batch=true", "needs at least 2 samples"),
    ("run.stage=[{from_step=5,gconfig={n_samples=3}},{from_step=5,gconfig={n_samples=4}}]", "in the order of"),
    ("run.stage=[{from_step=5}]", "a stage changes one of gconfig.n_samples, "),
    ("run.stage=[{from_step=10,gconfig={n_samples=3}}]", "from_step = [10] is not below run.total_train_steps"),
    ("run.stage=[{from_step=5,gconfig={n_samples=1}}]", "n_samples is 1; set it higher, or actor.advantage"),
    ("run.stage=[{from_step=5,gconfig={n_samples=1}}]", '"all") (from step 5, [[run.stage]])'),
    ("run.stage=[{from_step=5,gconfig={top_p=0.5}}]", "unknown key run.stage[0].gconfig.top_p (--set "),
    ("run.stage=[{gconfig={n_samples=3}}]", "field required: run.stage[0].from_step"),
    ("reward.function=weighted", "add a table [[reward.terms]]"),
    ("reward.function=judge", "needs reward.judge.url = \"https://HOST/v1\": it is ''"),
    ("reward.judge.prompt=grade", "{completion} is missing"),
    ("reward.judge.prompt={completion}{", "must be a template with {completion}"),
    ("reward.judge.prompt={completion}{}", "{} has no name"),
    ("reward.judge.max_calls=0", "reward.judge.max_calls must be a whole number, at least 1"),
    ("reward.format.pattern=(", "reward.format.pattern must be a regular expression: '(': missing )"),
    ("reward.format.template=box", "reward.format.template must be one of"),
    ("reward.on_error=perhaps", 'reward.on_error must be one of "refund" or a number: it is "perhaps"'),
    ("reward.on_timeout=true", 'reward.on_timeout must be one of "refund" or a number: it is true'),
    ("reward.on_error=1e12", "a reward must be at most 1e9 in size: reward.on_error is 1e+12"),
    ("reward.on_error=0 reward.on_timeout=0 reward.partial_groups=true", "leaves out samples without a"),
    ("reward.partial_groups=true gconfig.n_samples=2", "set gconfig.n_samples to 3 or more"),
    ('journal.tracker=["csv","csv"]', "journal.tracker names each tracker once"),
    ('journal.tracker=["tensorbord"]', "journal.tracker"),
    ("profile.actor=head-0.0", "profile.actor must"),
    ("profile.actor=learner-0.0", "missing profile.actor or profile.steps"),
    ("profile.steps=[1,2]", "missing profile.actor or profile.steps"),
    ("profile.actor=learner-0.0 profile.steps=[3,2]", "of steps 0 to 9: [3, 2]"),
    ("profile.actor=learner-0.0 profile.steps=[3,10]", "of steps 0 to 9: [3, 10]"),
    ("profile.actor=learner-1.0 profile.steps=[3,4]", "learner-1.0 is none of its 1 learners"),
    ('watch.off=["length"]', "watch.off"),
    ("watchdog.stall_s=30 watchdog.act_s=20", "watchdog.act_s (20) must follow the first warning: set it to "),
    ("rollout.staleness_policy=wait", "rollout.staleness_policy"),
    ("rollout.max_head_offpolicyness=-1", "at least 0 and at most 1024: it is -1"),
    ("actor.lora.target_modules={q=0}", "a whole number, at least 1 or a list of a whole number, at least 1 and a"),
    ("actor.lora.use_dora=true", "here it is actor.lora.variant"),
    # generation
    ("gconfig.repetition_penalty=1e-5", "gconfig.repetition_penalty"),
    ("gconfig.top_k=4294967296", "gconfig.top_k"),
    ("gconfig.temperature=0", "greedy samples of one prompt are all the same"),
    ("gconfig.min_new_tokens=9 gconfig.max_new_tokens=8", "must not exceed gconfig.max_new_tokens (8)"),
    ('gconfig.stop=["a",""]', "at least one character"),
    ("gconfig.stop_token_ids=[3,-1]", "token ids of gconfig are 0 or more: [-1]"),
    ('gconfig.logit_bias={"7"=101}', "from -100 to 100: that of token [7]"),
    ('gconfig.logit_bias={"x"=1}', "gconfig.logit_bias"),
    ("gconfig.min_p=1.5", "gconfig.min_p must be a number, at least 0 and at most 1"),
    ('rollout.engine="sglang" gconfig.presence_penalty=0.5', "SGLang's log-probs are of logits after"),
    ('rollout.engine="vllm" gconfig.top_k=20 gconfig.temperature=0.6', "at temperature 1 only"),
    ("data.chat_template=false data.chat_template_kwargs={think=false}", "set data.chat_template = true"),
    ("data.chat_template_kwargs={tokenize=true}", "may not set ['tokenize']"),
    # the split
    (f"{ADAPT} topology.learners=3 topology.ranks=4", "at least one generator must be left; 3 learners leave none: 2"),
    (
        f"{ADAPT} topology.gpus_per_host=4 actor.offload=base actor.lora.rank=8 learner.gradient_checkpointing=true",
        'actor.offload = "base" moves the weights under adapters, of one learner',
    ),
    (f"{ADAPT} topology.adapt.schedule=[[3,2]]", "follows topology.adapt.schedule or the planner"),
    ("topology.adapt.schedule=[[3,2],[2,1]]", "with ascending steps from 1 to 9: its steps are [3, 2]"),
    ("topology.adapt.schedule=[[0,2]]", "with ascending steps from 1 to 9: its steps are [0]"),
    ("topology.adapt.schedule=[[10,2]]", "with ascending steps from 1 to 9: its steps are [10]"),
    ("topology.adapt.schedule=[[3,0]]", "at least one rank learns; it has 0 learners"),
    ("topology.adapt.schedule=[[3,3]] topology.generators=2", "at least one generator must be left; 3"),
    (
        "topology.adapt.schedule=[[3,4]] topology.tensor_parallel=2 rollout.engine=vllm",
        "numbers of learners 4, 1 must differ by multiples",
    ),
    ("topology.adapt.schedule=[[3,3]] topology.learners=2 topology.replicas=2", "(with 3 learners, topology"),
    (
        "topology.adapt.schedule=[[3,3]] topology.learners=2 actor.context_parallel=2",
        "3 learners are no groups of 2 ranks that share a sequence (with 3 learners, topology.adapt)",
    ),
    (
        "topology.adapt.schedule=[[3,2]] rollout.engine=vllm engine.urls=['http://a:1','http://b:1']",
        "servers of engine.urls do not end with a rank",
    ),
    ("topology.adapt.schedule=[[3,2]] topology.gpus_per_host=1 topology.ranks_per_gpu=3", "a GPU holds one role at"),
]


def test_every_key_with_a_pattern_says_its_form_in_words() -> None:
    sections = {one for section in Section.__subclasses__() for one in (section, *section.__subclasses__())}
    keys = [(section, key, one) for section in sections for key, one in section.model_fields.items()]
    patterns = [one for one in keys if any(getattr(item, "pattern", None) for item in one[2].metadata)]
    assert len(patterns) >= 6
    assert [one[:2] for one in patterns if not bounds(one[2])] == []


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_a_wrong_value_is_refused_in_a_line_with_rule_and_value(tmp_path: Path, options: str, said: str) -> None:
    sentence = refusal(write(tmp_path, SMALL), *options.split())
    assert said in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[model\n", "valid TOML"),
        ("[model]\npath = 3\n", "model.path must be a string: it is 3"),
        ("model = 3\n", "model must be a section: it is 3"),
        ('[modle]\npath = "m"\n', "unknown key modle"),
        ('[data]\ntask = "sums"\n', "missing model"),
        ('[model]\npath = "m"\n', "data is needed"),
        (SOURCES.format('task = "sums"'), "needs a weight above 0, its share of the prompts: that of source 'sums' is"),
        (SOURCES.format('task = "sums"\nweight = -1'), "that of source 'sums' is -1"),
        (SOURCES.format("weight = 1"), "needs one of path, task and function: source number 2 has none of them"),
        (SOURCES.format('task = "sums"\npath = "x.csv"\nweight = 1'), "source 'sums' has path and task"),
        (SOURCES.format('path = "b/one.csv"\nweight = 1'), "duplicate name of [[data.source]]: ['one']"),
        (SOURCES.format('path = "a b.csv"\nweight = 1'), "set name for source 'a b'"),
        (SOURCES.format('task = "gsm8"\nweight = 1'), "the nearest is 'gsm8k'"),
        (SOURCES.format('task = "sums"\nweight = 1\n[data]\npath = "x"'), "remove ['path'] of [data], or the tables"),
        (
            SOURCES.format('path = "two.csv"\nweight = 1\n[data.source.gconfig]\nstop = [""]'),
            "one is empty (source 'two' of [[data.source]])",
        ),
        (
            SMALL + '[evaluate]\nbefore = true\n[[evaluate.sets]]\nname = "x"\npath = "p"\nmin_new_tokens = 9999\n',
            "(set 'x' of an evaluation)",
        ),
        (
            SOURCES.format('path = "two.csv"\nweight = 1\ntruncated_samples = "zero"')
            + '[actor]\nadvantage = "distill"\n[teacher]\npath = "t"\n',
            "does not use the reward: remove truncated_samples of source 'two'",
        ),
        (
            SOURCES.replace("weight = 1", 'weight = 1\nnormalize_with = "a"').format(
                'path = "two.csv"\nweight = 1\nnormalize_with = "a"\n[actor]\nnormalize_batch = true'
            ),
            "normalize_with = 'a' of every [[data.source]] keeps none apart",
        ),
        (
            SOURCES.format('path = "two.csv"\nweight = 1\nmask_repetition = 1'),
            "of source 'two' switches off actor.mask_",
        ),
        (SMALL + "[data.curriculum]\nlow = 0.5\nhigh = 0.5\n", "data.curriculum.low (0.5) must be below"),
        (LOADER + "[data.curriculum]\nlow = 0.1\n", "a loader decides its order itself"),
        ("[train]\nbatch_size = 8", "unknown key train.batch_size ("),
        ("[train]\nbatch_size = 8", "the nearest is data.batch_size"),
        ("[settings]\nclip_eps = 0.2", "here it is actor.eps_clip"),
        ("[trainer.optim]\nlr = 1", "unknown key trainer.optim.lr"),
        ("[nothing]", "unknown key nothing"),
        (SMALL + "lr = = 3\n", "at line 5"),
        (TERMS.format('function = "math"'), "read by reward.function = \"weighted\" only: it is 'exact'"),
        (
            TERMS.format('function = "math"\n[[reward.terms]]\nfunction = "my:math"') + WEIGHTED,
            "duplicate name in reward.terms: ['math']",
        ),
        (TERMS.format('function = "math"\nweight = 0') + WEIGHTED, "all weights are 0"),
        (TERMS.format('function = "weighted"') + WEIGHTED, 'cannot be "weighted" itself'),
        (TERMS.format('function = "judge"') + WEIGHTED + 'judge.url = "http://x/v1"\n', "needs reward.judge.model"),
        (TERMS.format('functoin = "math"') + WEIGHTED, "functoin"),
        ("extends = 3\n", "extends must be the name of a TOML file, or a list of names"),
    ],
)
def test_a_wrong_file_is_refused_with_its_fault(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(write(tmp_path, text))


@pytest.mark.parametrize("address", ["tcp://node-1.cluster:29500", "ipc:///tmp/a b", ""])
def test_ranks_may_meet_at_a_host_and_port_or_at_a_path(tmp_path: Path, address: str) -> None:
    config = load(write(tmp_path, SMALL), [f"launch.rendezvous={address}"] if address else [], {})
    assert config.launch.rendezvous == address


def test_a_scratch_model_has_no_chat_template(tmp_path: Path) -> None:
    file = write(tmp_path, '[model.scratch]\n[data]\ntask = "sums"\n')
    assert (
        "missing chat template in the tokenizer of [model.scratch]: data.chat_template = true needs one; set"
        in refusal(file)
    )
    load(file, ["data.chat_template=false"], {})
    load(file, ["workflow.function=mine:Flow"], {})


def test_a_config_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = write(tmp_path, "\ufeff" + SMALL)
    assert load(file, [], {}) == load(write(tmp_path, SMALL, "plain.toml"), [], {})


def test_a_missing_file_is_refused_with_the_one_that_may_be_meant(tmp_path: Path) -> None:
    write(tmp_path, SMALL, "demo.toml")
    assert f"did you mean {tmp_path / 'demo.toml'}?" in refusal(tmp_path / "dmeo.toml")


def test_a_base_config_alone_is_refused_with_the_files_to_start() -> None:
    folder = Path(__file__).parents[3] / "configs"
    said = refusal(folder / "paper.toml")
    assert said.startswith(f"{folder / 'paper.toml'} is a base for others and names no model: start one of ")
    assert all(str(folder / f"{size}.toml") in said for size in ("1.5b", "7b", "14b", "32b", "1.5b-bounded"))
    assert load(folder / "paper.toml", ["model.path=here", "data.path=rows.jsonl"], {}).model.path == "here"


def test_without_a_baseline_a_group_may_be_one_sample(tmp_path: Path) -> None:
    file = write(tmp_path, SMALL)
    assert load(file, ["gconfig.n_samples=1", "actor.advantage=none"], {}).gconfig.n_samples == 1


def test_extends_takes_several_files_at_several_levels_and_the_later_wins(tmp_path: Path) -> None:
    write(tmp_path, SMALL + "[actor]\nlr = 0.1\neps_clip = 0.1\nadam_eps = 0.1\nc_clip = 10.0\n", "base.toml")
    write(tmp_path, 'extends = "base.toml"\n[actor]\nlr = 0.2\neps_clip = 0.2\n', "one.toml")
    write(tmp_path, 'extends = ["base.toml"]\n[actor]\neps_clip = 0.3\nadam_eps = 0.3\n', "other.toml")
    file = write(tmp_path, 'extends = ["one.toml", "other.toml"]\n[actor]\nadam_eps = 0.4\n')
    actor = load(file, (), {}).actor
    assert (actor.lr, actor.eps_clip, actor.adam_eps, actor.c_clip) == (0.2, 0.3, 0.4, 10.0)
    assert load([tmp_path / "one.toml", tmp_path / "other.toml"], ["actor.adam_eps=0.4"], {}).actor == actor


def test_a_cycle_of_extends_is_refused_with_its_files(tmp_path: Path) -> None:
    write(tmp_path, 'extends = "b.toml"\n', "a.toml")
    write(tmp_path, 'extends = "a.toml"\n', "b.toml")
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    assert f"cycle of extends: {a} extends {b} extends {a}; remove" in refusal(write(tmp_path, 'extends = "a.toml"\n'))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("algorithms/dapoo.toml", "is not there; did you mean configs/algorithms/dapo.toml?"),
        ("basse.toml", "is not there; did you mean {}/base.toml?"),
        ("cc.toml", "is not there"),
        (".", "is a folder"),
        ("x" * 300, "cannot be opened (File name too long)"),
        ("a\\u0000b", "cannot be opened (embedded null byte)"),
    ],
)
def test_a_base_that_is_missing_is_refused_with_the_file_that_extends_it(tmp_path: Path, name: str, said: str) -> None:
    write(tmp_path, "", "base.toml")
    file = write(tmp_path, f'extends = "{name}"\n')
    found = refusal(file)
    assert found.startswith(f"extends must name an existing TOML file: {file} extends '")
    assert found.endswith(f", which {said.format(tmp_path)}")


@pytest.mark.parametrize("text", ["a = " + "[" * 20_000 + "]" * 20_000, "[a" + ".a" * 20_000 + "]\nb = 1\n"])
def test_a_config_of_too_long_a_name_too_many_levels_or_too_deep_tables_is_refused(tmp_path: Path, text: str) -> None:
    assert refusal(Path("x" * 300)).endswith(" cannot be opened (File name too long)")
    assert find_config("x" * 300) == Path("x" * 300)
    for n in range(60):
        write(tmp_path, f'extends = "{n + 1}.toml"\n', f"{n}.toml")
    assert refusal(tmp_path / "0.toml").startswith("too many levels of extends: more than 50 from ")
    file = write(tmp_path, text)
    assert refusal(file) == f"lists or tables are nested too deep in {file}"


def test_a_number_of_more_digits_than_python_reads_is_refused_in_a_file_and_in_an_option(tmp_path: Path) -> None:
    """It was a traceback, also in another file of the folder."""
    digits = "9" * 5000
    file = write(tmp_path, f"[run]\nseed = {digits}\n")
    assert refusal(file).startswith(f"the config must be valid TOML: {file}: ")
    good = write(tmp_path, '[data]\ntask = "sums"\n', "good.toml")
    assert refusal(good).startswith("missing model")
    assert refusal(good, f"run.seed={digits}").startswith("run.seed")


def test_an_algorithm_with_another_config_is_not_refused_as_alone(tmp_path: Path) -> None:
    alone, beside = packaged.ALGORITHMS / "dapo.toml", write(tmp_path, '[data]\ntask = "sums"\n')
    assert "dapo.toml is an algorithm alone" in refusal(alone)
    with pytest.raises(ConfigError, match=r"^missing model: set model.path"):
        load([beside, alone], (), {})


def test_extends_finds_installed_configs_where_no_adjacent_file_has_that_name(tmp_path: Path) -> None:
    file = write(tmp_path, 'extends = ["tiny.toml", "configs/algorithms/gspo.toml"]\n')
    assert load(file, (), {}).actor.loss == "gspo"
    write(tmp_path, SMALL + "[actor]\nlr = 0.5\n", "tiny.toml")
    assert load(file, (), {}).actor.lr == 0.5


@pytest.mark.parametrize("name", packaged.algorithm_names())
def test_actor_algorithm_sets_the_keys_of_its_file_that_are_not_set(tmp_path: Path, name: str) -> None:
    more = ["teacher.path=TEACHER"] if name == "distill" else []
    by_name = load(write(tmp_path, f'{SMALL}[actor]\nalgorithm = "{name}"\n'), more, {})
    by_file = load([write(tmp_path, SMALL, "small.toml"), packaged.ALGORITHMS / f"{name}.toml"], more, {})
    assert by_name == by_file
    changed = load(write(tmp_path, f'{SMALL}[actor]\nalgorithm = "{name}"\nppo_n_minibatches = 4\n'), more, {})
    assert changed.actor == by_name.actor.model_copy(update={"ppo_n_minibatches": 4})
    assert load(write(tmp_path, as_toml(by_name)), (), {}) == by_name, "its keys are saved with the run"


@pytest.mark.parametrize("name", packaged.algorithm_names())
def test_actor_algorithm_wins_over_installed_configs_and_loses_to_the_users_own(tmp_path: Path, name: str) -> None:
    tiny, more = packaged.FOLDER / "tiny.toml", ["teacher.path=TEACHER"] if name == "distill" else []
    by_option = load(tiny, [f"actor.algorithm={name}", *more], {})
    assert by_option == load([tiny, packaged.ALGORITHMS / f"{name}.toml"], more, {})
    own = write(tmp_path, f'extends = "tiny.toml"\n[actor]\nalgorithm = "{name}"\nppo_n_minibatches = 4\n')
    assert load(own, more, {}).actor.ppo_n_minibatches == 4


def test_keys_of_an_algorithm_follow_from_the_lengths_of_the_run(tmp_path: Path) -> None:
    file = write(tmp_path, SMALL)
    config = load(file, ["actor.algorithm=dapo", "gconfig.max_new_tokens=20480", "data.batch_size=48"], {})
    assert (config.actor.overlong_tokens, config.data.max_refill) == (4096, 48)
    assert load(file, ["actor.algorithm=dr-grpo"], {}).actor.aggregation_length == Config().gconfig.max_new_tokens


def test_the_origin_of_a_value_is_its_file_its_option_or_its_name(tmp_path: Path) -> None:
    write(tmp_path, SMALL + "[actor]\nlr = 0.1\n", "base.toml")
    file = write(tmp_path, 'extends = "base.toml"\n[actor]\nadam_eps = 0.2\nalgorithm = "gspo"\n')
    origins = read([file], ["gconfig.top_p=0.9"], {"AREAL_BUS_ACTOR__C_CLIP": "3.0"}).origins
    assert origins["actor.lr"] == str(tmp_path / "base.toml")
    assert origins["actor.adam_eps"] == str(file)
    assert origins["actor.loss"] == 'actor.algorithm = "gspo"'
    assert origins["gconfig.top_p"] == "--set gconfig.top_p=0.9"
    assert origins["actor.c_clip"] == "AREAL_BUS_ACTOR__C_CLIP"


def test_a_value_that_the_locale_has_mangled_is_refused_with_its_key(tmp_path: Path) -> None:
    """Bytes of another encoding, which Python reads as half surrogates: "für" in Latin-1."""
    file, given = write(tmp_path, SMALL), "{question} f\udcfcr"
    for said in (refusal(file, f"data.prompt={given}"), refusal(file, AREAL_BUS_DATA__PROMPT=given)):
        assert said.startswith("data.prompt must be UTF-8 text: the locale (")
        assert r"'{question} f\udcfcr'" in said
        assert "LC_ALL=C.UTF-8" in said


def test_the_environment_is_checked_like_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, SMALL)
    assert "(AREAL_BUS_ACTOR__LRR): the nearest is actor.lr" in refusal(file, AREAL_BUS_ACTOR__LRR="1")
    assert "AREAL_BUS_ACTOR_LR is AREAL_BUS_ACTOR__LR" in refusal(file, AREAL_BUS_ACTOR_LR="1e-5")
    assert load(file, [], {"AREAL_BUS_LEARNER__WARMUP__STEPS": "7"}).learner.warmup.steps == 7


STAGED = """
[[run.stage]]
from_step = 2
gconfig.max_new_tokens = 512

[[run.stage]]
from_step = 5
gconfig.n_samples = 16
learner.max_tokens_per_mb = 100
"""


def test_a_stage_inherits_keys_that_it_does_not_set_and_the_largest_bounds_all(tmp_path: Path) -> None:
    config = load(write(tmp_path, SMALL + STAGED), (), {})
    found = {
        start: (s.gconfig.n_samples, s.gconfig.max_new_tokens, s.learner.max_tokens_per_mb)
        for start, s in settings_by_stage(config).items()
    }
    assert found == {0: (8, 256, 4096), 2: (8, 512, 4096), 5: (16, 512, 100)}
    most = largest(config)
    assert (most.gconfig.n_samples, most.gconfig.max_new_tokens, most.learner.max_tokens_per_mb) == (16, 512, 4096)
    assert capacity(config) == config.rollout.max_concurrent_rollouts + 2 * 16
    assert together(config) == 8
    assert load(write(tmp_path, as_toml(config, changed_only=True)), (), {}) == config
    plain = load(write(tmp_path, SMALL), (), {})
    assert settings_by_stage(plain) == {0: plain}
    assert largest(plain) is plain


def test_every_key_explains_itself() -> None:
    for key, field in fields().items():
        assert field.description, f"{key} has no doc line"
        assert key in explain(key)
    assert explain("actor.lr") == "actor.lr: a number, above 0; default 2e-05\n    Peak learning rate."
    with pytest.raises(ConfigError, match=r"the nearest is actor\.lr"):
        explain("actor.lrr")


def test_explain_with_files_or_options_gives_the_value_and_its_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(["--explain", "actor.lr", "--set", "actor.lr=1e-5"]) == 0
    assert capsys.readouterr().out.endswith("\n    here: 1e-05 (--set actor.lr=1e-5)\n")
    write(tmp_path, SMALL + "[actor]\nlr = 0.1\n", "base.toml")
    given = read([write(tmp_path, 'extends = "base.toml"\n')], ["workflow.arguments.n=2"], {})
    assert explain("actor.lr", given).endswith(f"\n    here: 0.1 ({tmp_path / 'base.toml'})")
    assert explain("actor.eps_clip", given).endswith("\n    here: the default")
    assert explain("workflow.arguments", given).endswith(" (--set workflow.arguments.n=2)")
    given = read([write(tmp_path, 'extends = "tiny.toml"\n')], ["actor.algorithm=dapo"], {})
    assert explain("actor.advantage", given).endswith('\n    here: "grpo" (actor.algorithm = "dapo")'), "over tiny's"
    assert explain("data.max_refill", given).endswith('\n    here: 32 (actor.algorithm = "dapo")')
    named = read([write(tmp_path, SMALL.replace("sums", "gsm8k"))], (), {})
    assert explain("reward.function", named).endswith('\n    here: "math" (data.task = "gsm8k")')
    built_in = read([write(tmp_path, SMALL)], ["workflow.function=multi_turn"], {})
    assert explain("reward.function", built_in).endswith('\n    here: "agent" (workflow.function = "multi_turn")')


@pytest.mark.parametrize(("text", "section"), [("actor = 3\n", "actor"), ("[actor]\nlora = 3\n", "actor.lora")])
def test_explain_refuses_a_value_in_the_place_of_a_section(tmp_path: Path, text: str, section: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"^{section} must be a section: it is 3 \({file}\)$"):
        explain("actor.lora.rank", read([file], (), {}))


def test_settings_load_without_torch() -> None:
    code = "import sys, launch.commands.main, launch.run.rank; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode == 0


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("actor.learning_rate", "here it is actor.lr"),
        ("gconfig.group_size", "here it is gconfig.n_samples"),
        ("rollout.eta", "here it is rollout.max_head_offpolicyness"),
        ("rollout.max_staleness", "here it is rollout.max_head_offpolicyness"),
        ("data.rollout_batch_size", "here it is data.batch_size"),
        ("trainer.max-steps", "here it is run.total_train_steps"),
        ("actor.kl_coef", "here it is actor.kl_ctl"),
        ("actor.lr_warmup", "the nearest is actor.lr_warmup_steps"),
    ],
)
def test_a_key_of_another_system_is_answered_with_ours(key: str, said: str) -> None:
    """`actor.learning_rate` was taken for lr_warmup_steps."""
    assert f": {said}" in nearest(key)


def test_names_of_other_systems_lead_to_keys_that_there_are_and_are_none_themselves() -> None:
    ours = set(fields())
    assert set(OURS_TO_THEIRS) <= ours
    theirs = [name for names in OURS_TO_THEIRS.values() for name in names.split()]
    assert len(theirs) == len(set(theirs))
    assert set(theirs) & {key.rpartition(".")[2] for key in ours} == {"max_staleness"}  # of [serve] only


def test_generation_settings_become_controls_and_print_as_toml(tmp_path: Path) -> None:
    file = write(tmp_path, SMALL + '\n[gconfig.logit_bias]\n"9" = -2.5\n3 = 1\n')
    config = load(file, ['gconfig.stop=["\\n\\n"]', "gconfig.top_k=20"], {})
    assert config.gconfig.controls()["logit_bias"] == ((3, 1.0), (9, -2.5))
    assert config.gconfig.controls()["stop"] == ("\n\n",)
    printed = write(tmp_path, as_toml(config), "again.toml")
    assert load(printed, [], {}) == config
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_an_actor_that_another_split_has_may_be_recorded(tmp_path: Path) -> None:
    changes = ["topology.adapt.schedule=[[3, 2]]", "profile.actor=learner-1.1", "profile.steps=[4, 5]"]
    assert load(write(tmp_path, SMALL), changes).profile.actor == "learner-1.1"
