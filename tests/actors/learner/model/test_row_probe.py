"""How sequences share a row is found by a test of the model, and the log-probs are those of each sequence alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.critic import ValueModel
from actors.learner.model.policy import Policy
from actors.models.packed_row import SequencePiece
from areal_bus.errors import ConfigError, EngineError
from tests.support.tiny_families import NAMES, V, plain_logps, tiny

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
            "original_max_position_embeddings": 16}  # fmt: skip
OURS, THEIRS, ALONE = (True, False), (False, False), (False, True)  # (packed, alone)
DRAW = torch.Generator().manual_seed(3)
TEXTS = [torch.randint(2, V - 1, (n,), generator=DRAW).tolist() for n in (5, 12, 33, 12)]
PIECES = [SequencePiece(torch.tensor(ids), torch.arange(1, len(ids))) for ids in TEXTS]


def policy_of(model: Any) -> Policy:
    return Policy(model, ranks=LearnerRanks(), device="cpu", temperature=1.0)


def expected(model: Any) -> Tensor:
    return torch.cat([plain_logps(model, ids) for ids in TEXTS])


@pytest.mark.parametrize(
    ("family", "others", "rows"),
    [
        ("llama", {}, OURS),
        ("mistral", {}, THEIRS),
        ("stablelm", {}, THEIRS),  # its attention does not pass on what ours needs
        ("nemotron", {}, THEIRS),
        ("gpt_oss", {}, ALONE),  # its samples would see each other
        ("bloom", {}, ALONE),  # positions by place in the row
        ("xglm", {}, ALONE),
        ("mamba", {}, ALONE),  # a state runs on over the row
        ("llama4_text", {}, ALONE),  # chunks of 8,192 places of the row
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}, ALONE),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, ALONE),
    ],
)
def test_a_row_holds_sequences_together_only_where_they_are_read_as_if_alone(
    family: str, others: dict[str, Any], rows: tuple[bool, bool]
) -> None:
    model = tiny(family, **others)
    reference = expected(model)
    policy = policy_of(model)
    assert (policy.packed, policy.alone) == rows
    found, entropy = policy.logprobs(PIECES, entropy=True)
    assert torch.allclose(found, reference, atol=1e-4)
    assert entropy.shape == found.shape
    assert policy.row_tokens(4096) == (1 if policy.alone else 4096)
    (-found.mean()).backward()  # type: ignore[no-untyped-call]
    assert any(p.grad is not None and float(p.grad.abs().max()) > 0 for p in policy.parameters().values())


def test_a_short_sequence_packed_with_a_long_one_keeps_its_rope_frequencies() -> None:
    model = tiny("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=16)
    row = torch.tensor([TEXTS[0] + TEXTS[2]])  # 5 tokens, then 33: over the original length
    positions = torch.cat([torch.arange(5), torch.arange(33)])[None]
    with torch.no_grad():
        logits = model(input_ids=row, position_ids=positions, use_cache=False).logits[0, :4]
    packed = logits.log_softmax(-1).gather(-1, torch.tensor(TEXTS[0][1:])[:, None])[:, 0]
    assert float((packed - plain_logps(model, TEXTS[0])).abs().max()) > 0.01  # by transformers
    found, _ = policy_of(model).logprobs(PIECES)
    assert torch.allclose(found[:4], plain_logps(model, TEXTS[0]), atol=1e-5)


def test_values_of_a_critic_are_those_of_each_sequence_alone() -> None:
    critic = ValueModel(tiny("gpt_oss"), ranks=LearnerRanks(), device="cpu", temperature=1.0)
    assert critic.alone
    with torch.no_grad():
        critic.model.get_output_embeddings().weight.normal_()
        together = critic.values(PIECES)
        assert torch.equal(together, torch.cat([critic.values([piece]) for piece in PIECES]))


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("bert", "not causal"),
        ("roberta", "not causal"),
        ("prophetnet", "prophetnet cannot compute log-probs of chosen tokens"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(family: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        policy_of(tiny(family))


@pytest.mark.parametrize("family", ["gpt_oss", "stablelm", "mixtral"])
def test_the_builtin_engine_takes_a_family_that_it_computes_right(family: str) -> None:
    BuiltinEngine(tiny(family), EngineOptions(n_slots=2), stop_ids=frozenset(), version=0)


@pytest.mark.parametrize(
    ("families", "kind", "said"),
    [
        (["bart", "moshi", "rwkv", "bert"], ConfigError, r"model family refused: .* differ from the model's own"),
        (["bloom", "mpt", "xlstm", "mamba"], EngineError, "max_position_embeddings|attention layers only"),
    ],
)
def test_the_builtin_engine_refuses_a_family_that_it_computes_otherwise(
    families: list[str], kind: type[Exception], said: str
) -> None:
    for family in families:
        with pytest.raises(kind, match=said):
            BuiltinEngine(tiny(family), EngineOptions(n_slots=2), stop_ids=frozenset(), version=0)


def test_an_engine_checks_its_first_weights_only() -> None:
    model = tiny("gpt_oss")
    engine = BuiltinEngine(model, EngineOptions(n_slots=2), stop_ids=frozenset())
    weights = {name: p.clone() for name, p in engine.parameters().items()}
    engine.update(0, weights)
    model.forward = None  # a second check would call it
    engine.update(1, {name: p.clone() for name, p in weights.items()})
    assert engine.version == 1


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_every_family_of_transformers_is_read_right_or_refused() -> None:
    found: dict[str, str] = {}
    for name in NAMES:
        try:
            model = tiny(name)
            reference = expected(model)
        except Exception as error:  # noqa: BLE001  this tiny shape is none of the family's
            found[name] = f"no tiny model: {type(error).__name__}"
            continue
        try:
            policy = policy_of(model)
        except ConfigError:
            found[name] = "refused"
            continue
        with torch.no_grad():
            gap = float((policy.logprobs(PIECES)[0] - reference).abs().max())
        how = "packed" if policy.packed else "alone" if policy.alone else "packed by transformers"
        found[name] = how if gap < 1e-3 else f"WRONG by {gap:.2g} ({how})"
    print("\n".join(f"{name:28} {how}" for name, how in found.items()))
    assert not [name for name, how in found.items() if how.startswith("WRONG")]
    assert sum(how in ("packed", "alone", "packed by transformers") for how in found.values()) > 80
