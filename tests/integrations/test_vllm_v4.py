"""V4 in vLLM: its caches and a step of its scheduler, against attention written out.

vLLM's types are stood in for; tests/vllm/test_v4.py runs the real engine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

import openmla
from openmla.errors import ConfigError

D, DI, HI, H, K, WINDOW, BLOCK = 512, 128, 8, 4, 6, 128, 256
CUSTOM, OTHER = object(), object()
PREFIXES = {"window": "attn.swa_cache", "entries": "attn", "keys": "attn.indexer.k_cache"}
M = TypeVar("M")


class AttentionLayerBase: ...


class Backend:
    """Of one of vLLM's caches."""

    @staticmethod
    def get_builder_cls() -> type:
        return dict

    @staticmethod
    def get_name() -> str:
        return "THEIRS"


class Cache(nn.Module, AttentionLayerBase):
    def __init__(self, name: str, rows: int, width: int, blocks: int) -> None:
        super().__init__()
        self.prefix = PREFIXES[name]
        stride = -(-rows * width // 576) * 576  # vLLM's pages are padded
        pages = torch.zeros(blocks, stride, dtype=torch.uint8)
        self.kv_cache = pages[:, : rows * width].view(blocks, rows, width)

    def get_attn_backend(self) -> type:
        return Backend


class Attention(nn.Module, AttentionLayerBase):
    """vLLM's DeepseekV4Attention, as far as it is looked at."""

    def __init__(self, ratio: int, blocks: int = 60) -> None:
        super().__init__()
        self.prefix, self.compress_ratio, self.window_size = PREFIXES["entries"], ratio, WINDOW
        self.head_dim, self.scale = D, D**-0.5
        self.indexer: Any = None
        self.attn_sink = nn.Parameter(torch.randn(H), requires_grad=False)
        self.topk_indices_buffer = torch.full((1024, K), -7, dtype=torch.int32)
        self.swa_cache_layer = Cache("window", 64, 584, blocks)
        if ratio > 1:
            self.kv_cache = Cache("entries", BLOCK // ratio, 584, blocks).kv_cache
        if ratio == 4:
            self.indexer = nn.Module()
            self.indexer.k_cache = Cache("keys", BLOCK // 4, 132, blocks)
            self.indexer.topk_indices_buffer = self.topk_indices_buffer
            self.indexer.indexer_op = nn.Identity()

    def get_attn_backend(self) -> type:
        return Backend

    def forward_mqa(self, *args: Any) -> None:
        raise AssertionError("vLLM's own attention was called")


class Model(nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        vllm_config.made += 1
        self.layers = nn.ModuleList(Attention(ratio) for ratio in vllm_config.ratios)


@dataclass
class CompressorMetadata:
    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    token_to_req_indices: Tensor | None = None
    num_decode_tokens: int | None = None
    c128_boundary: bool | None = None


class AttentionMetadataBuilder(Generic[M]):
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec = kv_cache_spec


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where the pass and the platform can be set."""
    here = SimpleNamespace(steps=None, device="cpu")
    platform = SimpleNamespace(is_cpu=lambda: here.device == "cpu", device_type="cuda")
    base = "vllm.models.deepseek_v4"
    layers, v1 = "vllm.model_executor.layers", "vllm.v1.attention"
    names: dict[str, dict[str, Any]] = {
        "vllm.forward_context": {
            "get_forward_context": lambda: SimpleNamespace(attn_metadata=here.steps)
        },
        f"{layers}.attention_layer_base": {"AttentionLayerBase": AttentionLayerBase},
        "vllm.models": {"deepseek_v4": SimpleNamespace(DeepseekV4ForCausalLM=Model)},
        f"{base}.attention": {"DeepseekV4Attention": Attention},
        f"{base}.compressor": {"CompressorMetadata": CompressorMetadata},
        "vllm.platforms": {"current_platform": platform},
        f"{v1}.backend": {"AttentionMetadataBuilder": AttentionMetadataBuilder},
        f"{v1}.backends.registry": {"AttentionBackendEnum": SimpleNamespace(CUSTOM=CUSTOM)},
    }
    for name, attributes in names.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "openmla.integrations.vllm.v4", raising=False)
    here.v4 = import_module("openmla.integrations.vllm.v4")
    monkeypatch.delitem(sys.modules, "openmla.integrations.vllm.v4")
    return here


def config(*ratios: int, chosen: bool) -> Any:
    backend = CUSTOM if chosen else OTHER
    attention = SimpleNamespace(backend=backend)
    return SimpleNamespace(attention_config=attention, ratios=ratios, made=0, additional_config={})


def test_not_chosen_it_is_vllms_own(vllm: Any) -> None:
    model = vllm.v4.DeepseekV4ForCausalLM(vllm_config=config(1, 4, 128, chosen=False))
    assert isinstance(model, Model)
    layer: Any
    for layer in model.layers:
        shadowed = {"forward_mqa", "get_attn_backend"} & vars(layer).keys()
        assert not shadowed and layer.get_attn_backend() is Backend
        assert layer.swa_cache_layer.get_attn_backend() is Backend
        assert layer.indexer is None or isinstance(layer.indexer.indexer_op, nn.Identity)


def test_chosen_its_layers_and_caches_are_ours(vllm: Any) -> None:
    model = vllm.v4.DeepseekV4ForCausalLM(vllm_config=config(1, 4, 128, chosen=True))
    found: list[Any] = [each for each in model.modules() if isinstance(each, AttentionLayerBase)]
    backends = {module.get_attn_backend() for module in found}
    assert len(found) == 7 and len(backends) == 1  # one class: vLLM groups caches by it
    (backend,) = backends
    assert issubclass(backend, Backend) and backend.get_name() == "THEIRS"
    assert backend.get_builder_cls() is vllm.v4.Builder and Backend.get_builder_cls() is dict
    assert isinstance(model.layers[1].indexer.indexer_op, vllm.v4.Chooser)


@pytest.mark.parametrize("name", ["query_dtype", "prefill_dtype"])
def test_fp8_is_refused_before_a_model_is_made(vllm: Any, name: str) -> None:
    asked = config(1, chosen=True)
    asked.additional_config = {"openmla": {name: "fp8"}}
    with pytest.raises(ConfigError, match=f"openmla: {name} must not be given for DeepSeek V4."):
        vllm.v4.DeepseekV4ForCausalLM(vllm_config=asked)
    assert asked.made == 0


def test_elsewhere_than_on_a_cpu_it_is_refused_before_a_model_is_made(vllm: Any) -> None:
    vllm.device = "cuda"
    asked = config(1, chosen=True)
    with pytest.raises(ConfigError, match=r"must be on a CPU .*, got cuda; leave the option out"):
        vllm.v4.DeepseekV4ForCausalLM(vllm_config=asked)
    assert asked.made == 0
    vllm.v4.DeepseekV4ForCausalLM(vllm_config=config(1, chosen=False))


class Requests:
    """Tables of some requests, each cache's in another order; every value that was ever written."""

    def __init__(self, lens: list[int], ratio: int, seed: int = 0) -> None:
        self.lens, self.ratio = lens, ratio
        draw = torch.Generator().manual_seed(seed)
        self.tables = {}
        for name, tokens in (("window", 64), ("entries", BLOCK), ("keys", BLOCK)):
            columns = max(-(-n // tokens) for n in lens) + 1
            blocks = torch.randperm(59, generator=draw)[: columns * len(lens)] + 1
            self.tables[name] = blocks.view(len(lens), columns).int()
        self.rows = [torch.randn(n, D, generator=draw).bfloat16().float() for n in lens]
        self.pooled = [torch.randn(n // ratio, D, generator=draw).bfloat16() for n in lens]
        self.keys = [torch.randn(n // ratio, DI, generator=draw) for n in lens]

    def fill(self, layer: Any) -> None:
        """As vLLM's kernels would: values as the formats keep them."""
        stored = [("window", layer.swa_cache_layer.kv_cache, self.rows, "fp8_dsv4")]
        if self.ratio > 1:
            stored.append(("entries", layer.kv_cache, self.pooled, "fp8_dsv4"))
        if layer.indexer is not None:
            stored.append(("keys", layer.indexer.k_cache.kv_cache, self.keys, "index_fp8"))
        one = torch.ones(())
        for name, cache, values, format in stored:
            layout, BS = openmla.FORMATS[format], cache.shape[1]
            for b, rows in enumerate(values):
                at = torch.arange(len(rows))
                slots = self.tables[name][b, at // BS].long() * BS + at % BS
                layout.write(cache, slots, rows, one)
                wide = rows.shape[1]
                rows.copy_(layout.read(cache, slots, one, torch.float32, wide).to(rows.dtype))

    def common(self, name: str, new: list[int], padding: int = 0) -> Any:
        """vLLM's CommonAttentionMetadata of a step that ends where the requests do."""
        starts = torch.tensor([0, *new]).cumsum(0).int()
        table, slots = self.tables[name], []
        tokens = 64 if name == "window" else BLOCK
        for b, (n, S) in enumerate(zip(new, self.lens, strict=True)):
            at = torch.arange(S - n, S)
            slots.append(table[b, at // tokens].long() * tokens + at % tokens)
        slots.append(torch.full((padding,), -1))
        return SimpleNamespace(
            num_reqs=len(new), num_actual_tokens=sum(new) + padding, query_start_loc=starts,
            seq_lens=torch.tensor(self.lens, dtype=torch.int32), max_seq_len=max(self.lens),
            block_table_tensor=table, slot_mapping=torch.cat(slots),
        )  # fmt: skip

    def steps(self, v4: Any, new: list[int]) -> dict[str, Any]:
        made = {}
        for name, prefix in PREFIXES.items():
            tokens, ratio = (64, 1) if name == "window" else (BLOCK, self.ratio)
            spec = SimpleNamespace(block_size=tokens, tokens_per_state=ratio)
            made[prefix] = v4.Builder(spec, [prefix], None, None).build(0, self.common(name, new))
        return made


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_a_step_names_the_slots_of_the_entries_it_finishes(vllm: Any, ratio: int) -> None:
    new, padding = [5, 0, 300, 1], 4
    requests = Requests([5, 260, 700, 128], ratio)
    spec = SimpleNamespace(block_size=BLOCK, tokens_per_state=ratio)
    common = requests.common("entries", new, padding)
    step = vllm.v4.Builder(spec, ["attn"], None, None).build(0, common)
    wanted = []
    for b, (n, S) in enumerate(zip(new, requests.lens, strict=True)):
        for p in range(S - n, S):
            entry, BS = p // ratio, BLOCK // ratio
            slot = int(requests.tables["entries"][b, entry // BS]) * BS + entry % BS
            wanted.append((b, slot if (p + 1) % ratio == 0 else -1, (p + 1) // ratio))
    owners, slots, lens = zip(*wanted, strict=True)
    T = len(wanted)
    assert step.token_to_req_indices[:T].tolist() == list(owners)
    assert step.slot_mapping.tolist() == [*slots, *[-1] * padding]
    assert step.row_lens[:T].tolist() == list(lens)
    assert (step.num_prefill_tokens, step.num_decode_tokens) == (T + padding, 0)
    assert step.row_lens.dtype == step.token_to_req_indices.dtype == torch.int32


def attended(layer: Any, requests: Requests, q: Tensor, new: list[int], chosen: Any) -> Tensor:
    """Every token's rows listed, one by one, in float64."""
    outs, t = [], 0
    for b, (n, S) in enumerate(zip(new, requests.lens, strict=True)):
        for p in range(S - n, S):
            rows = [requests.rows[b][max(p - WINDOW + 1, 0) : p + 1]]
            if requests.ratio > 1:
                count = (p + 1) // requests.ratio
                rows.append(requests.pooled[b][chosen(t, b, count)])
            keys = torch.cat([each.double() for each in rows])
            logits = layer.scale * q[t].double() @ keys.mT
            logits = torch.cat([logits, layer.attn_sink[:, None].double()], 1)
            outs.append(logits.softmax(1)[:, :-1] @ keys)
            t += 1
    return torch.stack(outs)


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("new", [[20, 0, 260, 1], [1, 1, 1, 1]], ids=["mixed", "decode"])
def test_attention_is_over_the_window_and_the_entries(
    vllm: Any, ratio: int, new: list[int]
) -> None:
    """Of ratio 4 the entries chosen: there are more than K of them."""
    torch.manual_seed(1)
    requests, layer = Requests([20, 3, 300, 130], ratio), Attention(ratio)
    requests.fill(layer)
    vllm.v4.take_over(nn.ModuleList([layer]))
    vllm.steps = requests.steps(vllm.v4, new)
    T = sum(new)
    q = 3 * torch.randn(T, H, D).bfloat16()
    q_idx, w_idx = torch.randn(T, HI, DI).to(torch.float8_e4m3fn), torch.randn(T, HI)
    if ratio == 4:
        layer.indexer.indexer_op(q, q_idx, None, w_idx)

    def best(t: int, b: int, count: int) -> Tensor:
        if ratio != 4 or count <= K:
            return torch.arange(count)
        scores = (q_idx[t].float() @ requests.keys[b][:count].mT).relu()
        return (w_idx[t] @ scores).topk(K).indices

    positions = torch.cat([torch.arange(S - n, S) for n, S in zip(new, requests.lens, strict=True)])
    output = torch.full((T, H, D), torch.nan).bfloat16()
    layer.forward_mqa(q, q[:, 0], positions, output)
    wanted = attended(layer, requests, q, new, best)
    torch.testing.assert_close(output.double(), wanted, atol=4e-3, rtol=8e-3)


def test_choosing_in_pieces_chooses_the_same(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, layer, new = Requests([20, 300, 130], 4), Attention(4), [20, 200, 1]
    requests.fill(layer)
    vllm.steps = requests.steps(vllm.v4, new)
    torch.manual_seed(2)
    q_idx, w_idx = torch.randn(221, HI, DI).to(torch.float8_e4m3fn), torch.randn(221, HI)
    found = []
    for most in (2**24, 7 * 75, 1):
        monkeypatch.setattr(vllm.v4, "SCORES", most)
        layer.topk_indices_buffer.fill_(-7)
        chosen = vllm.v4.Chooser(layer.indexer)(q_idx, q_idx, None, w_idx)
        assert (chosen[221:] == -7).all()
        found.append(chosen[:221].clone().sort(1).values)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_where_all_entries_can_be_chosen_the_choice_is_not_looked_at(vllm: Any) -> None:
    new, requests, layer = [20, 24, 1], Requests([20, 24, 4 * K + 3], 4), Attention(4)
    requests.fill(layer)
    vllm.v4.take_over(nn.ModuleList([layer]))
    vllm.steps = requests.steps(vllm.v4, new)
    torch.manual_seed(3)
    q, output = 3 * torch.randn(45, H, D).bfloat16(), torch.empty(45, H, D).bfloat16()
    positions = torch.tensor([*range(20), *range(24), 4 * K + 2])
    layer.forward_mqa(q, q[:, 0], positions, output)
    wanted = attended(layer, requests, q, new, lambda t, b, count: torch.arange(count))
    torch.testing.assert_close(output.double(), wanted, atol=4e-3, rtol=8e-3)


def test_while_vllm_measures_memory_nothing_is_read(vllm: Any) -> None:
    layer = Attention(4)
    vllm.v4.take_over(nn.ModuleList([layer]))
    before = layer.topk_indices_buffer.clone()
    assert layer.indexer.indexer_op(None, None, None, None) is layer.topk_indices_buffer
    output = torch.full((3, H, D), torch.nan).bfloat16()
    layer.forward_mqa(output, output, torch.zeros(3).long(), output)
    assert not output.any() and torch.equal(before, layer.topk_indices_buffer)
