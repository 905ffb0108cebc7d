"""V4 in vLLM: its caches and a step of its scheduler, against attention written out.

vLLM's types are stood in for; tests/vllm/test_v4.py runs the real engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

import openmla
from openmla.errors import ConfigError, OpenMLAError

D, DI, HI, H, K, WINDOW, BLOCK = 512, 128, 8, 4, 6, 128, 256
PADDED = 6  # heads of queries and outputs, as vLLM pads them on CUDA
MAX_LEN, R = 1024, 64
CUSTOM, OTHER, ALWAYS = object(), object(), object()
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
        self.head_dim, self.scale, self.n_local_heads = D, D**-0.5, H
        self.rope_head_dim, self.eps, self.n_local_groups = R, 1e-6, 2
        self.indexer: Any = None
        self.compressor: Any = None
        self.wo_a: Any = None
        self.rotary_emb: Any = None
        sinks = torch.cat([torch.randn(H), torch.full((PADDED - H,), -torch.inf)])
        self.attn_sink = nn.Parameter(sinks, requires_grad=False)
        self.topk_indices_buffer = torch.full((1024, K), -7, dtype=torch.int32)
        self.swa_cache_layer = Cache("window", 64, 584, blocks)
        if ratio > 1:
            self.kv_cache = Cache("entries", BLOCK // ratio, 584, blocks).kv_cache
            self.compressor = Compressor(ratio)
        if ratio == 4:
            self.indexer = nn.Module()
            self.indexer.use_fp4_kv = False
            self.indexer.k_cache = Cache("keys", BLOCK // 4, 132, blocks)
            self.indexer.topk_indices_buffer = self.topk_indices_buffer
            self.indexer.indexer_op = nn.Identity()

    def get_attn_backend(self) -> type:
        return Backend

    def forward_mqa(self, *args: Any) -> None:
        raise AssertionError("vLLM's own attention was called")

    def _fused_qnorm_rope_kv_insert(self, *args: Any) -> Tensor:
        raise AssertionError("vLLM's compiled op was called")

    def _o_proj(self, o: Tensor, positions: Tensor) -> Tensor:
        weight = self.wo_a.weight.view(self.n_local_groups, -1, H * D // self.n_local_groups)
        grouped = o.reshape(len(o), self.n_local_groups, -1)
        return torch.einsum("tgk,gnk->tgn", grouped, weight).flatten(1)


class Compressor(nn.Module):
    """vLLM's DeepseekCompressor, as far as it is looked at."""

    def __init__(self, ratio: int) -> None:
        super().__init__()
        self.compress_ratio, self.k_cache_prefix = ratio, PREFIXES["entries"]
        self.head_dim, self.rope_head_dim, self.overlap, self.rms_norm_eps = D, R, ratio == 4, 1e-6
        self._quant_block, self._token_stride, self._scale_dim = 64, 576, 8
        self.norm = nn.LayerNorm(D)
        self._static_forward_context = {self.k_cache_prefix: SimpleNamespace(kv_cache="pages")}

    def _compress_norm_rope_store(self, *args: Any) -> None:
        raise AssertionError("vLLM's CuTe DSL kernel was called")


class Model(nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        vllm_config.made += 1
        vllm_config.seen = vllm_config.look()
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
        self.kv_cache_spec, self.vllm_config, self.device = kv_cache_spec, vllm_config, device


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the forward pass, the platform, and what is installed."""
    here = SimpleNamespace(
        steps=None, device="cpu", capability=(9, 0), breaks=[], deep_gemm=False, registered=0,
        pooled=[], installed=[],
    )  # fmt: skip
    platform = SimpleNamespace(
        is_cpu=lambda: here.device == "cpu",
        is_cuda=lambda: here.device == "cuda",
        get_device_capability=lambda: here.capability,
        device_type="xpu",
    )

    def eager_break_during_capture(function: Callable[..., None]) -> Callable[..., None]:
        def called(*tensors: Tensor) -> None:
            here.breaks.append(function.__name__)
            function(*tensors)

        return called

    def register() -> None:
        here.registered += 1

    here.pooling = SimpleNamespace(
        compress_norm_rope_store_triton=lambda **given: here.pooled.append(given),
        mqa_logits_use_mx_scales=lambda: True,
    )
    here.select = lambda vllm_config: None
    here.nvidia = SimpleNamespace(_select_dsv4_attn_cls=here.select)
    base, nvidia = "vllm.models.deepseek_v4", "vllm.models.deepseek_v4.nvidia"
    layers, v1 = "vllm.model_executor.layers", "vllm.v1.attention"
    names: dict[str, dict[str, Any]] = {
        "vllm.compilation.breakable_cudagraph": {
            "eager_break_during_capture": eager_break_during_capture
        },
        "vllm.forward_context": {
            "get_forward_context": lambda: SimpleNamespace(attn_metadata=here.steps)
        },
        f"{layers}.attention_layer_base": {"AttentionLayerBase": AttentionLayerBase},
        "vllm.models": {"deepseek_v4": SimpleNamespace(DeepseekV4ForCausalLM=Model)},
        f"{base}.attention": {"DeepseekV4Attention": Attention},
        f"{base}.compressor": {"CompressorMetadata": CompressorMetadata},
        f"{base}.common.ops": {"fused_compress_quant_cache": here.pooling},
        nvidia: {"model": here.nvidia},
        f"{nvidia}.flashmla": {"DeepseekV4FlashMLAAttention": Attention},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils.deep_gemm": {"is_deep_gemm_supported": lambda: here.deep_gemm},
        f"{v1}.backend": {
            "AttentionMetadataBuilder": AttentionMetadataBuilder,
            "AttentionCGSupport": SimpleNamespace(ALWAYS=ALWAYS),
        },
        f"{v1}.backends.registry": {"AttentionBackendEnum": SimpleNamespace(CUSTOM=CUSTOM)},
    }
    for name, attributes in names.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    package = import_module("openmla.integrations.vllm")
    monkeypatch.setattr(package, "indexer", SimpleNamespace(register=register), raising=False)
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(**{INSERT: None}))
    for name in ("v4", "v4_cuda"):
        path = f"openmla.integrations.vllm.{name}"
        monkeypatch.delitem(sys.modules, path, raising=False)
        setattr(here, name, import_module(path))
        monkeypatch.setattr(package, name, getattr(here, name), raising=False)
        monkeypatch.setitem(sys.modules, path, getattr(here, name))
    here.find_spec = lambda name: name if name in here.installed else None
    monkeypatch.setattr(here.v4_cuda, "find_spec", here.find_spec)
    return here


INSERT = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"


def config(*ratios: int, chosen: bool) -> Any:
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=CUSTOM if chosen else OTHER),
        kernel_config=SimpleNamespace(enable_jit_warmup=True),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        ratios=ratios, made=0, additional_config={}, look=lambda: None,
    )  # fmt: skip


ENGINE = SimpleNamespace(  # what a builder reads
    compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2]),
    scheduler_config=SimpleNamespace(max_num_batched_tokens=1024),
    model_config=SimpleNamespace(max_model_len=MAX_LEN),
)


def builder(v4: Any, name: str, ratio: int) -> Any:
    tokens, ratio = (64, 1) if name == "window" else (BLOCK, ratio)
    spec = SimpleNamespace(block_size=tokens, tokens_per_state=ratio)
    return v4.Builder(spec, [PREFIXES[name]], ENGINE, torch.device("cpu"))


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


@pytest.mark.parametrize("name", ["query_dtype", "prefill_dtype", "index_format"])
def test_an_option_without_effect_is_refused_before_a_model_is_made(vllm: Any, name: str) -> None:
    asked = config(1, chosen=True)
    asked.additional_config = {"openmla": {name: "fp8"}}
    with pytest.raises(
        ConfigError, match=f"openmla: option {name} is not supported for DeepSeek V4."
    ):
        vllm.v4.DeepseekV4ForCausalLM(vllm_config=asked)
    assert asked.made == 0


def test_on_other_platforms_it_is_refused_before_a_model_is_made(vllm: Any) -> None:
    vllm.device = "xpu"
    asked = config(1, chosen=True)
    with pytest.raises(ConfigError, match=r"needs CUDA or a CPU, got xpu"):
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
            made[prefix] = builder(v4, name, self.ratio).build(0, self.common(name, new))
        return made


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_a_step_names_the_slots_of_the_entries_it_finishes(vllm: Any, ratio: int) -> None:
    new, padding = [5, 0, 300, 1], 4
    requests = Requests([5, 260, 700, 128], ratio)
    common = requests.common("entries", new, padding)
    step = builder(vllm.v4, "entries", ratio).build(0, common)
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
            logits = layer.scale * q[t, :H].double() @ keys.mT
            logits = torch.cat([logits, layer.attn_sink[:H, None].double()], 1)
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
    q = 3 * torch.randn(T, PADDED, D).bfloat16()
    q_idx, w_idx = torch.randn(T, HI, DI).to(torch.float8_e4m3fn), torch.randn(T, HI)
    if ratio == 4:
        layer.indexer.indexer_op(q, q_idx, None, w_idx)

    def best(t: int, b: int, count: int) -> Tensor:
        if ratio != 4 or count <= K:
            return torch.arange(count)
        scores = (q_idx[t].float() @ requests.keys[b][:count].mT).relu()
        return (w_idx[t] @ scores).topk(K).indices

    positions = torch.cat([torch.arange(S - n, S) for n, S in zip(new, requests.lens, strict=True)])
    output = torch.full((T, PADDED, D), torch.nan).bfloat16()
    layer.forward_mqa(q, q[:, 0], positions, output)
    wanted = attended(layer, requests, q, new, best)
    torch.testing.assert_close(output[:, :H].double(), wanted, atol=4e-3, rtol=8e-3)
    assert output[:, H:].isnan().all()  # heads that vLLM adds
    assert vllm.breaks == ["choose", "attend"][ratio != 4 :]


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


def test_the_backend_that_was_asked_for_runs(vllm: Any) -> None:
    asked = config(1, 4, chosen=True)
    asked.additional_config = {"openmla": {"backend": "no such backend"}}
    model = vllm.v4.DeepseekV4ForCausalLM(vllm_config=asked)
    vllm.steps = Requests([40], 4).steps(vllm.v4, [40])
    q = torch.randn(40, PADDED, D).bfloat16()
    for layer in model.layers:
        with pytest.raises(OpenMLAError, match="no such backend"):
            layer.forward_mqa(q, q, torch.arange(40), q)
    q_idx, w_idx = torch.randn(40, HI, DI).to(torch.float8_e4m3fn), torch.randn(40, HI)
    with pytest.raises(OpenMLAError, match="no such backend"):
        model.layers[1].indexer.indexer_op(q, q_idx, None, w_idx)


def test_where_all_entries_can_be_chosen_nothing_is_chosen(vllm: Any) -> None:
    """In a graph vLLM calls the indexer whatever the context is."""
    requests, layer = Requests([4 * K + 3], 4), Attention(4)
    vllm.steps = requests.steps(vllm.v4, [1])
    vllm.v4.Chooser(layer.indexer)(None, None, None, None)
    assert (layer.topk_indices_buffer == -7).all()


# CUDA graphs: a replay reads the tensors of its capture.


@pytest.mark.parametrize("name", PREFIXES)
def test_metadata_stays_where_it_was_captured(vllm: Any, name: str) -> None:
    requests = Requests([300, 260, 130, 41], 4)
    made = builder(vllm.v4, name, 4)
    assert made._cudagraph_support is ALWAYS
    common = requests.common(name, [1, 1, 1, 1])
    captured = made.build_for_cudagraph_capture(common)
    assert captured.max_seq_len == MAX_LEN
    replayed = made.build(0, common)
    assert replayed.max_seq_len == 300
    for field in ("slot_mapping", "token_to_req_indices", "row_lens", "kv_scale"):
        assert getattr(captured, field).data_ptr() == getattr(replayed, field).data_ptr(), field
    assert captured.block_table.data_ptr() == common.block_table_tensor.data_ptr()
    assert captured.query_start_loc.data_ptr() == common.query_start_loc.data_ptr()
    if name == "window":
        assert captured.slot_mapping.data_ptr() == common.slot_mapping.data_ptr()


def test_a_graph_of_more_tokens_writes_no_entry_of_an_earlier_step(vllm: Any) -> None:
    requests = Requests([300, 260, 128, 40], 4)
    made = builder(vllm.v4, "entries", 4)
    captured = made.build(0, requests.common("entries", [1, 1, 1, 1]))
    assert (captured.slot_mapping >= 0).all()  # each ends a group of four
    fewer = Requests([300], 4)
    made.build(0, fewer.common("entries", [1]))
    assert captured.slot_mapping.tolist()[1:] == [-1, -1, -1]


def test_blocks_that_are_not_there_are_read_as_the_first(vllm: Any) -> None:
    """vLLM's kernels have no check for negative blocks."""
    requests = Requests([300, 20], 4)
    requests.tables["entries"][1, 1:] = -1
    step = builder(vllm.v4, "entries", 4).build(0, requests.common("entries", [1, 1]))
    assert step.block_table.min() == 0


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_a_replay_attends_to_the_step_it_replays(vllm: Any, ratio: int) -> None:
    """Captured with other lengths, tables and more requests than there are now."""
    requests, layer = Requests([20, 300, 130], ratio), Attention(ratio)
    requests.fill(layer)
    vllm.v4.take_over(nn.ModuleList([layer]))
    captured, buffers = {}, {}
    T = 4
    for name, prefix in PREFIXES.items():
        columns = requests.tables[name].shape[1]
        common = SimpleNamespace(
            num_reqs=T, num_actual_tokens=T, query_start_loc=torch.arange(T + 1).int(),
            seq_lens=torch.ones(T).int(), max_seq_len=1, slot_mapping=torch.full((T,), -1),
            block_table_tensor=torch.zeros(T, columns).int(),
        )  # fmt: skip
        made = builder(vllm.v4, name, ratio)
        captured[prefix], buffers[name] = made.build_for_cudagraph_capture(common), (made, common)
    for name, (made, common) in buffers.items():
        now = requests.common(name, [1, 1, 1])
        common.query_start_loc.copy_(torch.tensor([0, 1, 2, 3, 3]))
        common.seq_lens[:3], common.block_table_tensor[:3] = now.seq_lens, now.block_table_tensor
        common.slot_mapping[:3] = now.slot_mapping
        made.build(0, common)
    vllm.steps = captured
    torch.manual_seed(5)
    q = 3 * torch.randn(T, PADDED, D).bfloat16()
    q_idx, w_idx = torch.randn(T, HI, DI).to(torch.float8_e4m3fn), torch.randn(T, HI)
    if ratio == 4:
        layer.indexer.indexer_op(q, q_idx, None, w_idx)

    def best(t: int, b: int, count: int) -> Tensor:
        if ratio != 4 or count <= K:
            return torch.arange(count)
        scores = (q_idx[t].float() @ requests.keys[b][:count].mT).relu()
        return (w_idx[t] @ scores).topk(K).indices

    output = torch.full((T, PADDED, D), torch.nan).bfloat16()
    layer.forward_mqa(q, q, torch.tensor([19, 299, 129, 0]), output)
    wanted = attended(layer, requests, q, [1, 1, 1], best)
    torch.testing.assert_close(output[:3, :H].double(), wanted, atol=4e-3, rtol=8e-3)
    assert not output[3, :H].any()


# CUDA: what v4_cuda.py replaces


def test_on_cuda_vllm_builds_its_flashmla_layers(vllm: Any) -> None:
    """On every GPU, and without what DeepGEMM or CuTe DSL would be needed for."""
    vllm.device = "cuda"
    asked = config(1, 4, 128, chosen=True)
    nvidia, kernels = vllm.nvidia, asked.kernel_config
    asked.look = lambda: (
        nvidia._select_dsv4_attn_cls(asked), kernels.enable_jit_warmup, vllm.registered
    )  # fmt: skip
    model = vllm.v4.DeepseekV4ForCausalLM(vllm_config=asked)
    assert asked.seen == (Attention, False, 1)
    assert nvidia._select_dsv4_attn_cls is vllm.select and kernels.enable_jit_warmup
    assert not vllm.pooling.mqa_logits_use_mx_scales()
    assert all(isinstance(layer.forward_mqa, vllm.v4.Attend) for layer in model.layers)
    assert not any("_fused_qnorm_rope_kv_insert" in vars(layer) for layer in model.layers)
    vllm.installed = ["cutlass", "quack"]
    vllm.v4.DeepseekV4ForCausalLM(vllm_config=asked)
    assert asked.seen == (Attention, True, 2)


def test_after_a_failure_vllm_selects_its_layers_again(vllm: Any) -> None:
    vllm.device = "cuda"
    asked = config(1, chosen=True)
    asked.look = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        vllm.v4.DeepseekV4ForCausalLM(vllm_config=asked)
    assert vllm.nvidia._select_dsv4_attn_cls is vllm.select
    assert asked.kernel_config.enable_jit_warmup


def test_what_cannot_run_on_cuda_is_refused_in_one_sentence(vllm: Any) -> None:
    vllm.device, vllm.capability = "cuda", (8, 6)
    asked = config(1, chosen=True)
    with pytest.raises(ConfigError, match="needs SM89 or newer, got SM86"):
        vllm.v4.DeepseekV4ForCausalLM(vllm_config=asked)
    vllm.capability = (8, 9)
    asked.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ConfigError, match=r"decode_context_parallel_size must be 1 .*, got 2"):
        vllm.v4.DeepseekV4ForCausalLM(vllm_config=asked)
    assert asked.made == 0
    layer = Attention(4)
    layer.indexer.use_fp4_kv = True
    with pytest.raises(ConfigError, match="indexer keys of DeepSeek V4 must be fp8, got MXFP4"):
        vllm.v4_cuda.take_over(layer)


def test_pooling_is_by_triton_without_cute_dsl(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Attention(128)
    vllm.v4_cuda.take_over(layer)
    steps = Requests([300], 128).steps(vllm.v4, [200])
    states, positions, pdl = torch.zeros(1), torch.arange(200), {"launch_pdl": False}
    step, rotary = steps[PREFIXES["window"]], SimpleNamespace(cos_sin_cache="table")
    layer.compressor._compress_norm_rope_store(step, states, 512, positions, rotary, steps, pdl)
    (given,) = vllm.pooled
    assert given["num_actual"] == 200 and given["kv_cache"] == "pages"
    assert given["k_cache_metadata"] is steps[PREFIXES["entries"]]
    assert given["block_table"] is step.block_table and given["slot_mapping"] is step.slot_mapping
    assert (given["compress_ratio"], given["overlap"], given["head_dim"]) == (128, False, D)
    vllm.installed = ["cutlass", "quack"]
    layer = Attention(128)
    vllm.v4_cuda.take_over(layer)
    assert "_compress_norm_rope_store" not in vars(layer.compressor)
    vllm.capability = (8, 9)  # vLLM's CuTe DSL kernels are for SM90 and newer
    vllm.v4_cuda.take_over(layer)
    assert "_compress_norm_rope_store" in vars(layer.compressor)
    vllm.capability, vllm.installed, layer = (9, 0), ["cutlass"], Attention(128)
    monkeypatch.delattr(Compressor, "_compress_norm_rope_store")  # vLLM 0.32
    with pytest.raises(ConfigError, match=r"vLLM 0\.32 cannot pool .* without CuTe DSL"):
        vllm.v4_cuda.take_over(layer)


def test_rows_are_written_without_vllms_compiled_op(
    vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace())
    requests, layer = Requests([5, 300, 130], 1), Attention(1)
    layer.rotary_emb = SimpleNamespace(cos_sin_cache=torch.randn(MAX_LEN, R))
    vllm.v4_cuda.take_over(layer)
    torch.manual_seed(6)
    T, new = 6, [5, 0, 1]
    q, kv = torch.randn(T, H, D).bfloat16(), torch.randn(T, D).bfloat16()
    assert layer._fused_qnorm_rope_kv_insert(q, kv, None, None) is q  # the profiling run
    steps, positions = requests.steps(vllm.v4, new), torch.tensor([0, 1, 2, 3, 4, 129])
    before = kv.clone()
    rotated = layer._fused_qnorm_rope_kv_insert(q, kv, positions, steps)

    def turned(x: Tensor) -> Tensor:
        x, (cos, sin) = x.double().clone(), layer.rotary_emb.cos_sin_cache[positions].chunk(2, 1)
        cos, sin = (each.double().view(T, *[1] * (x.dim() - 2), -1) for each in (cos, sin))
        even, odd = x[..., -R::2].clone(), x[..., -R + 1 :: 2].clone()
        x[..., -R::2], x[..., -R + 1 :: 2] = even * cos - odd * sin, odd * cos + even * sin
        return x

    normed = q.double() / (q.double().pow(2).mean(-1, keepdim=True) + layer.eps).sqrt()
    torch.testing.assert_close(rotated.double(), turned(normed), atol=0.03, rtol=8e-3)
    assert torch.equal(kv, before)  # vLLM's compressor reads it as well
    cache, one = layer.swa_cache_layer.kv_cache, torch.ones(())
    slots = steps[PREFIXES["window"]].slot_mapping
    stored = openmla.FORMATS["fp8_dsv4"].read(cache, slots, one, torch.float32, D)
    torch.testing.assert_close(stored.double(), turned(kv), atol=0.02, rtol=0.07)


@pytest.mark.parametrize("deep_gemm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int32], ids=str)
def test_wo_a_is_dequantized_where_vllm_would_need_deep_gemm(
    vllm: Any, dtype: torch.dtype, deep_gemm: bool
) -> None:
    """Whatever layout a quantized weight has: Marlin's is int32."""
    torch.manual_seed(7)
    layer, weight = Attention(1), torch.randn(2 * 16, H * D // 2).bfloat16()
    vllm.deep_gemm = deep_gemm

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight.to(dtype), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ weight.t()

    wo_a = layer.wo_a = Quantized()
    vllm.v4_cuda.take_over(layer)
    o = torch.randn(3, H, D).bfloat16()
    replaced = dtype != torch.bfloat16 and not deep_gemm
    if replaced or dtype == torch.bfloat16:
        wanted = torch.einsum("tgk,gnk->tgn", o.view(3, 2, -1), weight.view(2, 16, -1)).flatten(1)
        for _ in range(2):
            assert torch.equal(layer._o_proj(o, torch.arange(3)), wanted)
    else:
        with pytest.raises(RuntimeError):  # the stand-in cannot multiply such a weight
            layer._o_proj(o, torch.arange(3))
    assert (layer.wo_a is wo_a) != replaced and "_o_proj" not in vars(layer)
