"""attach(capture=True), or on a GPU: a recorded decode step gives the model's own tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.errors import ConfigError, UnsupportedError

pytest.importorskip("transformers")

from openmla.integrations.transformers import attach, detach
from openmla.integrations.transformers.captured import CapturedDecode
from tests.integrations.generation import captured, generate, new_tokens, prompts, worst_logits
from tests.integrations.models import make_model, make_v4, model_of, padded_prompts

FAMILIES = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"]


def on(device: str, model: Any, *tensors: Tensor) -> Any:
    return (model.to(device), *(tensor.to(device) for tensor in tensors))


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens(family: str, device: str) -> None:
    """A left-padded batch, greedy: same tokens; pools and tables grow on the way."""
    model, ids, mask = on(device, model_of(family), *padded_prompts())
    alone = generate(model, ids, mask)
    attach(model, block_size=4, capture=True)
    ours = generate(model, ids, mask)
    assert torch.equal(ours.sequences, alone.sequences) and worst_logits(ours, alone) < 1e-4
    few = captured(model).recordings
    assert 1 <= few <= 6  # blocks double from 6 to 21 columns, the pool a few times
    again = generate(model, ids, mask)
    assert torch.equal(again.sequences, alone.sequences)
    detach(model)
    assert not isinstance(model.forward, CapturedDecode)
    assert torch.equal(generate(model, ids, mask).sequences, alone.sequences)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_beams_samples_and_other_batches(family: str, device: str) -> None:
    """Rows change places and share blocks; another number of rows is another recording."""
    model, ids, mask = on(device, model_of(family, seed=1), *padded_prompts(seed=1))
    options: list[dict[str, Any]] = [
        {"num_beams": 3, "max_new_tokens": 24},
        {"do_sample": True, "max_new_tokens": 24, "top_k": 0},
        {"max_new_tokens": 24, "num_return_sequences": 2, "do_sample": True},
    ]

    def run(chosen: dict[str, Any], rows: slice) -> Tensor:
        torch.manual_seed(5)
        out: Tensor = generate(model, ids[rows], mask[rows], **chosen).sequences
        return out

    alone = [run(chosen, rows) for chosen in options for rows in (slice(0, 5), slice(1, 2))]
    attach(model, block_size=4, num_blocks=600, capture=True)
    ours = [run(chosen, rows) for chosen in options for rows in (slice(0, 5), slice(1, 2))]
    assert all(torch.equal(a, b) for a, b in zip(alone, ours, strict=True))


def test_v4(device: str) -> None:
    """Three kinds of layers, each with buffers of its own; windows wrap on the way."""
    model, ids, mask = on(device, make_v4(), *prompts((130, 3, 61)))
    attach(model)
    alone = new_tokens(model, ids, mask, n=40)
    detach(model)
    attach(model, capture=True)
    assert torch.equal(new_tokens(model, ids, mask, n=40), alone)
    assert captured(model).recordings == 1
    beams = new_tokens(model, ids[:1], mask[:1], n=12, num_beams=2)
    detach(model)
    attach(model)
    plain = new_tokens(model, ids[:1], mask[:1], n=12, num_beams=2)
    assert torch.equal(beams, plain)


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_a_step_may_run_again(family: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording runs it several times: caches and compressor states end up as after one."""
    once = CapturedDecode._pass

    def thrice(self: CapturedDecode, *args: Any) -> Any:
        layers = args[-1]
        columns = [layer.columns for layer in layers]
        for _ in range(2):
            once(self, *args)
            for layer, seen in zip(layers, columns, strict=True):
                layer.columns = seen
        return once(self, *args)

    if family == "deepseek_v4":
        model, given = make_v4(), prompts((130, 3, 61))
    else:
        model, given = model_of(family), padded_prompts()
    model, ids, mask = on(device, model, *given)
    attach(model)
    alone = new_tokens(model, ids, mask, n=30)
    detach(model)
    monkeypatch.setattr(CapturedDecode, "_pass", thrice)
    attach(model, capture=True)
    assert torch.equal(new_tokens(model, ids, mask, n=30), alone)


def test_a_step_by_hand_goes_on_from_the_same_cache(device: str) -> None:
    """Replayed steps, then several tokens at once, then replayed ones again."""
    model, ids = on(device, make_model("deepseek_v3"), torch.arange(2, 42).view(1, 40))
    whole = model(ids).logits
    attach(model, block_size=4, capture=True)
    past, at, logits = None, 0, []
    for n in (9, 1, 1, 1, 6, 1, 1, 1, 1, 18):
        positions = torch.arange(at, at + n, device=device)[None]
        out = model(
            input_ids=ids[:, at : at + n],
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
        )
        past, at = out.past_key_values, at + n
        logits.append(out.logits)
    assert captured(model).recordings == 2  # for up to 4 and up to 8 blocks
    torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=1e-4, atol=1e-4)
    assert past is not None and past.get_seq_length() == 40


def test_results_do_not_change_with_the_next_step(device: str) -> None:
    model, ids = on(device, make_model("deepseek_v3"), torch.arange(2, 12).view(2, 5))
    attach(model, capture=True)
    out = model(input_ids=ids, use_cache=True)
    steps = []
    for at in range(5, 8):
        positions = torch.full((2, 1), at, device=device)
        out = model(
            input_ids=ids[:, :1] + at,
            position_ids=positions,
            past_key_values=out.past_key_values,
        )
        steps.append((out.logits, out.logits.clone()))
    assert all(torch.equal(kept, then) for kept, then in steps)
    assert not torch.equal(steps[0][0], steps[1][0])


def test_other_questions_go_to_the_model(device: str) -> None:
    """Hidden states or given embeddings are not in a recording."""
    model, ids = on(device, make_model("deepseek_v3"), torch.arange(2, 12).view(1, 10))
    attach(model, capture=True)
    past = model(input_ids=ids, use_cache=True).past_key_values
    at = {"position_ids": torch.tensor([[10]], device=device), "past_key_values": past}
    out = model(input_ids=ids[:, :1], output_hidden_states=True, **at)
    assert len(out.hidden_states) > 1
    at["position_ids"] = at["position_ids"] + 1
    assert model(inputs_embeds=model.get_input_embeddings()(ids[:, 1:2]), **at).logits.dim() == 3
    assert captured(model).recordings == 0
    at["position_ids"] = at["position_ids"] + 1
    last = model(input_ids=ids[:, 2:3], **at).logits
    assert captured(model).recordings == 1
    detach(model)
    whole = model(torch.cat([ids, ids[:, :3]], 1)).logits[:, -1:]
    torch.testing.assert_close(last, whole, rtol=1e-4, atol=1e-4)


def test_modes_may_alternate(device: str) -> None:
    """Recorded in inference mode, replayed outside of it, and the other way round."""
    model, ids, mask = on(device, make_model("deepseek_v3"), *padded_prompts())
    alone = generate(model, ids, mask, max_new_tokens=6).sequences
    for first in (True, False):
        attach(model, capture=True)
        for mode in (first, not first, first):
            with torch.inference_mode(mode), torch.no_grad():
                given = ids.clone(), mask.clone()
                assert torch.equal(generate(model, *given, max_new_tokens=6).sequences, alone)
        detach(model)


def test_replaced_weights_are_noticed(device: str) -> None:
    model, ids, mask = on(device, make_model("deepseek_v3"), *padded_prompts())
    other = make_model("deepseek_v3", seed=3).to(device)
    wanted = generate(other, ids, mask, max_new_tokens=12).sequences
    attach(model, capture=True)
    before = generate(model, ids, mask, max_new_tokens=12).sequences
    assert not torch.equal(before, wanted)
    for name, parameter in other.named_parameters():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameter)
    recordings = captured(model).recordings
    assert torch.equal(generate(model, ids, mask, max_new_tokens=12).sequences, wanted)
    assert captured(model).recordings == recordings + 1


def test_copies_record_for_themselves(device: str) -> None:
    """A copied model, and a copied cache that goes its own way."""
    model, ids, mask = on(device, make_model("deepseek_v3"), *padded_prompts())
    alone = generate(model, ids, mask, max_new_tokens=20).sequences
    attach(model, block_size=4, capture=True)
    generate(model, ids, mask, max_new_tokens=6)
    twin = copy.deepcopy(model)
    assert captured(twin).model is twin and not captured(twin).recorded
    assert torch.equal(generate(twin, ids, mask, max_new_tokens=20).sequences, alone)
    start = generate(model, ids, mask, max_new_tokens=6)
    kept = copy.deepcopy(start.past_key_values)
    for past in (start.past_key_values, kept):
        more = torch.cat([mask, mask.new_ones(5, 6)], 1)
        out = generate(model, start.sequences, more, max_new_tokens=14, past_key_values=past)
        assert torch.equal(out.sequences, alone)


def test_a_full_pool_is_told_and_nothing_is_lost(device: str) -> None:
    from openmla.errors import CacheFullError

    model, ids = on(device, make_model("deepseek_v3"), torch.arange(2, 12).view(1, 10))
    attach(model, block_size=4, num_blocks=4, capture=True)
    with pytest.raises(CacheFullError):
        generate(model, ids, max_new_tokens=40)
    assert generate(model, ids, max_new_tokens=4).sequences.shape == (1, 14)


@pytest.fixture
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, on any machine."""
    monkeypatch.setattr("openmla.integrations.transformers.install._on_gpu", lambda module: True)


@pytest.mark.usefixtures("by_default")
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_decode_is_captured_by_default_unless_a_hook_is_inside(family: str, device: str) -> None:
    """Recorded without being asked, but where a hook inside wants to see every step."""
    model, ids, mask = on(device, model_of(family), *padded_prompts())
    alone = generate(model, ids, mask)
    attach(model)
    assert torch.equal(generate(model, ids, mask).sequences, alone.sequences)
    recordings = captured(model).recordings
    assert recordings
    around, inside = [], []
    outer = model.register_forward_hook(lambda *_: around.append(1))
    generate(model, ids, mask)
    assert captured(model).recordings == recordings and around
    inner = model.lm_head.register_forward_hook(lambda *_: inside.append(1))
    assert torch.equal(generate(model, ids, mask).sequences, alone.sequences)
    steps = alone.sequences.shape[1] - ids.shape[1]
    assert captured(model).recordings == recordings and len(inside) == steps
    inner.remove()
    outer.remove()
    assert torch.equal(generate(model, ids, mask).sequences, alone.sequences)
    assert len(inside) == steps


@pytest.mark.usefixtures("by_default")
def test_by_default_only_where_it_can_be(device: str) -> None:
    bare = make_model("deepseek_v3").model
    attach(bare)
    assert not isinstance(bare.forward, CapturedDecode)
    mixed, ids = on(device, make_model("kimi_linear"), torch.arange(2, 12).view(1, 10))
    alone = generate(mixed, ids, max_new_tokens=4)
    attach(mixed)
    assert torch.equal(generate(mixed, ids, max_new_tokens=4).sequences, alone.sequences)
    assert captured(mixed).recordings == 0
    refused = make_model("deepseek_v3").to(device)
    attach(refused, capture=False)
    assert not isinstance(refused.forward, CapturedDecode)


def test_a_cpu_must_be_asked() -> None:
    model = make_model("deepseek_v3")
    attach(model)
    assert not isinstance(model.forward, CapturedDecode)


@pytest.mark.usefixtures("by_default")
def test_compiled(device: str) -> None:
    """torch.compile goes past it."""
    model, ids = on(device, make_model("deepseek_v3"), torch.arange(2, 12).view(1, 10))
    expected = model(ids).logits
    attach(model)
    past = model(ids[:, :-1], use_cache=True).past_key_values
    compiled = torch.compile(model, backend="eager")
    step = {"past_key_values": past, "position_ids": torch.tensor([[9]], device=ids.device)}
    actual = compiled(input_ids=ids[:, -1:], use_cache=True, **step).logits
    assert torch.allclose(actual[:, -1], expected[:, -1], atol=1e-4)
    assert captured(model).recordings == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing is recorded elsewhere")
def test_what_waits_for_the_host_is_told_and_runs_on_cuda() -> None:
    """A step that reads numbers back cannot be captured: a warning, and the same tokens."""
    model, ids = on("cuda", make_model("deepseek_v3"), torch.arange(2, 12).view(1, 10))
    alone = generate(model, ids, max_new_tokens=6)
    attach(model)
    forward = model.lm_head.forward

    def asking(hidden: Tensor) -> Tensor:
        assert float(hidden.sum()) == float(hidden.sum())
        return forward(hidden)

    model.lm_head.forward = asking
    with pytest.warns(UserWarning, match="cannot be captured"):
        ours = generate(model, ids, max_new_tokens=6)
    assert torch.equal(ours.sequences, alone.sequences)
    assert torch.equal(generate(model, ids, max_new_tokens=6).sequences, alone.sequences)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing is recorded elsewhere")
def test_a_capture_that_fails_once_is_repeated_on_cuda(recwarn: pytest.WarningsRecorder) -> None:
    """The first capture reads a number back: the second serves, on the stream that was current."""
    model, ids = on("cuda", make_model("deepseek_v3"), torch.arange(2, 12).view(1, 10))
    alone = generate(model, ids, max_new_tokens=6)
    attach(model)
    failed: list[bool] = []
    forward, stream = model.lm_head.forward, torch.cuda.current_stream()

    def asking(hidden: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing() and not failed:
            failed.append(True)
            hidden.sum().item()
        return forward(hidden)

    model.lm_head.forward = asking
    for _ in range(2):
        ours = generate(model, ids, max_new_tokens=6)
        assert torch.equal(ours.sequences, alone.sequences)
    assert failed and captured(model).recordable and captured(model).recorded[1].graph is not None
    assert not [each for each in recwarn.list if "cannot be captured" in str(each.message)]
    assert torch.cuda.current_stream() == stream


def test_what_cannot_be_recorded_is_told() -> None:
    bare = make_model("deepseek_v3").model
    with pytest.raises(ConfigError, match="capture needs a model with a language head"):
        attach(bare, capture=True)
    assert not hasattr(bare.layers[0].self_attn, "openmla")
    mixed = make_model("kimi_linear")
    attach(mixed, capture=True)
    with pytest.raises(UnsupportedError, match="other layers keep a state"):
        generate(mixed, torch.arange(2, 12).view(1, 10), max_new_tokens=4)
