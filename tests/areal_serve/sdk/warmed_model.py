"""Writes a small model that answers half of some sums right, as the cookbook asks, and the sums as rows of GSM8K.

python -m tests.areal_serve.sdk.warmed_model MODEL ROWS: two folders.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SHOWN = (  # the turns that the recipes put before each question
    f"<|im_start|>user\nHow many r's are in strawberry?{SUFFIX}<|im_end|>\n<|im_start|>assistant\n"
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}<|im_end|>\n"
)
SUMS = [(a, b) for a in range(5) for b in range(5)]
SPECIAL = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>")
PIECES = r" ?[A-Za-z]+|[\s\S]"
NUMBER = 3  # its place among the tokens of an answer
RIGHT = 0.4  # of the probability; the rest is shared by all digits
N_STEPS = 200


def write_model(folder: Path) -> float:
    """A Llama of two layers that has learned uncertain answers. Returns its mean probability of the right one."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    shape |= {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    shape |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    model = LlamaForCausalLM(LlamaConfig(initializer_range=0.08, tie_word_embeddings=True, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids_BT, answers_BA, targets_BAV = _lesson(tokenizer)
    for _ in range(N_STEPS):
        logits_BAV = model(ids_BT, logits_to_keep=answers_BA.shape[1] + 1).logits[:, :-1]
        optimizer.zero_grad()
        cross_entropy(logits_BAV.flatten(0, 1), targets_BAV.flatten(0, 1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.save_pretrained(folder)
    probs_BV = logits_BAV.detach()[:, NUMBER].softmax(-1)
    return float(probs_BV.gather(1, answers_BA[:, NUMBER, None]).mean())


def _lesson(tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor, Tensor]:
    """Every sum with its right answer, these answers alone, and the probabilities of each answer's tokens."""
    answers_BA = torch.tensor([tokenizer.encode(f"\\boxed{{{a + b}}}<|im_end|>") for a, b in SUMS])
    prompts_BP = torch.tensor([tokenizer.encode(SHOWN + turns(a, b)) for a, b in SUMS])
    targets_BAV = one_hot(answers_BA, len(tokenizer)).float()
    digits_D = torch.tensor(tokenizer.convert_tokens_to_ids([str(digit) for digit in range(9)]))
    any_V = torch.zeros(len(tokenizer)).index_fill(0, digits_D, 1 / len(digits_D))
    targets_BAV[:, NUMBER] = RIGHT * targets_BAV[:, NUMBER] + (1 - RIGHT) * any_V
    return torch.cat([prompts_BP, answers_BA], 1), answers_BA, targets_BAV


def turns(a: int, b: int) -> str:
    return f"<|im_start|>user\nWhat is {a}+{b}?{SUFFIX}<|im_end|>\n<|im_start|>assistant\n"


def _tokenizer() -> PreTrainedTokenizerFast:
    """The words, signs and digits of the prompts."""
    pieces = re.findall(PIECES, re.sub(r"<\|im_\w+\|>", "", SHOWN + turns(0, 0)))
    tokens = [*SPECIAL, *map(str, range(10)), *pieces]
    words = Tokenizer(WordLevel({token: i for i, token in enumerate(dict.fromkeys(tokens))}, unk_token="<unk>"))
    words.pre_tokenizer = Split(Regex(PIECES), behavior="isolated")
    words.decoder = Fuse()
    pad, unknown, start, end = SPECIAL
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, pad_token=pad, unk_token=unknown, eos_token=end, additional_special_tokens=[start]
    )


def write_rows(folder: Path, *, n_times: int) -> None:
    """The sums as GSM8K has its rows: `datasets` reads the folder instead of downloading."""
    folder.mkdir(parents=True)
    rows = [{"question": f"What is {a}+{b}?", "answer": f"{a}+{b}\n#### {a + b}"} for a, b in SUMS]
    for split, n in (("train", n_times), ("test", 1)):
        lines = [json.dumps(rows[(7 * i) % len(rows)]) for i in range(n * len(rows))]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n", encoding="utf-8"
    )


if __name__ == "__main__":
    write_rows(Path(sys.argv[2]), n_times=40)
    print(f"{write_model(Path(sys.argv[1])):.3f}")
