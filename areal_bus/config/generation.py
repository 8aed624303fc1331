"""Rules for generation settings and the arguments of chat templates. Pure; imports without torch."""

from areal_bus.config.rollout import GenerationConfig
from areal_bus.config.sections import Config, WorkflowConfig

MOST_BIAS = 100  # as vLLM, which cuts larger ones
OURS = (  # parameters of transformers' apply_chat_template that are no arguments of a template
    *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt"),
    *("continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    *("padding", "truncation", "max_length"),
)

Rule = tuple[bool, str]  # (whether it is violated, error text)


def generation_rules(c: Config) -> list[Rule]:
    """Rules for [gconfig] and data.chat_template_kwargs."""
    g, own = c.gconfig, sorted(c.data.chat_template_kwargs.keys() & set(OURS))
    odd = [token for token in [*g.stop_token_ids, *g.logit_bias] if token < 0]
    large = [token for token, bias in g.logit_bias.items() if abs(bias) > MOST_BIAS]
    builds_prompts = c.workflow.function == WorkflowConfig().function
    return [
        (
            g.temperature == 0 and g.n_samples > 1,
            f"greedy samples of one prompt are all the same, and a group of them trains nothing: set "
            f"gconfig.temperature above 0, or gconfig.n_samples to 1 (it is {g.n_samples})",
        ),
        (
            g.min_new_tokens > g.max_new_tokens,
            f"gconfig.min_new_tokens ({g.min_new_tokens}) must not exceed gconfig.max_new_tokens ({g.max_new_tokens})",
        ),
        ("" in g.stop, "a text of gconfig.stop has at least one character: one is empty"),
        (bool(odd), f"token ids of gconfig are 0 or more: {odd[:1]} is in stop_token_ids or logit_bias"),
        (bool(large), f"a gconfig.logit_bias is from -{MOST_BIAS} to {MOST_BIAS}: that of token {large[:1]} is not"),
        (
            c.rollout.engine == "sglang" and changes_logits(g),
            "SGLang's log-probs are of logits after penalties, logit_bias and min_new_tokens, and training needs those "
            'of the model: remove these keys of gconfig, or set rollout.engine = "builtin" or "vllm"',
        ),
        (
            c.rollout.engine == "vllm" and changes_sampling(g) and not set(_temperatures(c)) <= {0.0, 1.0},
            "vLLM has log-probs of the whole distribution at temperature 1 only, where anything but the temperature "
            "changes what is drawn: set gconfig.temperature and those of [evaluate] to 1 (or 0), or remove top_p, "
            "top_k, min_p, min_new_tokens, logit_bias and penalties of gconfig",
        ),
        (bool(own), f"data.chat_template_kwargs may not set {own[:1]}: that is set for each prompt"),
        (
            bool(c.data.chat_template_kwargs) and builds_prompts and not c.data.chat_template,
            "data.chat_template_kwargs needs a chat template: set data.chat_template = true",
        ),
    ]


def changes_logits(g: GenerationConfig) -> bool:
    """Whether the likeliest token may be another one than the model's."""
    penalties = g.repetition_penalty != 1 or g.presence_penalty or g.frequency_penalty
    return bool(penalties or g.logit_bias or g.min_new_tokens)


def changes_sampling(g: GenerationConfig) -> bool:
    """Whether tokens are drawn from another distribution than the model's at the temperature."""
    return changes_logits(g) or bool(g.top_k or g.min_p or g.top_p < 1)


def _temperatures(c: Config) -> list[float]:
    sets = [problems.temperature for problems in c.evaluate.sets if problems.temperature is not None]
    return [c.gconfig.temperature, *((c.evaluate.temperature, *sets) if c.evaluate.is_on else ())]
