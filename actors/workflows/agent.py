"""Workflows in worker processes ("agent", "multi_turn", "tools", "verifiers:NAME"): each call of the model is one turn.

The agent or environment calls the model over HTTP. It runs in a worker process (`actors.endpoint.agent_pool`), the HTTP
server in threads. This module runs on the generator's loop: it tokenizes calls and returns completions. An agent that
fails or exceeds its time fails its sample, never the generator.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from actors.endpoint.agent_pool import AgentCode, AgentJob, AgentPool
from actors.endpoint.conversation import Conversation, HistoryRewritten
from actors.endpoint.external_agents import AgentAccess, ExternalAgents
from actors.endpoint.openai_api import ChatCall, ChatCompletion, Message, RequestRejected
from actors.endpoint.sessions import AgentEnded, Pending, Sessions
from actors.endpoint.tool_calls import FORMS, form_of, read_calls, split_thought, text_with_marks
from actors.engines.protocol import SamplingControls
from actors.engines.stop_strings import before_stop
from actors.runtime.user_failures import Prints
from actors.workflows.episode_runner import Awaited
from actors.workflows.prompts import fill, prompt_of
from actors.workflows.protocol import Ask, Episode, Row, Turn, at_turn_ends
from areal_bus.config.names.workflows import BUILT_IN, EXTERNAL
from areal_bus.config.sections import AgentConfig, Config
from areal_bus.errors import ConfigError, EngineError, SettingRefused, WorkflowError
from areal_bus.foreign_text import cut
from areal_bus.sample_fields import TOKEN_REWARD

if TYPE_CHECKING:
    from actors.endpoint.http_server import EndpointServer


BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # of a vocabulary with byte fallback


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The UTF-8 bytes that the token stands for. Those of the tokens of a character together are the character."""
    text = str(tokenizer.decode([token]))
    if "\ufffd" not in text:
        return text.encode(errors="replace")
    written = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(written, str):
        return text.encode()
    if found := BYTE.fullmatch(written):
        return bytes.fromhex(found[1])
    known = byte_letters()
    if all(letter in known for letter in written):
        return bytes(known[letter] for letter in written)
    return text.encode()


@lru_cache(maxsize=1)
def byte_letters() -> dict[str, int]:
    """The letter that a byte-level BPE vocabulary (GPT-2's) writes for each byte: its own where that can be printed."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


TOO_LONG = "over the maximum context length"  # clients recognise an overlong conversation by these words
UNSUPPORTED = "setting not supported by this run's engine"
PROMPT_END = 16  # tokens of the prompt that may open a thought
MAX_KILLED = 2  # processes of one sample that may be killed, each restarts the conversation, before the sample fails


def do_nothing() -> None:
    """The `wake` of a loop that never sleeps."""


class AgentWorkflow:
    """Starts the HTTP server with the first episode; `close` stops it."""

    def __init__(self, config: Config, *, wake: Callable[[], None] = do_nothing, prints: Prints | None = None) -> None:
        """`wake` is called from any thread when an episode can continue. `prints`: receives the agents' output."""
        self._config, self._agent = config, config.workflow.agent
        self._sessions = Sessions(wake)
        self._prints = prints
        code = AgentCode.of(config, prints.run_folder if prints is not None else None)
        self._what = code.function
        self._agents = self._external() or AgentPool(
            code,
            n_workers=self._agent.workers,
            timeout_s=self._agent.timeout_s,
            prints=prints.file if prints is not None else None,
        )
        self._server: EndpointServer | None = None

    def _external(self) -> ExternalAgents | None:
        """Agents outside the job, if this one has them. Raises ConfigError."""
        if self._agent.function != EXTERNAL or self._prints is None:
            return None
        access, agent = AgentAccess.of(self._prints.run_folder), self._agent
        return ExternalAgents(access, timeout_s=agent.timeout_s, most=agent.workers)

    async def episode(self, row: Row, ask: Ask) -> Episode:
        """Run until the agent returns. Raises WorkflowError when it fails, ConfigError when it cannot run at all."""
        if not self._agent.chat_template and not ask.tokenizer.chat_template:
            raise ConfigError(
                "missing chat template in the tokenizer: conversations need one; set workflow.agent.chat_template"
            )
        if self._config.workflow.function in BUILT_IN:
            row = {**row, "messages": self._first_messages(row)}
            retry = str(self._config.workflow.arguments.get("retry", ""))
            fill(retry, row, "question", setting="workflow.arguments.retry")  # raises ConfigError, before any answer
        n_killed = 0
        while True:
            dialogue = Dialogue(self._config, ask, n_killed=n_killed)
            ended = await self._converse(dialogue, row, ask.name)
            if not ended.was_killed or n_killed == MAX_KILLED:
                return dialogue.episode(row, ended)
            n_killed += 1
            logger.warning("{}: its conversation with {} is restarted: {}", ask.name, self._what, ended.error)

    def _first_messages(self, row: Row) -> list[Message]:
        """The prompt as [data] configures it, for a built-in agent."""
        asked, system = prompt_of(row, self._config.data), self._config.data.system
        has_system = any(message["role"] == "system" for message in asked.messages)
        return [*([{"role": "system", "content": system}] if system and not has_system else []), *asked.messages]

    async def _converse(self, dialogue: "Dialogue", row: Row, name: str) -> AgentEnded:
        """One conversation from its first call to the end of its agent."""
        session = self._sessions.open(name)
        try:
            self._agents.run(AgentJob(session, row, self._serve()))
            while True:
                await Awaited(session.has_event)
                event = session.next_event()
                if isinstance(event, AgentEnded):
                    if self._prints is not None:
                        self._prints.log_once()
                    return event
                await dialogue.take(event)
        finally:
            self._sessions.close(session)

    def close(self) -> None:
        """Stop the server and all agent processes. All episodes have ended by now."""
        self._sessions.close_all()
        self._agents.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _serve(self) -> str:
        """Start the server if needed. Returns its base URL."""
        if self._server is None:
            from actors.endpoint.http_server import EndpointServer  # aiohttp, which other workflows need not load

            model, n_connections = Path(self._config.model.path).name or "scratch", 16 + 4 * self._agent.workers
            external = self._agents if isinstance(self._agents, ExternalAgents) else None
            if external is None and self._agent.function == EXTERNAL:
                raise ConfigError(f"missing run: agents outside the job ({EXTERNAL!r}) find the endpoint of a run only")
            try:
                self._server = EndpointServer(
                    self._sessions, model=model, n_connections=n_connections, external=external
                )
            except OSError as error:
                raise ConfigError(f"cannot serve agents: {error}; delete RUN/agents.json for another port") from error
            logger.info("conversations of {} use the endpoint {}", self._what, self._server.base_url)
        return self._server.base_url


class Dialogue:
    """One agent's conversation with the model: checks, samples and answers each call."""

    def __init__(self, config: Config, ask: Ask, *, n_killed: int = 0) -> None:
        """`n_killed`: earlier processes of this sample that were killed; the first call drops their tokens."""
        self._config, self._ask = config, ask
        self._replaces, self._n_killed = n_killed > 0, n_killed
        self._agent: AgentConfig = config.workflow.agent
        self._conversations: list[Conversation] = []  # one of each trajectory of the episode
        self._latest = 0  # the one of the last call
        template = self._agent.chat_template or str(ask.tokenizer.chat_template)
        self._form = FORMS.get(self._agent.tool_calls) or form_of(template)
        self._controls_of_run = SamplingControls(**ask.gconfig.controls())
        self._n_asked = self._n_tool_calls = self._n_anew = 0
        self._n_given = 0  # tokens before the last completion
        self._turn_lengths: list[int] = []  # sampled tokens of each call that is kept
        self._text = ""  # of the last completion

    def _new_conversation(self) -> Conversation:
        return Conversation(self._ask.tokenizer, self._agent.chat_template, self._config.data.chat_template_kwargs)

    async def take(self, pending: Pending) -> None:
        """Answer a call, or reject it without a change of state."""
        call = pending.call
        self._n_asked += call.n
        try:
            self._check(call)
            number, conversation, ids = self._extended(call)
            budget = self._budget(call, len(ids))
            choices = [await self._sample(call, number, conversation, ids, budget)]
            while len(choices) < call.n:  # each in a trajectory of its own
                number, conversation = len(self._conversations), self._new_conversation()
                choices.append(await self._sample(call, number, conversation, ids, budget))
        except RequestRejected as rejection:
            pending.reject(rejection)
            return
        except SettingRefused as error:
            pending.reject(RequestRejected(f"{UNSUPPORTED}: {error}", code="unsupported_setting"))
            return
        except EngineError as error:
            pending.reject(RequestRejected(f"{TOO_LONG}: {error}", code="context_length_exceeded"))
            return
        pending.answer(choices)

    async def _sample(
        self, call: ChatCall, number: int, conversation: Conversation, ids: list[int], budget: int
    ) -> ChatCompletion:
        """One choice, which extends or begins trajectory `number`. Raises EngineError, RequestRejected."""
        is_anew = number < len(self._conversations) and conversation is not self._conversations[number]
        turn = await self._ask(
            ids,
            max_new_tokens=budget,
            anew=is_anew or self._replaces,
            trajectory=number,
            controls=self._controls(call, budget),
        )
        self._replaces = False
        self._n_anew += is_anew
        self._turn_lengths = [*([] if is_anew else self._turn_lengths), len(turn.ids)]
        self._conversations[number : number + 1] = [conversation]
        self._latest = number
        return self._record(call, ids, turn)

    def episode(self, row: Row, ended: AgentEnded) -> Episode:
        """The episode for the reward: the last answer, the text before it as prompt, the agent's fields in the row."""
        if ended.is_unusable:
            raise ConfigError(ended.error)
        if ended.returned is None:
            raise WorkflowError(
                f"the agent of {self._ask.name} failed: {ended.error}",
                place=ended.place,
                trace=ended.trace,
            )
        if not self._n_given:
            raise WorkflowError(f"missing call of the model: the agent of {self._ask.name} ended without a call")
        last = self._conversations[self._latest]
        prompt = str(self._ask.tokenizer.decode(last.ids[: self._n_given]))
        counts = {"n_anew": self._n_anew, "n_killed": self._n_killed, "n_trajectories": len(self._conversations)}
        fields = {**ended.returned, "messages": last.messages, **counts}
        episode = Episode(text=self._text, prompt_text=prompt, row={"agent": fields})
        episode.roles = ended.returned.get("roles", ())
        if "turn_rewards" in ended.returned:
            episode.fields = {TOKEN_REWARD: self._by_token(ended.returned["turn_rewards"])}
        return episode

    def _by_token(self, rewards: Any) -> list[float]:
        """The field of a reward for each call. Raises WorkflowError."""
        try:
            return at_turn_ends(self._turn_lengths, rewards)
        except (TypeError, ValueError):
            n = len(self._turn_lengths)
            raise WorkflowError(
                f"mismatch in the turn_rewards of {self._ask.name}: {n} calls were answered, so a list of {n} numbers "
                f"is needed; it is {cut(repr(rewards), 80)}"
            ) from None

    def _check(self, call: ChatCall) -> None:
        """Raises RequestRejected for a call that this run cannot serve."""
        top_p, limit = self._ask.gconfig.top_p, self._agent.max_calls
        rules = [
            (call.temperature not in (None, self._ask.temperature), f"this conversation is sampled at temperature "
             f"{self._ask.temperature:g}, which its training needs: leave temperature out"),
            (call.top_p not in (None, top_p), f"this conversation is sampled at top_p {top_p:g}: leave top_p out"),
            (bool(call.tools) and self._agent.tool_calls == "none", "tools need to know how the model writes calls: "
             "leave them out, or set workflow.agent.tool_calls"),
            (call.n > 1 and self._agent.rewritten != "new_trajectory", f"n = {call.n} makes trajectories of one prompt"
             ': set workflow.agent.rewritten = "new_trajectory", or leave n out'),
            (self._n_asked > limit, f"too many calls: a conversation has at most workflow.agent.max_calls = {limit}"),
        ]  # fmt: skip
        for broken, sentence in rules:
            if broken:
                raise RequestRejected(sentence)

    def _extended(self, call: ChatCall) -> tuple[int, Conversation, list[int]]:
        """The number of the trajectory that the call extends or begins, its conversation, tokens to complete."""
        begun, rewritten = self._conversations, self._agent.rewritten
        for number in sorted(range(len(begun)), key=lambda i: -len(begun[i].messages)):
            try:
                return number, begun[number], begun[number].extend(call.messages, call.tools, call.template_arguments)
            except HistoryRewritten:
                if rewritten == "refuse":
                    raise
        fresh = self._new_conversation()
        ids = fresh.extend(call.messages, call.tools, call.template_arguments)
        return (len(begun) if rewritten == "new_trajectory" else 0), fresh, ids

    def _budget(self, call: ChatCall, n_given: int) -> int:
        """The largest number of tokens to sample. Raises RequestRejected."""
        most = self._ask.gconfig.max_new_tokens
        if self._agent.max_tokens is not None:
            most = min(most, self._agent.max_tokens - n_given)
            if most < 1:
                raise RequestRejected(
                    f"{TOO_LONG}: a conversation has at most workflow.agent.max_tokens = {self._agent.max_tokens} "
                    f"tokens: it has {n_given} already",
                    code="context_length_exceeded",
                )
        return min(most, call.max_tokens or most)

    def _controls(self, call: ChatCall, budget: int) -> SamplingControls:
        """Those of the run, with what the call sets. Raises RequestRejected."""
        controls = self._controls_of_run
        least = call.controls.get("min_new_tokens")
        if least is not None and least > budget:
            raise RequestRejected(f"min_tokens must not exceed the budget of the call: {least} of {budget}")
        merged = {"min_new_tokens": min(controls.min_new_tokens, budget), **call.controls}
        return replace(controls, **merged)

    def _record(self, call: ChatCall, ids: list[int], turn: Turn) -> ChatCompletion:
        stops = call.controls.get("stop", ())
        text = before_stop(turn.text, stops)  # as the API says; the trajectory has all tokens
        message: Message = {"role": "assistant", "content": text}
        finish = "length" if turn.finish == "length" else "stop"
        if call.reads_tool_calls:
            form, tokenizer = self._form, self._ask.tokenizer
            marked = before_stop(text_with_marks(tokenizer, turn.ids), stops) if form.has_special_marks else text
            thought, answer = split_thought(marked, str(tokenizer.decode(ids[-PROMPT_END:])))
            content, calls = read_calls(answer, form, self._n_tool_calls, call.tools)
            if calls:
                message |= {"content": thought + content, "tool_calls": calls}
                finish = "tool_calls"
                self._n_tool_calls += len(calls)
        self._conversations[self._latest].record(call.messages, call.tools, [*ids, *turn.ids], message, turn.finish)
        self._n_given, self._text = len(ids), turn.text
        tokens = [token_bytes(self._ask.tokenizer, token) for token in turn.ids] if call.logprobs else []
        return ChatCompletion(message, finish, len(ids), tokens, turn.logps, turn.spans[-1][0])
