"""The default workflow: one prompt, one completion."""

from typing import Any

from actors.workflows.prompts import Question, prompt_ids, prompt_of
from actors.workflows.protocol import Ask, Episode, Row
from areal_bus.config.sections import Config


class SingleTurn:
    """One turn for each row, as [data] configures."""

    def __init__(self, config: Config) -> None:
        self._data = config.data
        self._last: tuple[Question, list[int]] | None = None  # cached: the samples of a group begin one after the other

    async def episode(self, row: Row, ask: Ask) -> Episode:
        """One turn. Raises PromptTooLong over data.max_prompt_tokens."""
        text, ids = self.prompt(row, ask.tokenizer)
        turn = await ask(ids)
        return Episode(text=turn.text, prompt_text=text)

    def prompt(self, row: Row, tokenizer: Any) -> tuple[str, list[int]]:
        """Text and tokens of the prompt. Raises PromptTooLong."""
        asked = prompt_of(row, self._data)
        if self._last is None or self._last[0] != asked:
            self._last = asked, prompt_ids(asked, self._data, tokenizer)
        return asked.text, self._last[1]
