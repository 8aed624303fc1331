"""Chat: a conversation with the model through its chat template, for workflows with several turns."""

from collections.abc import Mapping
from typing import Any

from actors.endpoint.conversation import NONE, Conversation
from actors.endpoint.openai_api import Message
from actors.workflows.protocol import Ask, Turn


class Chat:
    """`await chat.say(text)` returns the model's next answer. Sampled tokens are kept and never tokenized again."""

    def __init__(self, ask: Ask, *, system: str = "", template: str = "", arguments: Mapping[str, Any] = NONE) -> None:
        """`system`: the system message; without one, the template may write its own. `template`: a Jinja template to
        use instead of the tokenizer's; `arguments`: of the template (config.data.chat_template_kwargs).
        """
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._ask = ask
        self._conversation = Conversation(ask.tokenizer, template, arguments)

    async def say(self, text: str, *, role: str = "user", max_new_tokens: int | None = None) -> Turn:
        """Raises RequestRejected when the template cannot render the messages, EngineError when they are too long."""
        asked: list[Message] = [*self.messages, {"role": role, "content": text}]
        ids = self._conversation.extend(asked, [])
        turn = await self._ask(ids, max_new_tokens=max_new_tokens)
        answer: Message = {"role": "assistant", "content": turn.text}
        self._conversation.record(asked, [], [*ids, *turn.ids], answer, turn.finish)
        self.messages = [*asked, answer]
        return turn
