"""Model folders: scratch, converted and given, and how they load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from actors.models.loading import check_model_path, empty_model, load_model, load_tokenizer, stop_ids, turn_end
from actors.models.scratch import write_scratch_folder
from areal_bus.config.sections import ScratchConfig
from areal_bus.errors import ConfigError

ROOT = Path(__file__).parents[3]
SMALL = ScratchConfig(hidden_size=32, layers=2, heads=4)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_scratch_folder(folder, SMALL)
    return folder


def test_a_scratch_folder_has_a_character_tokenizer(scratch: Path) -> None:
    tokenizer = load_tokenizer(str(scratch))
    text = "abc zyx >"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text
    assert tokenizer("A")["input_ids"] == [tokenizer.unk_token_id]
    assert tokenizer.chat_template is None
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


def test_scratch_weights_are_random_by_the_seed_alone(scratch: Path) -> None:
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    one, same, other = (load_model(str(scratch), "float32", "cpu", random_seed=seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert "lm_head.weight" not in dict(one.named_parameters())  # tied
    assert stop_ids(one, load_tokenizer(str(scratch))) == {1}


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3"])
def test_a_scratch_model_of_a_family_computes(tmp_path: Path, name: str) -> None:
    write_scratch_folder(tmp_path, SMALL.model_copy(update={"family": name.lower()}))
    model = load_model(str(tmp_path), "float32", "cpu", random_seed=1)
    assert type(model).__name__ == f"{name}ForCausalLM"
    logits_BTV = model(torch.tensor([[5, 6, 7]])).logits
    assert logits_BTV.isfinite().all()
    assert logits_BTV.std() > 0


TURNS = "{%% for m in messages %%}%s{%% endfor %%}{%% if add_generation_prompt %%}%s{%% endif %%}"
FAMILIES = {  # how each family writes a turn, and the token that ends one
    "llama3": ("<|start|>{{m['role']}}<|end|>\n\n{{m['content']}}<|eot_id|>", "<|start|>a<|end|>", "<|eot_id|>"),
    "qwen": ("<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>"),
    "gemma": ("<start_of_turn>{{m['role']}}\n{{m['content']}}<end_of_turn>\n", "<start_of_turn>m", "<end_of_turn>"),
    "mistral": ("{{'[INST] ' + m['content'] + ' [/INST]' if m['role'] == 'user' else ' ' + m['content'] + '</s>'}}",
                "", "</s>"),
    "plain": ("{{m['role']}}: {{m['content']}}\n", "assistant: ", None),
    "broken": ("{{raise_exception('no')}}", "", None),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_ends_with_the_turn_of_the_chat_template(scratch: Path, family: str) -> None:
    turn, begin, end = FAMILIES[family]
    tokenizer = load_tokenizer(str(scratch))
    tokenizer.add_special_tokens({"additional_special_tokens": [word for word in [end] if word]})
    tokenizer.chat_template = TURNS % (turn, begin)
    ends = {tokenizer.convert_tokens_to_ids(end)} if end else set()
    assert turn_end(tokenizer) == next(iter(ends), None)
    assert stop_ids(empty_model(str(scratch), "float32", "meta"), tokenizer) == {1} | ends


def test_an_engine_without_weights_stops_at_the_tokens_of_the_generation_config(scratch: Path) -> None:
    (scratch / "generation_config.json").write_text('{"eos_token_id": [1, 5, 7]}')
    assert stop_ids(empty_model(str(scratch), "float32", "cpu"), load_tokenizer(str(scratch))) == {1, 5, 7}


def test_an_empty_model_computes_the_same_once_it_has_the_weights(scratch: Path) -> None:
    full, empty = load_model(str(scratch), "float32", "cpu", random_seed=1), empty_model(str(scratch), "float32", "cpu")
    names = dict(full.named_parameters())
    assert names.keys() == dict(empty.named_parameters()).keys()
    for name, parameter in empty.named_parameters():
        parameter.data.copy_(names[name].data)
    ids = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(full(ids).logits, empty(ids).logits)
    assert not empty.training


def test_weights_of_a_file_begin_on_cache_lines(scratch: Path, tmp_path: Path) -> None:
    model = load_model(str(scratch), "float32", "cpu", random_seed=3)
    model.save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    for n_spaces in (8, 16, 24):  # behind the header: its weights begin elsewhere, and once at least on no line
        path.write_bytes((end - 8 + n_spaces).to_bytes(8, "little") + raw[8:end] + b" " * n_spaces + raw[end:])
        loaded = load_model(str(tmp_path / "saved"), "float32", "cpu")
        assert all(parameter.data_ptr() % 64 == 0 for parameter in loaded.parameters())
        expected = dict(model.named_parameters())
        assert all(torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters())


def test_a_model_path_is_found_from_the_config_folder(scratch: Path) -> None:
    assert check_model_path("model", scratch.parent) == str(scratch.resolve())
    assert check_model_path(str(scratch), Path("/")) == str(scratch.resolve())
    assert check_model_path("HuggingFaceTB/SmolLM2-135M", scratch) == "HuggingFaceTB/SmolLM2-135M"


def test_a_model_path_that_cannot_load_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(path: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            check_model_path(path, tmp_path)

    refused("models/SmolLM2-135M-Instruct", r"python -m actors.models.download \S+ \S")
    refused("./nowhere/model", "nothing is at")
    folder = tmp_path / "m"
    folder.mkdir()
    refused("m", r"config\.json")
    (folder / "config.json").write_text("{}")
    refused("m", r"\*\.safetensors")
    (folder / "model-1.safetensors").write_bytes(b"")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("m", r"missing part of the weights in .*: model-2\.safetensors, one of 2")


def test_weights_that_are_cut_off_are_the_users_error(scratch: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    load_model(str(scratch), "float32", "cpu", random_seed=1).save_pretrained(folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    check_model_path(str(folder), tmp_path)
    for cut in (whole[:-1], whole[:100], b""):
        weights.write_bytes(cut)
        with pytest.raises(ConfigError, match=r"cannot read the weights in .*must be a whole safetensors file"):
            check_model_path(str(folder), tmp_path)
        with pytest.raises(ConfigError, match=r"cannot load model.path as a causal language model"):
            load_model(str(folder), "float32", "cpu")
    (folder / "model.safetensors.index.json").write_text("[")
    with pytest.raises(ConfigError, match="must be JSON with a weight_map"):
        check_model_path(str(folder), tmp_path)


def test_the_tokenizer_that_needs_no_torch_is_the_one_that_transformers_finds(scratch: Path) -> None:
    folders = [scratch, ROOT / "models" / "SmolLM2-135M-Instruct"]
    for folder in [folder for folder in folders if folder.is_dir()]:
        ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        assert type(ours) is type(theirs)
        assert ours("abc <eos> > xyz")["input_ids"] == theirs("abc <eos> > xyz")["input_ids"]
        assert (ours.chat_template, ours.eos_token_id) == (theirs.chat_template, theirs.eos_token_id)
    code = "import sys; from actors.models import scratch; from actors.models.loading import *; "
    code += f"load_tokenizer({str(scratch)!r}); "
    code += f"max_positions({str(scratch)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


DATED = {  # templates that print a date, and what they print on the day of the run
    "{{ strftime_now('%d %b %Y') }}": "07 Mar 2025",
    "{% set form = '%Y-%m-%d' %}{{ strftime_now(form) }}": "2025-03-07",
    "{{ strftime_now(messages[0]['role'] and '%A, %-d %B') }}": "Friday, 7 March",
    "{% if strftime_now is defined %}{{ strftime_now(format='%j')|int }}{% endif %}": "66",
    "{% macro head() %}{{ strftime_now('%B ' ~ '%y') }}{% endmacro %}\n{{ head() }}": "March 25",
    "no date": "no date",
}


@pytest.mark.slow
def test_a_template_prints_the_date_of_the_run(scratch: Path) -> None:
    tokenizer, messages = load_tokenizer(str(scratch)), [{"role": "user", "content": "hi"}]
    for template, expected in DATED.items():
        tokenizer.chat_template = template
        tokenizer.save_pretrained(scratch)
        dated = load_tokenizer(str(scratch), date="2025-03-07")
        printed = dated.apply_chat_template(messages, tokenize=False)
        assert printed.strip() == expected
        todays = load_tokenizer(str(scratch)).apply_chat_template(messages, tokenize=False)
        assert (todays == printed) == (template == "no date")
    agents = dated.apply_chat_template(messages, chat_template="{{ strftime_now('%F') }}", tokenize=False)
    assert agents == "2025-03-07"


def change(folder: Path, **settings: object) -> None:
    """Of the model's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("padding", [[2, 0], []])
def test_of_several_padding_tokens_the_first_counts_and_the_ends_stay(scratch: Path, padding: list[int]) -> None:
    first, whole = (padding or [None])[0], scratch / "whole"
    saved = load_model(str(scratch), "float32", "cpu", random_seed=1)
    saved.save_pretrained(whole)
    for folder in (scratch, whole):
        change(folder, pad_token_id=padding or None)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5], "pad_token_id": padding}))
    loaded = load_model(str(whole), "float32", "cpu")
    for model in (loaded, empty_model(str(scratch), "float32", "cpu")):
        ends = model.generation_config
        assert (model.config.pad_token_id, ends.pad_token_id, ends.eos_token_id) == (first, first, [1, 5])
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters(), strict=True))
    loaded.save_pretrained(scratch / "again")


def test_a_setting_that_makes_no_model_is_the_users_error(scratch: Path) -> None:
    before = (scratch / "config.json").read_text()
    for wrong in ({"pad_token_id": 999}, {"pad_token_id": [999]}, {"pad_token_id": "2"}, {"hidden_size": "wide"},
                  {"model_type": "no"}):  # fmt: skip
        (scratch / "config.json").write_text(before)
        change(scratch, **wrong)
        for load in (empty_model, load_model):
            with pytest.raises(ConfigError, match="cannot load"):
                load(str(scratch), "float32", "cpu")


def test_a_folder_without_a_tokenizer_and_a_scratch_shape_of_no_model_are_the_users_errors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="must be an even multiple"):
        write_scratch_folder(tmp_path / "m", ScratchConfig(hidden_size=34, heads=4))
