"""An OpenAI-compatible way to the model: agents in processes of their own, each call a turn of an episode."""
