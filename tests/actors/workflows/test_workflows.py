"""Workflows: prompts, the default one, the user's own, and how an episode is driven."""

import types
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from actors.data.loading import complete_row
from actors.endpoint.conversation import Conversation
from actors.engines.protocol import Completion
from actors.workflows.chat import Chat
from actors.workflows.episode_runner import Asked, EpisodeRun
from actors.workflows.loading import continues, load_workflow
from actors.workflows.prompts import Question, chat, fill, full_text, prompt_ids, prompt_lengths, prompt_of
from actors.workflows.protocol import Ask, Episode, Row
from actors.workflows.single_turn import SingleTurn
from areal_bus.config.rollout import GenerationConfig
from areal_bus.config.sections import Config, ModelConfig
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError, PromptTooLong, WorkflowError
from tests.support.learner_setup import scratch_tokenizer

SMOLLM2 = (  # SmolLM2's template: a system message of its own unless the first message is one
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<s>system\nYou are helpful</s>\n' }}{% endif %}{{'<s>' + message['role'] + '\n' + message['content'] + '</s>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
GEMMA = (  # knows no system role
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('none') }}"
    "{% endif %}{{ '<t>' + message['role'] + message['content'] }}{% endfor %}"
)
LLAMA = (  # a system message always, after the begin token
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = 'today' %}{% endif %}{{ '<h>system' + system }}"
    "{% for message in messages %}{{ '<h>' + message['role'] + message['content'] }}{% endfor %}"
)


HI = [{"role": "user", "content": "hi"}]


def asked(text: str) -> Question:
    return Question(text, [{"role": "user", "content": text}])


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return scratch_tokenizer(tmp_path)


def config(**data: Any) -> Config:
    return Config.model_validate({"data": {"chat_template": False, **data}})


def completion(ids: list[int], *, version: int = 0, finish: str = "stop") -> Completion:
    return Completion(("", 0, 0, 0, 0), ids, [-0.5] * len(ids), [[version, len(ids)]], finish)


def test_an_end_that_the_tokenizer_puts_behind_every_text_is_no_part_of_a_prompt(tokenizer: Any) -> None:
    plain = prompt_ids(asked("abc"), config().data, tokenizer)
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", pair="$A $B <eos>", special_tokens=[("<eos>", end)]
    )
    assert tokenizer("abc")["input_ids"] == [*plain, end]
    assert prompt_ids(asked("abc"), config().data, tokenizer) == plain
    assert prompt_lengths([asked("abc")], config().data, tokenizer) == [3]
    assert prompt_ids(asked("abc<eos>"), config().data, tokenizer) == [*plain, end, end]  # the row's own stays


def test_a_prompt_is_filled_with_the_fields_of_the_row_or_refused() -> None:
    row = {"problem": "3 + 4", "unit": "cm", "answer": "7"}
    assert fill("{question} in {unit}? {{x}}", row, "problem") == "3 + 4 in cm? {x}"
    assert fill("{question}", {"question": "q"}, "question") == "q"
    for template, why in (("{nowhere}", "nowhere"), ("{question", "template"), ("{}", r"unknown field \{\}")):
        with pytest.raises(ConfigError, match=why):
            fill(template, {"question": "q"}, "question")


def test_the_chat_template_wraps_the_prompt_with_the_system_message_asked_for_or_none(tokenizer: Any) -> None:
    tokenizer.chat_template = SMOLLM2
    user = "<s>user\nhi</s>\n<s>assistant\n"
    assert chat(HI, None, tokenizer) == "<s>system\nYou are helpful</s>\n" + user
    assert chat(HI, "be brief", tokenizer) == "<s>system\nbe brief</s>\n" + user
    assert chat(HI, "", tokenizer) == user
    tokenizer.bos_token = "<b>"  # which stays
    tokenizer.chat_template = GEMMA
    assert chat(HI, "", tokenizer) == chat(HI, None, tokenizer) == "<b><t>userhi"
    tokenizer.chat_template = LLAMA
    assert chat(HI, None, tokenizer) == "<b><h>systemtoday<h>userhi"
    assert chat(HI, "", tokenizer) == "<b><h>userhi"


def test_arguments_reach_the_chat_template_of_prompts_and_of_conversations(tokenizer: Any) -> None:
    tokenizer.chat_template = (  # as Qwen3's: without thinking the answer begins after an empty thought
        "{% for m in messages %}{{ m['role'] + '>' + m['content'] }}{% endfor %}"
        "{{ 'a>' }}{% if enable_thinking is defined and enable_thinking is false %}{{ 'none>' }}{% endif %}"
    )
    data = config(chat_template=True, chat_template_kwargs={"enable_thinking": False}).data
    assert full_text(asked("hi"), data, tokenizer) == "user>hia>none>"
    assert full_text(asked("hi"), data.model_copy(update={"system": ""}), tokenizer) == "user>hia>none>"
    assert full_text(asked("hi"), config(chat_template=True).data, tokenizer) == "user>hia>"
    conversation = Conversation(tokenizer, arguments=data.chat_template_kwargs)
    assert tokenizer.decode(conversation.extend(HI, [])) == "user>hia>none>"
    assert tokenizer.decode(conversation.extend(HI, [], {"enable_thinking": True})) == "user>hia>"


def test_a_row_of_chat_messages_is_rendered_as_it_is(tokenizer: Any) -> None:
    tokenizer.chat_template = SMOLLM2
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "3+4"}
    turns = [user, {"role": "assistant", "content": "7"}, {"role": "user", "content": "and 5+6?"}]
    data = config(question_key="prompt", chat_template=True, system="be long").data

    def rendered(messages: list[dict[str, str]], question: str, **changes: Any) -> str:
        row = {"prompt": messages, "question": question}
        return full_text(prompt_of(row, data.model_copy(update=changes)), data.model_copy(update=changes), tokenizer)

    end = "<s>assistant\n"
    assert rendered([system, user], "3+4") == f"<s>system\nbe brief</s>\n<s>user\n3+4</s>\n{end}"
    assert rendered([user], "3+4") == f"<s>system\nbe long</s>\n<s>user\n3+4</s>\n{end}"
    assert rendered([user], "3+4", system="") == f"<s>user\n3+4</s>\n{end}"
    several = rendered(turns, "and 5+6?", system="", prompt="{question} Only the number.")
    said = "<s>user\n3+4</s>\n<s>assistant\n7</s>\n<s>user\nand 5+6? Only the number.</s>\n"
    assert several == said + end
    assert (
        prompt_of({"prompt": turns, "question": "and 5+6?"}, data).text == "user: 3+4\n\nassistant: 7\n\nuser: and 5+6?"
    )
    row = complete_row({"question": turns, "answer": "11"}, config().data, "here")  # the key itself is "question"
    assert (row["question"], prompt_of(row, config(chat_template=True).data).messages) == ("and 5+6?", turns)
    with pytest.raises(ConfigError, match=r"data\.chat_template = true"):
        prompt_of({"prompt": [user], "question": "3+4"}, config(question_key="prompt").data)


def test_prompts_over_the_limit_and_tokenizers_without_template_are_refused(tokenizer: Any) -> None:
    assert len(prompt_ids(asked("abc"), config(max_prompt_tokens=3).data, tokenizer)) == 3
    with pytest.raises(PromptTooLong, match=r"max_prompt_tokens = 3 tokens; this one has 4"):
        prompt_ids(asked("abcd"), config(max_prompt_tokens=3).data, tokenizer)
    with pytest.raises(ConfigError, match=r"data\.chat_template = false"):
        prompt_ids(asked("abc"), config(chat_template=True).data, tokenizer)


def test_a_single_turn_asks_once_and_records_its_tokens(tokenizer: Any) -> None:
    run = EpisodeRun(SingleTurn(config(prompt="{question} >")), {"question": "ab"}, tokenizer)
    asked = run.start()
    assert asked is not None
    assert asked.max_new_tokens is None
    assert tokenizer.decode(asked.ids) == "ab >"
    eos = tokenizer.eos_token_id
    answer = tokenizer("ba")["input_ids"]
    assert run.answer(completion([*answer, eos], version=3)) is None
    assert run.episode is not None
    assert run.episode.text == "ba"
    assert (run.ids, run.segments) == ([*asked.ids, *answer, eos], [[4, 3]])
    assert (run.logps, run.spans, run.finish) == ([-0.5] * 3, [[3, 3]], "stop")
    assert run.prompt_text() == "ab >"


class TwoTurns:
    """Asks, says something back, asks again."""

    def __init__(self, config: Config) -> None:
        self.closed: list[str] = []

    async def episode(self, row: Row, ask: Ask) -> Episode:
        try:
            ids = list(row["ids"])
            first = await ask(ids)
            second = await ask([*ids, *first.ids, 7, 8], max_new_tokens=2)
            return Episode(text=first.text + second.text, row={"turns": 2})
        finally:
            self.closed.append("end")


def test_an_episode_of_several_turns_records_inputs_and_samples(tokenizer: Any) -> None:
    workflow = TwoTurns(config())
    cancelled = EpisodeRun(workflow, {"ids": [3]}, tokenizer)
    cancelled.start()
    cancelled.close()
    assert workflow.closed == ["end"]  # its finally ran
    run = EpisodeRun(workflow, {"ids": [3, 4]}, tokenizer)
    assert run.start() is not None
    asked = run.answer(completion([5, 6], version=1))
    assert asked is not None
    assert (asked.ids, asked.max_new_tokens) == ([3, 4, 5, 6, 7, 8], 2)
    last = Completion(("", 0, 0, 0, 1), [9, 9], [-1.0, -2.0], [[1, 1], [2, 1]], "length")
    assert run.answer(last) is None
    assert run.ids == [3, 4, 5, 6, 7, 8, 9, 9]
    assert run.segments == [[2, 2], [2, 2]]
    assert run.spans == [[1, 3], [2, 1]]
    assert run.logps == [-0.5, -0.5, -1.0, -2.0]
    assert run.finish == "length"
    assert run.prompt_text() == tokenizer.decode([3, 4])
    said = [tokenizer.decode(ids) for ids in ([3, 4], [5, 6], [7, 8], [9, 9])]
    assert run.turns() == [said[:2], said[2:]]


class TwoTries:
    """The README's, by a chat template."""

    def __init__(self, config: Config) -> None: ...

    async def episode(self, row: Row, ask: Ask) -> Episode:
        chat = Chat(ask, system="s")
        await chat.say(row["question"])
        return Episode(text=(await chat.say("sure", max_new_tokens=2)).text)


def test_a_chat_of_several_turns_is_rendered_by_the_template_and_keeps_sampled_tokens(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + '>' + m['content'] + ' ' }}{% endfor %}{{ 'a>' }}"
    )
    run = EpisodeRun(TwoTries(config()), {"question": "abc"}, tokenizer)
    first = run.start()
    assert isinstance(first, Asked)
    assert tokenizer.decode(first.ids) == "s>s u>abc a>"
    second = run.answer(completion(tokenizer("cab")["input_ids"]))
    assert isinstance(second, Asked)
    assert tokenizer.decode(second.ids) == "s>s u>abc a>cab u>sure a>"
    assert second.max_new_tokens == 2
    assert run.answer(completion(tokenizer("bb")["input_ids"])) is None
    assert run.turns() == [["s>s u>abc a>", "cab"], [" u>sure a>", "bb"]]


class Broken:
    def __init__(self, config: Config) -> None: ...

    async def episode(self, row: Row, ask: Ask) -> Episode:
        if row["how"] == "forgets":
            await ask([3, 4])
            await ask([3, 5, 6])
        if row["how"] == "sleeps":
            await nap()
        if row["how"] == "returns":
            return "text"  # type: ignore[return-value]
        return Episode(text="")


@types.coroutine
def nap() -> Any:
    yield "a nap"


def test_a_workflow_that_breaks_a_rule_is_refused_with_that_rule(tokenizer: Any) -> None:
    rules = {"forgets": "differ at token 1", "sleeps": "may await ask", "returns": "must return an Episode"}
    for how, why in {**rules, "asks nothing": "at least one token"}.items():
        with pytest.raises(WorkflowError, match=why):
            drive(EpisodeRun(Broken(config()), {"how": how}, tokenizer))


class WithFields:
    def __init__(self, fields: Any) -> None:
        self.fields = fields

    async def episode(self, row: Row, ask: Ask) -> Episode:
        for ids in ([3], [3, 4, 5]):
            await ask(ids)
        return Episode(text="", fields=self.fields)


def test_fields_of_an_episode_are_one_number_a_sampled_token(tokenizer: Any) -> None:
    run = EpisodeRun(WithFields({"each": [0.5, 2], "whole": 3}), {}, tokenizer)
    drive(run)
    assert {name: values.tolist() for name, values in run.fields.items()} == {"each": [0.5, 2.0], "whole": [3.0, 3.0]}


UNFIT: list[tuple[Any, str]] = [
    ({"x": [1.0]}, r"mismatch in Episode.fields\['x'\]: 2 finite numbers"),
    *(({"x": value}, "mismatch") for value in ([[1.0, 2.0]], [1.0, float("nan")], 1e39, None, [1.0, None])),
    ({"x": "text"}, "must be numbers"),
    ({"prox": 1.0}, "is taken"),
    ({"two words": 1.0}, "letters, digits"),
    ({f"x{i}": 1.0 for i in range(17)}, "at most 16 fields"),
    ([1.0, 2.0], "must be a mapping"),
]


def test_fields_that_do_not_fit_the_tokens_are_refused(tokenizer: Any) -> None:
    for fields, why in UNFIT:
        with pytest.raises(WorkflowError, match=why):
            drive(EpisodeRun(WithFields(fields), {}, tokenizer))


def drive(run: EpisodeRun) -> None:
    asked = run.start()
    while asked is not None:
        asked = run.answer(completion([4]))


def test_the_users_workflow_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_flow.py").write_text(
        "class Flow:\n    def __init__(self, config): self.seed = config.run.seed\n"
        "    async def episode(self, row, ask): ...\nplain = 3\n"
    )
    (tmp_path / "sour_flow.py").write_text(
        "class Flow:\n    def __init__(self, config): raise KeyError('tools')\n"
        "    async def episode(self, row, ask): ...\n"
    )
    (tmp_path / "broken_flow.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(function: str) -> Any:
        return load_workflow(Config.model_validate({"workflow": {"function": function}}))

    assert isinstance(load("single_turn"), SingleTurn)
    assert load("mine_flow:Flow").seed == 1
    for function, why in [
        ("mine_flow", "module:Class"),
        ("mine_flow:Other", "no such name"),
        ("mine_flow:plain", "no class"),
        ("broken_flow:Flow", "no_such_module_at_all"),
        ("sour_flow:Flow", "must build from the config alone.*KeyError: 'tools'"),
        ("missing_flow:Flow", "'missing_flow' did not"),
    ]:
        with pytest.raises(ConfigError, match=why):
            load(function)
    sources = [{"path": "a.csv", "weight": 1, "workflow": "missing_flow:Flow"}]
    with pytest.raises(ConfigError, match=r"^workflow of a \[\[data.source\]\] 'missing_flow:Flow' must import"):
        load_workflow(Config.model_validate({"data": {"source": sources}}))


def test_the_rows_of_a_source_have_its_own_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    (tmp_path / "of_source.py").write_text(
        "from actors.workflows.protocol import Episode\n"
        "class Flow:\n    def __init__(self, config): ...\n"
        "    async def episode(self, row, ask):\n"
        "        turn = await ask([3], max_new_tokens=ask.gconfig.max_new_tokens)\n"
        "        return Episode(text=f'mine {ask.gconfig.top_k}')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = [{"name": "a", "task": "sums"}, {"name": "b", "task": "sums", "workflow": "of_source:Flow"}]
    mixed = config(source=sources)
    assert not mixed.has_plain_prompts
    workflow = load_workflow(mixed)
    assert continues(workflow)
    found = {}
    for name in ("a", "b", "of an evaluation"):
        gconfig = GenerationConfig(max_new_tokens=7, top_k=3)
        run = EpisodeRun(workflow, {"source_name": name, "question": "ab"}, tokenizer, gconfig=gconfig)
        wish = run.start()
        assert isinstance(wish, Asked)
        assert run.answer(completion([9])) is None
        found[name] = (wish.max_new_tokens, run.episode and run.episode.text.startswith("mine 3"))
    assert found == {"a": (None, False), "b": (7, True), "of an evaluation": (None, False)}
    for function in ("agent", "tools", "verifiers:gsm8k"):
        source = {"name": "a", "task": "sums", "weight": 1, "workflow": function}
        wrong = config(source=[source]).model_copy(update={"model": ModelConfig(path="m")})
        with pytest.raises(ConfigError, match=r"the workflow of a .* is .*single_turn.* or .*module:Class"):
            check(wrong)


def test_the_prompt_of_a_group_is_made_tokens_once_and_each_sample_has_its_own(tokenizer: Any) -> None:
    texts: list[str] = []

    def counting(text: str, **more: Any) -> Any:
        texts.append(text)
        return tokenizer(text, **more)

    workflow = SingleTurn(config(prompt="{question} >"))
    for question in ("ab", "ab", "abc", "ab"):
        run = EpisodeRun(workflow, {"question": question}, counting)
        asked = run.start()
        assert asked is not None
        assert tokenizer.decode(asked.ids) == f"{question} >"
        run.ids.append(7)
        asked.ids.append(7)  # no other sample's matter
    assert texts == ["ab >", "abc >", "ab >"]
