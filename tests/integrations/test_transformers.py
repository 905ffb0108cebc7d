"""attach(): the same tokens as the model alone, whatever generate() does with the cache."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from openmla import Plan, make_plan
from openmla.config.families import MODEL_TYPES
from openmla.errors import (
    CacheFullError,
    ConfigError,
    OpenMLAError,
    ShapeError,
    UnsupportedError,
)

transformers = pytest.importorskip("transformers")

from openmla.integrations.transformers import (  # noqa: E402 - transformers may be missing
    SUPPORTED,
    PagedLayer,
    attach,
    attachment_of,
    detach,
)
from tests.integrations.generation import captured, generate, worst_logits  # noqa: E402
from tests.integrations.models import (  # noqa: E402
    IDS,
    MAKERS,
    MODELS,
    OUTSIDE,
    SEEDS,
    SPARSE,
    make_model,
    model_of,
    on,
    padded_prompts,
)
from tools.models_table import TRANSFORMERS, TYPES  # noqa: E402


# by default on a GPU, and some families' own code waits for the host in every step
@pytest.mark.filterwarnings("ignore:attach. the decode step of this model cannot be captured")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", MODELS)
def test_same_tokens(family: str, seed: int, device: str) -> None:
    """64 new tokens for a left-padded batch of five: greedy and beam search."""
    model = make_model(family, seed).to(device)
    ids, mask = on(device, *padded_prompts(seed=seed))
    greedy, beams = generate(model, ids, mask), generate(model, ids, mask, num_beams=3)
    assert attach(model, block_size=4) is model
    modules = attachment_of(model).modules
    assert modules and all(hasattr(module, "kv_b_proj") for module in modules)
    ours = generate(model, ids, mask)
    assert torch.equal(ours.sequences, greedy.sequences) and worst_logits(ours, greedy) < 1e-4
    assert all(isinstance(ours.past_key_values.layers[m.layer_idx], PagedLayer) for m in modules)
    assert torch.equal(generate(model, ids, mask, num_beams=3).sequences, beams.sequences)
    detach(model)
    assert torch.equal(generate(model, ids, mask).sequences, greedy.sequences)


def test_kimi_k25_text_model() -> None:
    """A multimodal wrapper: its text model is attached, its vision tower left alone."""
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25ForConditionalGeneration

    config = transformers.CONFIG_MAPPING["kimi_k25"](
        text_config={**MODELS["deepseek_v3"], **OUTSIDE},
        vision_config={
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
            "pos_emb_time": 1,
        },
        projection_hidden_size=32,
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
        tie_word_embeddings=False,
    )
    model = Kimi_K25ForConditionalGeneration(config).eval().requires_grad_(False)
    ids, mask = padded_prompts()
    ids = ids.clamp(max=80)
    expected = generate(model, ids, mask, max_new_tokens=20).sequences
    assert len(attachment_of(attach(model, block_size=4)).modules) == 3
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert torch.equal(generate(model, ids, mask, max_new_tokens=20).sequences, expected)


def test_one_plan_per_step_and_nothing_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Plan] = []

    def counted(*args: Any, **kwargs: Any) -> Plan:
        made.append(make_plan(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("openmla.integrations.transformers.session.make_plan", counted)
    model = make_model("deepseek_v3")
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    attach(model)
    ids, mask = padded_prompts()
    generate(model, ids, mask, max_new_tokens=6)
    assert len(made) == 6  # a prefill and five decode steps, of three layers each
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    out = generate(model, ids, mask, max_new_tokens=2)
    session = out.past_key_values.layers[0].session
    kept = session.absorbed(model.model.layers[0].self_attn, 0, torch.float32)
    assert kept.kv_b.data_ptr() == before["model.layers.0.self_attn.kv_b_proj.weight"]


def test_cache_calls_move_no_bytes() -> None:
    """Select, repeat and crop change tables only; reset gives everything back."""
    model = make_model("deepseek_v3")
    attach(model, block_size=4, num_blocks=64)
    pool = attachment_of(model).pools[0]
    ids, _ = padded_prompts(B=3)
    with torch.no_grad():
        past = model(ids).past_key_values
        session = past.layers[0].session
        tables = [pool.blocks(request) for request in session.requests]
        past.batch_repeat_interleave(2)
        past.batch_select_indices(torch.tensor([5, 0]))
        assert [pool.blocks(r) for r in session.requests] == [tables[2], tables[0]]
        past.reorder_cache(torch.tensor([1, 1]))
        assert [pool.blocks(r) for r in session.requests] == [tables[0]] * 2
        past.crop(-9)
        assert past.get_seq_length() == 11 and pool.num_free == 64 - 3
        past.crop(8)
        assert past.get_seq_length() == 8 and pool.num_free == 64 - 2
        again = model(ids[:2, 8:], past_key_values=past).logits[0]
        detach(model)
        expected = model(torch.cat([ids[0, :8], ids[0, 8:]])[None]).logits[0, 8:]
        torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)
    past.reset()
    assert pool.num_free == 64


def test_sampling_continuing_and_chunked_prefill(device: str) -> None:
    model = make_model("deepseek_v3").to(device)
    ids, mask = on(device, *padded_prompts())

    def sampled() -> Any:
        torch.manual_seed(7)
        return generate(model, ids, mask, do_sample=True, max_new_tokens=20).sequences

    def continued() -> Any:
        first = generate(model, ids[:1], max_new_tokens=10)
        longer = torch.cat([first.sequences, torch.full((1, 3), 5, device=device)], dim=1)
        return generate(
            model, longer, max_new_tokens=10, past_key_values=first.past_key_values
        ).sequences

    def chunked() -> Any:
        return generate(model, ids[:1], max_new_tokens=10, prefill_chunk_size=6).sequences

    expected = [call() for call in (sampled, continued, chunked)]
    attach(model, block_size=4, workspace=8)
    for call, tokens in zip((sampled, continued, chunked), expected, strict=True):
        assert torch.equal(call(), tokens)


def test_assisted_decoding(device: str) -> None:
    """Drafts are verified several tokens at a time and cut back: crop frees blocks."""
    model, assistant = (
        make_model("deepseek_v3", 0).to(device),
        make_model("deepseek_v3", 1).to(device),
    )
    ids, _ = on(device, *padded_prompts(B=1))
    expected = generate(model, ids, max_new_tokens=30).sequences
    attach(model, block_size=4)
    attach(assistant, block_size=4)
    ours = generate(model, ids, max_new_tokens=30, assistant_model=assistant)
    assert torch.equal(ours.sequences, expected)


def test_prefix_reuse_shares_blocks() -> None:
    """A kept prompt cache, deep-copied per continuation: no byte moves until one writes."""
    model = make_model("deepseek_v3")
    ids, _ = padded_prompts(B=1, S=22)
    endings = [torch.tensor([[3, 4, 5]]), torch.tensor([[9, 8, 7, 6]])]
    expected = [
        generate(model, torch.cat([ids, e], 1), max_new_tokens=9).sequences for e in endings
    ]
    attach(model, block_size=4)
    prefix = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=prefix)
    pool = attachment_of(model).pools[0]
    free = pool.num_free
    copies = [copy.deepcopy(prefix) for _ in endings]
    assert pool.num_free == free  # shared
    for ending, kept, tokens in zip(endings, copies, expected, strict=True):
        whole = torch.cat([ids, ending], dim=1)
        out = generate(model, whole, max_new_tokens=9, past_key_values=kept)
        assert torch.equal(out.sequences, tokens)
    assert prefix.get_seq_length() == 22
    del prefix, copies, kept, out
    gc.collect()
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("side", ["left", "right"])
def test_bare_forward_with_and_without_cache(side: str, device: str) -> None:
    model = make_model("deepseek_v3").to(device)
    ids, mask = on(device, *padded_prompts())
    if side == "right":
        ids, mask = ids.flip(1), mask.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch = {"attention_mask": mask, "position_ids": positions}
    real = mask.bool()
    with torch.no_grad():
        expected = model(ids, **batch, use_cache=False).logits[real]
        attach(model, block_size=4)
        for use_cache in (True, False):
            actual = model(ids, **batch, use_cache=use_cache).logits[real]
            assert (actual - expected).norm() / expected.norm() < 1e-5
        unpadded = model(ids[:1], use_cache=False).logits
        detach(model)
        torch.testing.assert_close(unpadded, model(ids[:1]).logits, rtol=1e-4, atol=1e-4)


def test_token_by_token_after_right_padding() -> None:
    """A bare loop that pads on the right goes on with each row's own length."""
    model = make_model("deepseek_v2")
    ids, mask = (part.flip(1) for part in padded_prompts(B=3))
    new = torch.tensor([[5], [6], [7]])
    longer = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
    where = mask.sum(1, keepdim=True)

    def run() -> Tensor:
        with torch.no_grad():
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            past = model(ids, attention_mask=mask, position_ids=positions).past_key_values
            logits: Tensor = model(
                new, attention_mask=longer, position_ids=where, past_key_values=past
            ).logits
        return logits

    expected = run()
    attach(model, block_size=4)
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)


def test_no_leak_over_a_thousand_requests() -> None:
    model = make_model("deepseek_v2-lite", num_hidden_layers=1)
    attach(model, block_size=4, num_blocks=64)
    pool = attachment_of(model).pools[0]
    for turn in range(200):
        ids = torch.randint(2, 90, (5, 3 + turn % 5))
        out = generate(model, ids, max_new_tokens=2, num_beams=1 + turn % 2)
        assert pool.num_free < pool.num_blocks
        del out
    gc.collect()
    assert pool.num_free == pool.num_blocks == 64 and pool.requests == ()


def test_a_full_pool_says_so_before_any_damage() -> None:
    model = make_model("deepseek_v3")
    ids, _ = padded_prompts(B=2)
    attach(model, block_size=4, num_blocks=12)
    pool = attachment_of(model).pools[0]
    kept = generate(model, ids, max_new_tokens=3)
    used = pool.num_free
    with pytest.raises(CacheFullError, match="needs 5 more blocks, and 0 of 12 are free"):
        generate(model, ids, max_new_tokens=3)
    gc.collect()
    assert pool.num_free == used
    longer = torch.cat([kept.sequences, kept.sequences[:, :1]], dim=1)
    with torch.no_grad():
        model(longer[:, 22:], past_key_values=kept.past_key_values)  # what was there still works


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("kind", ["dense", "sparse", "v4"])
@pytest.mark.parametrize("step", [1, 3])  # a prompt, a decode step
def test_ctrl_c_gives_blocks_back(kind: str, step: int, capture: bool) -> None:
    """Again and again, with a pool that has room for one batch; the cache it hit is gone."""
    model, passes = MAKERS[kind](), 0
    model = attach(model, num_blocks=6 if kind == "v4" else 2, capture=capture)
    expected = generate(model, IDS, max_new_tokens=4).sequences

    def interrupt(*args: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == step:
            raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    kept = []  # as an interactive shell keeps the last traceback
    for _ in range(3):
        passes = 0
        with pytest.raises(KeyboardInterrupt) as told:
            generate(model, IDS, max_new_tokens=4)
        kept.append(told)
    handle.remove()
    assert torch.equal(generate(model, IDS, max_new_tokens=4).sequences, expected)
    pool = attachment_of(model).pools[0]
    assert pool.num_free == pool.num_blocks


class Largest(TorchDispatchMode):
    """Remembers the largest tensor any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, Tensor):
                self.num_bytes = max(self.num_bytes, made.numel() * made.element_size())
        return out


def test_no_square_mask_at_16k() -> None:
    """With padding at 16k a bool mask would be 256 MiB; nothing here comes near."""
    S = 16384
    model = make_model("deepseek_v2-lite", num_hidden_layers=1, max_position_embeddings=S + 8)
    ids = torch.randint(2, 90, (1, S))
    mask = torch.ones_like(ids)
    mask[0, :100] = 0
    attach(model)
    with torch.no_grad(), Largest() as seen:
        model(ids, attention_mask=mask, logits_to_keep=1, use_cache=True)
    assert seen.num_bytes < 64 << 20


class Float8(nn.Linear):
    """What a block-quantised checkpoint leaves in the place of kv_b_proj."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        scale = plain.weight.abs().max() / 448
        rows, columns = (-(-size // 128) for size in plain.weight.shape)
        codes = (plain.weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("weight_scale_inv", scale.expand(rows, columns).clone())

    def forward(self, hidden: Tensor) -> Tensor:
        scale = self.weight_scale_inv
        assert isinstance(scale, Tensor)
        return hidden @ (self.weight.float() * scale[0, 0]).T


def test_fp8_linears() -> None:
    model = make_model("deepseek_v3")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = Float8(layer.self_attn.kv_b_proj)
    ids, mask = padded_prompts()
    expected = generate(model, ids, mask, max_new_tokens=20)
    attach(model, block_size=4)
    ours = generate(model, ids, mask, max_new_tokens=20)
    assert torch.equal(ours.sequences, expected.sequences) and worst_logits(ours, expected) < 1e-4


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_lossy_cache_formats_run(format: str) -> None:
    model = make_model("deepseek_v3")
    ids, mask = padded_prompts()
    expected = generate(model, ids, mask, max_new_tokens=4)
    attach(model, cache_format=format)
    ours = generate(model, ids, mask, max_new_tokens=4)
    first = (ours.logits[0] - expected.logits[0]).norm() / expected.logits[0].norm()
    assert first < (0.02 if format == "bf16" else 0.3)


def test_pipeline() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(97)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w1"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="w0", padding_side="left"
    )
    model = make_model("deepseek_v3")
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["w5 w6 w7", "w8 w9 w10 w11 w12"]
    options = {"max_new_tokens": 8, "do_sample": False, "batch_size": 2}
    expected = pipe(prompts, **options)
    attach(model)
    assert pipe(prompts, **options) == expected


def test_packed_sequences_without_a_cache() -> None:
    """Positions that start over begin a new sequence, as transformers reads them."""
    model = make_model("deepseek_v3")
    ids, _ = padded_prompts(B=1)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with torch.no_grad():
        expected = model(ids, position_ids=positions, use_cache=False).logits
        attach(model, block_size=4)
        actual = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grad", [False, True])
def test_errors_leave_the_cache_usable(grad: bool) -> None:
    """A refused step changes nothing: the same step, made possible, gives the right answer."""
    with torch.inference_mode(False), torch.no_grad():
        model = make_model("deepseek_v3")
        ids, _ = padded_prompts(B=2)
        more = ids[:1, :4]
        expected = model(more, past_key_values=model(ids[:1]).past_key_values).logits
        attach(model, block_size=4, num_blocks=8)
        past = model(ids[:1]).past_key_values
        other = model(ids[:1, :12]).past_key_values
        if grad:
            model.model.embed_tokens.weight.requires_grad_()
            with torch.enable_grad(), pytest.raises(UnsupportedError, match="no backward pass"):
                model(more, past_key_values=past)
        else:
            with pytest.raises(CacheFullError):
                model(more, past_key_values=past)
            with pytest.raises(ShapeError, match="must have as many rows as the cache, 1, got 2"):
                model(ids[:, :4], past_key_values=past)
        assert past.get_seq_length() == 20
        other.reset()
        actual = model(more, past_key_values=past).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_dropout_is_refused() -> None:
    model = make_model("deepseek_v3", attention_dropout=0.5).train()
    attach(model)
    ids, _ = padded_prompts(B=1)
    with (
        torch.no_grad(),
        pytest.raises(
            UnsupportedError, match=r"attention dropout must be 0, got 0.5. Call model.eval"
        ),
    ):
        model(ids)
    with torch.no_grad():
        assert model.eval()(ids).logits.isfinite().all()


@pytest.mark.parametrize("kind", ["dense", "sparse", "v4"])
def test_bidirectional_attention_is_refused(kind: str) -> None:
    """In all the ways it can be asked for, before attach() and after it; nothing is written."""
    model = MAKERS[kind]()
    module = model.model.layers[1].self_attn
    model.config.is_causal = False
    with pytest.raises(ConfigError, match="config: is_causal must be True"):
        attach(model)
    del model.config.is_causal
    module.is_causal = False
    with pytest.raises(UnsupportedError, match="is_causal must be True in every attention module"):
        attach(model)
    module.is_causal = True
    attach(model)
    past = model(IDS).past_key_values
    refused = pytest.raises(UnsupportedError, match="attach: is_causal must be True, got False")
    for options in ({}, {"use_cache": False}, {"past_key_values": past}):
        with refused:
            model(IDS, is_causal=False, **options)
        model.config.is_causal = False
        with refused:
            model(IDS, **options)
        model.config.is_causal = True
    assert model(IDS[:, :1], past_key_values=past).logits.isfinite().all()
    module.is_causal = False
    with refused:  # config and call win over the module, as in transformers
        del model.config.is_causal
        model(IDS)


@pytest.mark.parametrize("family", [*MODELS, *SPARSE])
def test_every_family_says_that_a_call_is_not_causal(family: str) -> None:
    model = attach(model_of(family))
    with pytest.raises(UnsupportedError, match="attach: is_causal must be True, got False"):
        model(IDS, is_causal=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model.config, "is_causal", False), "is_causal must be True, got F"),
        (
            lambda model: setattr(model.model.layers[2].self_attn, "is_causal", False),
            "is_causal must be True, got F",
        ),
        (
            lambda model: setattr(model.model.layers[2].self_attn, "scaling", 0.5),
            "softmax scale of an attention module must be .* got 0.5",
        ),
    ],
)
def test_a_captured_step_notices_other_attention(change: Any, message: str, device: str) -> None:
    """What a graph would not look at again; the step before was replayed."""
    model = attach(make_model("deepseek_v3").to(device), capture=True)
    (ids,) = on(device, IDS)
    past = model(ids, use_cache=True).past_key_values
    step = {"past_key_values": past, "use_cache": True, "logits_to_keep": 1}
    for place in (40, 41):
        positions = torch.full((2, 1), place, device=device)
        model(ids[:, :1], position_ids=positions, **step)
    assert captured(model).recordings == 1
    change(model)
    captured(model)._step = lambda *args: pytest.fail("a recorded step")  # type: ignore[method-assign]
    with pytest.raises(OpenMLAError, match=message):
        model(ids[:, :1], position_ids=positions + 1, **step)


@pytest.mark.parametrize("use_cache", [False, True])
def test_unknown_attention_keywords_are_named(use_cache: bool) -> None:
    model = attach(make_model("deepseek_v3"))
    unknown: dict[str, Any] = {
        "softcap": 30.0, "sliding_window": 8, "position_bias": torch.zeros(1, 4, 40, 40),
        "cu_seq_lens_q": torch.tensor([0, 20, 40]), "anything": 1,
    }  # fmt: skip
    for name, value in unknown.items():
        with pytest.raises(UnsupportedError, match=f"attention keyword {name} is not supported"):
            model(IDS, use_cache=use_cache, **{name: value})
        model(IDS, use_cache=use_cache, **{name: None}, num_items_in_batch=torch.tensor(3))
    with pytest.raises(UnsupportedError, match="s_aux"):
        model(IDS, s_aux=torch.zeros(4), use_cache=False)


@pytest.mark.parametrize("kind", ["dense", "sparse", "v4"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_softmax_scale_changed_after_attach_is_refused(kind: str, use_cache: bool) -> None:
    model = attach(MAKERS[kind]())
    module = model.model.layers[1].self_attn
    module.scaling *= 2
    with pytest.raises(ConfigError, match="softmax scale of an attention module must be "):
        model(IDS, use_cache=use_cache)
    module.scaling /= 2
    assert model(IDS, use_cache=use_cache).logits.isfinite().all()


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", ["dense", "sparse", "v4"])
def test_a_cache_of_an_attached_model_is_refused_by_a_plain_one(kind: str, layers: int) -> None:
    few = {} if layers == 3 else {"num_hidden_layers": 1}
    if few and kind == "v4":
        few["layer_types"] = ["compressed_sparse_attention"]  # type: ignore[assignment]
    plain, model = MAKERS[kind](**few), attach(MAKERS[kind](**few))
    past = model(IDS).past_key_values
    for ids in (IDS[:, :1], IDS):
        with pytest.raises(ConfigError, match="this cache belongs to an attached model, but it"):
            plain(ids, past_key_values=past)
    assert past.get_seq_length() == 40
    ours = model(IDS[:, :1], past_key_values=past).logits
    expected = plain(IDS[:, :1], past_key_values=plain(IDS).past_key_values).logits
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "sparse", "v4"])
@pytest.mark.parametrize("capture", [False, True])
def test_a_model_may_change_its_dtype_while_no_cache_lives(kind: str, capture: bool) -> None:
    model = attach(MAKERS[kind](), capture=capture)
    before = generate(model, IDS, max_new_tokens=3).sequences
    with torch.no_grad():
        past = model(IDS).past_key_values
        with pytest.raises(ConfigError, match="Delete every past_key_values made before"):
            model.bfloat16()(IDS)
        with pytest.raises(ConfigError, match="Delete every past_key_values made before"):
            model(IDS[:, :1], past_key_values=past)
        del past
        changed = model(IDS, use_cache=True)
        fresh = attach(MAKERS[kind]().bfloat16())(IDS, use_cache=True)
    torch.testing.assert_close(changed.logits, fresh.logits)
    changed.past_key_values.reset()
    cache = attachment_of(model).caches[0]
    assert (cache.latent or cache.window).format == "bf16"  # type: ignore[union-attr]
    model.float().load_state_dict(MAKERS[kind]().state_dict())
    assert torch.equal(generate(model, IDS, max_new_tokens=3).sequences, before)


def test_a_cache_of_an_attached_model_cannot_be_pickled(tmp_path: Path) -> None:
    model = attach(make_model("deepseek_v3"))
    past = model(IDS).past_key_values
    with pytest.raises(
        UnsupportedError, match="cannot be pickled, because its rows are in the model's bl"
    ):
        pickle.dumps(past)
    with pytest.raises(UnsupportedError, match="Save the tokens and run them again"):
        torch.save(past, tmp_path / "cache.pt")
    assert copy.deepcopy(past).get_seq_length() == 40


@pytest.mark.parametrize("kind", ["dense", "sparse", "v4"])
def test_square_masks_are_named(kind: str) -> None:
    model = attach(MAKERS[kind]())
    square = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
    with pytest.raises(UnsupportedError, match=r"must be \[batch, columns\], got \(2, 1, 40, 40\)"):
        model(IDS, attention_mask=square)


def test_crop_after_right_padding_drops_columns_not_tokens() -> None:
    model = make_model("deepseek_v3")
    ids, mask = (part.flip(1) for part in padded_prompts(B=3))
    new = torch.tensor([[5], [6], [7]])
    kept = mask[:, :16]

    def run() -> Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            past = model(ids, attention_mask=mask, position_ids=positions).past_key_values
            past.crop(-4)
            logits: Tensor = model(
                new,
                attention_mask=torch.cat([kept, torch.ones_like(new)], dim=1),
                position_ids=kept.sum(1, keepdim=True),
                past_key_values=past,
            ).logits
        return logits

    expected = run()
    attach(model, block_size=4)
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)


def test_chunked_prefill_of_a_padded_batch(device: str) -> None:
    model = make_model("deepseek_v3").to(device)
    ids, mask = on(device, *padded_prompts())
    options: dict[str, Any] = {"max_new_tokens": 8, "prefill_chunk_size": 6}
    expected = generate(model, ids, mask, **options).sequences
    attach(model, block_size=4)
    assert torch.equal(generate(model, ids, mask, **options).sequences, expected)
    with torch.no_grad():
        kept = model(ids[:1], logits_to_keep=torch.tensor([3, 5])).logits
    assert kept.shape[1] == 2


def test_quantised_weights_are_decoded_anew_per_generation() -> None:
    """An adapter that changes between two generations is seen."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.factor = nn.Parameter(torch.ones(()), requires_grad=False)

        def forward(self, hidden: Tensor) -> Tensor:
            out: Tensor = self.base(hidden) * self.factor
            return out

    model = make_model("deepseek_v3")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = Adapted(layer.self_attn.kv_b_proj)
    ids, mask = padded_prompts()
    expected = []
    for attached in (False, True):
        if attached:
            attach(model, block_size=4)
        for factor in (1.0, -0.5):
            for layer in model.model.layers:
                layer.self_attn.kv_b_proj.factor.fill_(factor)
            tokens = generate(model, ids, mask, max_new_tokens=10).sequences
            expected.append(tokens)
    assert torch.equal(expected[0], expected[2]) and torch.equal(expected[1], expected[3])
    assert not torch.equal(expected[0], expected[1])


def test_every_mla_family_is_supported_or_refused_by_name() -> None:
    """A new transformers must not bring an MLA model nobody has looked at."""
    root = Path(transformers.__file__).parent / "models"
    found = {
        path.parent.name
        for path in root.glob("*/modeling_*.py")
        if "kv_lora_rank" in path.read_text(encoding="utf-8")
    }
    listed = {name for name, model in TYPES.items() if TRANSFORMERS in model.where}
    assert set(TYPES) == set(MODEL_TYPES) and set(SUPPORTED) <= listed
    listed = {name.removesuffix("_text") for name in listed} - {"deepseek_v4"}  # no kv_lora_rank
    assert found <= listed, found - listed
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23):
        assert found == listed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_format": "fp4"}, "cache: format 'fp4' is not known"),
        ({"index_format": "fp4"}, "cache: format 'fp4' is not known"),
        ({"num_blocks": 0}, "num_blocks must be"),
        ({"backend": "abacus"}, "attach: backend 'abacus' is not known"),
        ({"backend": {"mqa_page": "sdpa"}}, "attach: op 'mqa_page' is not known. Did you mean"),
        ({"backend": 3}, "attach: backend must be a name, or a dict of names .*, got 3"),
        ({"workspace": 3}, "attach: workspace must be at least 1 block of 64 rows, got 3"),
    ],
)
@pytest.mark.parametrize("capture", [None, True])
def test_a_refused_model_is_as_it_was(options: Any, message: str, capture: bool | None) -> None:
    model = make_model("deepseek_v3")
    configs = [id(module.config) for module in model.modules() if hasattr(module, "config")]
    with pytest.raises(OpenMLAError, match=message):
        attach(model, capture=capture, **options)
    assert "forward" not in vars(model) and model.config._attn_implementation != "openmla"
    assert configs == [id(m.config) for m in model.modules() if hasattr(m, "config")]
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks
        assert not hasattr(module, "openmla")


def test_a_gate_that_transformers_does_not_apply_is_refused() -> None:
    """Kimi K3 has the model type of Kimi-Linear, whose class has no output gate."""
    model = make_model("kimi_linear", mla_use_output_gate=True)
    with pytest.raises(UnsupportedError, match="output gate 'element' is not supported: the kimi_"):
        attach(model)


def test_a_backend_per_op() -> None:
    """What attach() was given is its own: the caller's dict may change."""
    model, asked = make_model("deepseek_v3"), {"mqa_paged": "reference", "mha_ragged": "sdpa"}
    attach(model, backend=asked)
    asked.clear()
    ids, _ = padded_prompts(B=1)
    with torch.no_grad():
        past = model(ids).past_key_values
        for tokens, line in (
            (40, "mha_ragged   sdpa (asked for)"),
            (1, "mqa_paged    reference (asked for)"),  # sdpa, by itself
        ):
            model(ids[:, :1].expand(1, tokens), past_key_values=past)
            assert line in attachment_of(model).explain()


def test_refusals() -> None:
    model = make_model("deepseek_v3")
    with pytest.raises(ConfigError, match="attach: the model is not attached"):
        detach(model)
    ids, mask = padded_prompts(B=2)
    with torch.no_grad():
        filled = model(ids).past_key_values
    attach(model)
    with pytest.raises(ConfigError, match="attach: the model is already attached"):
        attach(model)
    with torch.no_grad():
        with pytest.raises(ConfigError, match="this cache has 20 tokens from before attach"):
            model(ids[:, :1], past_key_values=filled)
        past = model(ids).past_key_values
        with pytest.raises(ShapeError, match="must have as many rows as the cache, 2, got 1"):
            model(ids[:1], past_key_values=past)
        padded = model(ids, attention_mask=mask).past_key_values
        with pytest.raises(ShapeError, match="must be 0: the column was masked"):
            model(ids[:, :1], attention_mask=mask.new_ones(2, 21), past_key_values=padded)
        with pytest.raises(ShapeError, match=r"attention_mask must be \[2, 21\], as 20 columns"):
            model(ids[:, :1], attention_mask=mask.new_ones(2, 19), past_key_values=past)
    for cached in (True, False):
        with pytest.raises(
            ShapeError, match=r"generate\(\) needs prompts that are padded on the left"
        ):
            generate(model, ids.flip(1), mask.flip(1), use_cache=cached)
        with torch.no_grad():  # who does not generate may pad anywhere
            assert model.model(ids.flip(1), attention_mask=mask.flip(1)).past_key_values is not None
    with pytest.raises(UnsupportedError, match="caches of Static"):
        generate(model, ids, max_new_tokens=2, cache_implementation="static")
    square = torch.zeros(1, 1, 20, 20)
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedError, match="masks per query are not supported"),
    ):
        model(ids[:1], attention_mask=square)
    model.config._attn_implementation = "sdpa"
    with (
        torch.no_grad(),
        pytest.raises(ConfigError, match="attention implementation was set to 'sdpa' after"),
    ):
        model(ids)
    model.config._attn_implementation = "openmla"
    with (
        torch.no_grad(),
        pytest.raises(ConfigError, match="needs bf16 on cpu, and its caches are fp32 on cpu"),
    ):
        model.bfloat16()(ids)
    model.float()
    detach(model)
    with torch.no_grad(), pytest.raises(ConfigError, match="this cache was made before detach"):
        model(ids[:, :1], past_key_values=past)
    model.config.model_type = "deepseek_v4"
    with pytest.raises(UnsupportedError, match="has no deepseek_v4 attention modules"):
        attach(model)
    model.config.model_type = "llama"
    with pytest.raises(UnsupportedError, match="model type 'llama' is not supported"):
        attach(model)
