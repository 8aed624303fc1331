"""The default workflow: one prompt, one completion, whose text is what the reward reads."""

from actors.workflows.prompting import fill, prompt_ids
from actors.workflows.protocol import Ask, Episode, Row
from areal_bus.config import Config


class SingleTurn:
    """Built from the section [data] of the config."""

    def __init__(self, config: Config) -> None:
        self._data = config.data

    async def episode(self, row: Row, ask: Ask) -> Episode:
        """One turn. Raises PromptTooLong over data.max_prompt_tokens."""
        text = fill(self._data.prompt, row, self._data.question_key)
        turn = await ask(prompt_ids(text, self._data, ask.tokenizer))
        return Episode(text=turn.text, prompt_text=text)
