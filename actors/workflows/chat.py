"""A conversation with the model, by its chat template, for a workflow of several turns."""

from actors.endpoint.conversation import Conversation
from actors.endpoint.openai_api import Message
from actors.workflows.protocol import Ask, Turn


class Chat:
    """`await chat.say(text)` is the model's next answer. What it has sampled stays as the tokens that they were."""

    def __init__(self, ask: Ask, *, system: str = "", template: str = "") -> None:
        """`system` is a first message; without one the template writes its own, if it has any. `template`: a Jinja
        template in place of the tokenizer's.
        """
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._ask = ask
        self._conversation = Conversation(ask.tokenizer, template)

    async def say(self, text: str, *, role: str = "user", max_new_tokens: int | None = None) -> Turn:
        """Raises Refused where the template has no form for these messages, EngineError where they are too long."""
        asked: list[Message] = [*self.messages, {"role": role, "content": text}]
        ids = self._conversation.extend(asked, [])
        turn = await self._ask(ids, max_new_tokens=max_new_tokens)
        answer: Message = {"role": "assistant", "content": turn.text}
        self._conversation.record(asked, [], [*ids, *turn.ids], answer, turn.finish)
        self.messages = [*asked, answer]
        return turn
