"""MLAAttention against transformers' modules: every family, every way to cut a sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from openmla import (
    PRESETS,
    Batch,
    ConfigError,
    MLAAttention,
    RopeTable,
    ShapeError,
    UnsupportedError,
    allocate_cache,
    make_plan,
    plan_buffers,
    warmup,
)
from openmla.layers.rope import rope_table
from openmla.layers.weights import decode_weight, is_plain, state_of
from tests.layers.families import FAMILIES, GATED, UNROTATED, Peer, make_peer
from tests.layers.serving import Server, relative_error, sequence
from tests.plan.groups import expanded_of

pytest.importorskip("transformers")
BLOCK = 4
DENSE = [*FAMILIES, *GATED]


def serve(peer: Peer, hidden: Tensor, lens: Sequence[int], **options: Any) -> Tensor:
    server = Server(peer.ours, {"r": hidden}, block_size=BLOCK, **options)
    for n in lens:
        server.step([("r", n)])
    return server.output("r")


def cuts(name: str, length: int) -> list[int]:
    if name == "full":
        return [length]
    if name == "token-by-token":
        return [1] * length
    if name == "multi-token":
        return [3, 1, 5, 2] * (length // 11) + [1] * (length % 11)
    if name == "random":
        rng = random.Random(5)
        lens: list[int] = []
        while sum(lens) < length:
            lens.append(min(rng.randint(1, 23), length - sum(lens)))
        return lens
    edge = {"1": 1, "page-1": BLOCK - 1, "page": BLOCK, "page+1": BLOCK + 1}[name]
    return [edge, length - 2 * edge, edge]


WAYS = ["full", "token-by-token", "multi-token", "1", "page-1", "page", "page+1", "random"]


@pytest.mark.parametrize("form", ["auto", "absorbed", "expanded"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", DENSE)
def test_equals_transformers(family: str, way: str, form: str) -> None:
    """Whatever the steps and the form, the outputs are the module's over the whole sequence."""
    peer, hidden = make_peer(family), sequence(90)
    expected = peer.full(hidden)
    for workspace_tokens in (BLOCK, 12, 4096):  # chunk by chunk, chunks of three blocks, one shot
        actual = serve(peer, hidden, cuts(way, 90), form=form, workspace_tokens=workspace_tokens)
        assert relative_error(actual, expected) < 1e-5
        if form == "absorbed":
            break  # no workspace in that form


@pytest.mark.parametrize("form", ["auto", "absorbed", "expanded"])
@pytest.mark.parametrize("family", UNROTATED)
def test_columns_that_never_rotate(family: str, form: str) -> None:
    peer, hidden = make_peer(family), sequence(90)
    assert peer.ours.config.rope.kind == "none" and peer.ours.config.qk_rope_head_dim > 0
    for way in ("full", "multi-token"):
        actual = serve(peer, hidden, cuts(way, 90), form=form, workspace_tokens=12)
        assert relative_error(actual, peer.full(hidden)) < 1e-5


@pytest.mark.parametrize("family", [*DENSE, *UNROTATED])
def test_mixed_batches(family: str, device: str) -> None:
    """Prefill, extension, decode and idle requests in one step, in any order."""
    peer = make_peer(family)
    names = ["a", "b", "c", "d"]
    hidden = {name: sequence(80, seed) for seed, name in enumerate(names)}
    rng = random.Random(3)
    for form in ("auto", "absorbed", "expanded"):
        server = Server(peer.ours, hidden, workspace_tokens=16, form=form, device=device)
        while any(server.pool.seq_len(name) < 80 for name in names):
            wanted = []
            for name in rng.sample(names, 4):
                rest = 80 - server.pool.seq_len(name)
                wanted.append((name, min(rng.choice([0, 1, 1, 2, 7, 30]), rest)))
            server.step(wanted)
        for name in names:
            assert relative_error(server.output(name), peer.full(hidden[name])) < 1e-5


def test_absorbed_and_expanded_requests_share_a_step(device: str) -> None:
    """A step whose forms differ by request: rows are picked apart and put back in order."""
    peer = make_peer("deepseek_v3")
    hidden = {name: sequence(80, seed) for seed, name in enumerate("abc")}
    server = Server(peer.ours, hidden, device=device)
    server.step([("a", 40), ("c", 30)])
    plan = server.step([("b", 60), ("a", 1), ("c", 50)])
    expanded = plan.group("expanded")
    assert plan.group("absorbed") is not None and expanded is not None
    if device == "cpu":  # b and c are not neighbours; elsewhere the costs differ
        assert isinstance(expanded.rows, Tensor)
    plan = server.step([("a", 1), ("b", 1)])
    assert plan.group("expanded") is None
    for name in "abc":
        expected = peer.full(hidden[name])[: server.pool.seq_len(name)]
        assert relative_error(server.output(name), expected) < 1e-5


def test_workspace_is_used_and_gives_the_same(device: str) -> None:
    peer, hidden = make_peer("deepseek_v3"), sequence(90)
    server = Server(peer.ours, {"r": hidden}, block_size=BLOCK, form="expanded", device=device)
    space = warmup(
        peer.ours.config,
        server.cache,
        max_requests=2,
        max_tokens=64,
        workspace_tokens=12,
        dtype=torch.float32,
    )
    assert space.num_rows == 12 and len(space.expanded) == 64
    assert len(space.keys) in (0, 64)  # none where a backend reads keys in two parts
    server.options["workspace"] = space
    addresses = [tensor.data_ptr() for tensor in space]
    for n in (30, 40, 20):
        plan = server.step([("r", n)])
        assert plan.workspace is not None
        assert [tensor.data_ptr() for tensor in plan.workspace] == addresses
    assert expanded_of(plan).route == "chunked" and len(expanded_of(plan).chunks) == 6
    assert relative_error(server.output("r"), peer.full(hidden)) < 1e-5


@pytest.mark.parametrize(("format", "bound"), [("bf16", 2e-2), ("fp16", 2e-3), ("fp8", 2e-1)])
def test_lossy_caches_stay_close(format: str, bound: float, device: str) -> None:
    """The same tokens through a rounded cache: near, and nearer for finer formats."""
    peer, hidden = make_peer("deepseek_v3"), sequence(90)
    for form in ("absorbed", "expanded"):
        lens = [40, *[1] * 20, 30]
        actual = serve(peer, hidden, lens, format=format, form=form, device=device)
        assert 0 < relative_error(actual, peer.full(hidden)) < bound


def test_routes_round_the_same_values() -> None:
    """With a lossy cache too: new rows as projected, context as stored, in one shot or chunks."""
    peer, hidden = make_peer("deepseek_v3"), sequence(90)
    one_shot, chunked = (
        serve(peer, hidden, [40, 50], format="fp8", form="expanded", workspace_tokens=tokens)
        for tokens in (4096, 12)
    )
    assert relative_error(one_shot, chunked) < 1e-5
    assert relative_error(one_shot, peer.full(hidden)) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_layers_stay_close(dtype: torch.dtype) -> None:
    """A 16-bit layer over a 16-bit cache errs by its roundings, in both forms."""
    peer, hidden = make_peer("deepseek_v3"), sequence(90)
    expected = peer.full(hidden)
    layer = peer.ours.to(dtype)
    format = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    for form in ("absorbed", "expanded"):
        server = Server(
            layer, {"r": hidden.to(dtype)}, block_size=BLOCK, format=format, form=form, dtype=dtype
        )
        for n in (50, *[1] * 10, 30):
            server.step([("r", n)])
        error = relative_error(server.output("r").float(), expected)
        assert error < 4 * torch.finfo(dtype).eps


def test_prefix_reuse_and_copy_on_write() -> None:
    """Two requests share a prefix that ends inside a block, then go their own ways."""
    peer = make_peer("deepseek_v3")
    first = sequence(40)
    second = torch.cat([first[:22], sequence(18, seed=9)])
    server = Server(peer.ours, {"a": first, "b": second}, block_size=BLOCK)
    server.step([("a", 22)])
    server.pool.share("a", "b")
    server.outputs["b"].append(server.outputs["a"][0])
    for _ in range(6):
        server.step([("a", 3), ("b", 3)])
    for name, hidden in (("a", first), ("b", second)):
        assert relative_error(server.output(name), peer.full(hidden)) < 1e-5


def test_longrope_switches_past_the_original_length() -> None:
    """A request past the original length rotates by the long factors, one beside it does not."""
    config = PRESETS["tiny-minicpm3"]
    config = replace(config, max_positions=64, rope=replace(config.rope, original_positions=16))
    layer = MLAAttention(config)
    hidden = {"long": sequence(24, 1), "short": sequence(10, 2)}
    server = Server(layer, hidden)
    plan = server.step([("short", 10), ("long", 24)])
    assert plan.rope_offsets is not None
    assert plan.rope_offsets.tolist() == [0] * 10 + [64] * 24
    alone = Server(layer, hidden)
    assert alone.step([("short", 10)]).rope_offsets is None
    torch.testing.assert_close(alone.output("short"), server.output("short"))
    short_only = replace(config, rope=replace(config.rope, long_factor=config.rope.short_factor))
    layer.config = short_only
    layer.rope_table = RopeTable(short_only.rope, config.qk_rope_head_dim, config.max_positions)
    other = Server(layer, hidden)
    other.step([("short", 10), ("long", 24)])
    torch.testing.assert_close(other.output("short"), server.output("short"))
    assert not torch.allclose(other.output("long"), server.output("long"), atol=1e-3)


@pytest.mark.parametrize("captured", [False, True])
def test_longrope_by_lengths_that_only_the_device_knows(captured: bool) -> None:
    """Factors follow the true lengths, not the upper bounds that were planned with."""
    config = PRESETS["tiny-minicpm3"]
    config = replace(config, max_positions=64, rope=replace(config.rope, original_positions=16))
    layer = MLAAttention(config)
    cache = allocate_cache(config, num_blocks=16, block_size=8, format="fp32")
    table = torch.arange(16, dtype=torch.int32).view(2, 8)
    hidden, positions = torch.randn(3, config.hidden_size), torch.tensor([18, 19, 9])
    slots = torch.tensor([18, 19, 64 + 9])
    into = None
    if captured:
        into = plan_buffers(config, cache, max_requests=2, max_tokens=4, max_blocks=8)
    rows = []
    for lens in (None, torch.tensor([20, 10], dtype=torch.int32)):
        bounds = [20, 10] if lens is None else [40, 40]
        batch = Batch([2, 1], bounds, table, slots, device_seq_lens=lens)
        plan = make_plan(batch, config, cache, form="absorbed", into=into)
        assert plan.rope_offsets is not None
        assert plan.rope_offsets[:3].tolist() == [64, 64, 0]
        fill = plan.num_tokens - 3  # a captured step's empty tokens
        layer(
            torch.cat([hidden, hidden.new_zeros(fill, config.hidden_size)]),
            torch.cat([positions, positions.new_zeros(fill)]),
            cache,
            plan,
        )
        assert cache.latent is not None
        rows.append(cache.latent.data.flatten(0, 1)[slots].clone())
    assert torch.equal(*rows)


@pytest.mark.parametrize("family", DENSE)
def test_rope_tables_equal_transformers(family: str) -> None:
    """cos and sin to the last bit where the family is given as cos and sin."""
    peer = make_peer(family)
    config = peer.ours.config
    table = rope_table(config.rope, 8, config.max_positions)[:512]
    assert peer.rotary is not None
    theirs = peer.rotary(torch.zeros(1), torch.arange(512)[None])
    if isinstance(theirs, Tensor):  # deepseek_v2: one complex tensor
        torch.testing.assert_close(table, torch.cat([theirs[0].real, theirs[0].imag], dim=1))
    else:
        cos, sin = (half[0, :, :4] for half in theirs)
        assert torch.equal(table, torch.cat([cos, sin], dim=1))


class Quantised(nn.Module):
    """A linear nobody knows: its weight is reachable only by calling it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", (weight / 0.05).round().to(torch.int8))
        self.codes: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ (self.codes.to(hidden.dtype) * 0.05).T


def fp8_linear(weight: Tensor, kind: str) -> nn.Linear:
    """An nn.Linear with fp8 weight and scales as checkpoints ship them."""
    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias=False).requires_grad_(False)
    if kind == "tensor":
        scale = (weight.abs().max() / 448).reshape(())
        spread = scale
    elif kind == "row":
        scale = weight.abs().amax(1, keepdim=True) / 448
        spread = scale
    else:
        blocks = (-(-rows // 128), -(-columns // 128))
        scale = torch.rand(blocks) * 0.01 + 0.005
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    linear.weight = nn.Parameter(codes, requires_grad=False)
    name = "weight_scale_inv" if kind == "block" else "weight_scale"
    linear.register_buffer(name, scale)
    return linear


def test_plain_weights_are_views() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer = MLAAttention(PRESETS["tiny-v3"]).to(dtype)
        base = layer.kv_b_proj.weight
        assert isinstance(base, Tensor)
        kv_b, w_uk, w_uv, *others = layer.absorbed
        assert others == [None, None, None]
        storage = base.untyped_storage().data_ptr()
        assert all(t.untyped_storage().data_ptr() == storage for t in (kv_b, w_uk, w_uv))
        assert w_uk.data_ptr() == base.data_ptr() and layer.kv_b_dense is None
        assert w_uv.data_ptr() == base.data_ptr() + 16 * 32 * dtype.itemsize
        per_head = base.view(4, 40, 32)
        assert torch.equal(w_uk, per_head[:, :16]) and torch.equal(w_uv.mT, per_head[:, 16:])


@pytest.mark.parametrize("kind", ["tensor", "row", "block", "unknown"])
def test_quantised_weights_are_decoded(kind: str) -> None:
    config = replace(PRESETS["tiny-v3"], kv_lora_rank=200, num_heads=5)
    layer = MLAAttention(config)
    weight = torch.randn(5 * 40, 200)
    linear = Quantised(weight) if kind == "unknown" else fp8_linear(weight, kind)
    layer.kv_b_proj = linear
    layer.refresh_weights()
    dense = layer.absorbed.kv_b
    if kind == "unknown":
        expected = linear(torch.eye(200)).T
    else:
        scale = linear.weight_scale_inv if kind == "block" else linear.weight_scale
        assert isinstance(scale, Tensor) and isinstance(linear.weight, Tensor)
        rows, columns = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
        spread = scale[rows // 128, columns // 128] if kind == "block" else scale
        expected = linear.weight.float() * spread
    torch.testing.assert_close(dense, expected, rtol=1e-6, atol=1e-6)
    assert relative_error(dense, weight) < 0.1
    assert layer.absorbed.kv_b.data_ptr() == dense.data_ptr()


class Coded(Tensor):
    """A tensor that shows bfloat16, holds int8 and can only be multiplied with."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> Coded:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return args[0] @ (args[1].codes.to(args[0].dtype) * 0.05).T
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # nn.Parameter needs it
            return Coded(args[0].codes)
        raise NotImplementedError(str(func))


def test_fake_weights_are_plain() -> None:
    with FakeTensorMode():
        layer = MLAAttention(PRESETS["tiny-v3"])
        assert is_plain(layer.kv_b_proj) and layer.absorbed.w_uk.shape == (4, 16, 32)


def test_tensors_of_another_class_are_decoded() -> None:
    """Their dtype says nothing: as torchao's quantised ones, they are known by what they do."""
    layer = MLAAttention(PRESETS["tiny-v3"]).bfloat16()
    codes = torch.randint(-20, 20, (160, 32), dtype=torch.int8)
    with torch.inference_mode(False):  # nn.Parameter sees it as its own from outside only
        weight = nn.Parameter(Coded(codes), requires_grad=False)
    layer.kv_b_proj = nn.Linear(32, 160, bias=False)
    layer.kv_b_proj.weight = weight
    assert isinstance(weight, Coded) and not is_plain(layer.kv_b_proj)
    assert torch.equal(layer.absorbed.kv_b, codes.bfloat16() * 0.05)
    assert state_of(layer.kv_b_proj) == state_of(layer.kv_b_proj)


@pytest.mark.parametrize("quantised", ["kv_b_proj", "o_proj", "every linear"])
def test_torchao_layers_run(quantised: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and quantised in (name, "every linear")

    with torch.inference_mode(False):  # torchao takes no weights made in that mode
        plain = MLAAttention(PRESETS["tiny-v3"]).bfloat16()
        coded = deepcopy(plain)
        quantization.quantize_(coded, quantization.Int8WeightOnlyConfig(), chosen)
        servers = [
            Server(layer, {"r": sequence(20).bfloat16()}, format="bf16", dtype=torch.bfloat16)
            for layer in (plain, coded)
        ]
    for server in servers:
        for n in (12, 1, 7):
            server.step([("r", n)])
    outputs = [server.output("r").float() for server in servers]
    assert 0 < relative_error(outputs[1], outputs[0]) < 0.1


@pytest.mark.parametrize("name", ["o_proj", "q_b_proj", "kv_a_proj_with_mqa"])
def test_any_linear_may_be_quantised(name: str) -> None:
    """Beside kv_b_proj: what the layer computes in is not read from a linear."""
    layer, hidden = MLAAttention(PRESETS["tiny-v3"]), sequence(20)
    names = (name, "kv_b_proj")
    linears = {each: Quantised(4 * getattr(layer, each).weight) for each in names}
    for each, linear in linears.items():
        getattr(layer, each).weight.copy_(linear.codes * 0.05)
    outputs = []
    for _ in range(2):  # plain linears of the same weights, then these
        server = Server(layer, {"r": hidden})
        for n in (12, 1, 7):
            server.step([("r", n)])
        outputs.append(server.output("r"))
        for each, linear in linears.items():
            setattr(layer, each, linear)
    torch.testing.assert_close(*outputs)


def test_reloading_keeps_addresses() -> None:
    layer = MLAAttention(PRESETS["tiny-v3"])
    before = [tensor.data_ptr() for tensor in layer.absorbed[:3]]
    state = {name: torch.randn_like(tensor) for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(state)
    assert [tensor.data_ptr() for tensor in layer.absorbed[:3]] == before
    assert torch.equal(layer.absorbed.kv_b, state["kv_b_proj.weight"])

    quantised = MLAAttention(PRESETS["tiny-v3"])
    quantised.kv_b_proj = fp8_linear(torch.randn(160, 32), "tensor")
    before = [tensor.data_ptr() for tensor in quantised.absorbed[:3]]
    other = {**quantised.state_dict()}
    other["kv_b_proj.weight_scale"] = other["kv_b_proj.weight_scale"] * 2
    values = quantised.absorbed.kv_b.clone()
    quantised.load_state_dict(other)
    assert [tensor.data_ptr() for tensor in quantised.absorbed[:3]] == before
    torch.testing.assert_close(quantised.absorbed.kv_b, 2 * values)


def test_bad_weights() -> None:
    linear = fp8_linear(torch.randn(160, 32), "tensor")
    linear.weight_scale = torch.ones(3)
    with pytest.raises(ShapeError, match="weights: weight_scale must have 1 scale, 1 per row"):
        decode_weight(linear, 32, torch.float32)
    del linear.weight_scale
    with pytest.raises(
        ShapeError, match="the fp8 kv_b_proj has neither weight_scale_inv nor weight"
    ):
        decode_weight(linear, 32, torch.float32)
    layer = MLAAttention(PRESETS["tiny-v3"])
    layer.kv_b_proj = nn.Linear(32, 161, bias=False)
    with pytest.raises(ShapeError, match=r"weights: kv_b_proj must be \[H \* \(P \+ V\), C\] = "):
        _ = layer.absorbed


def test_parameters_want_no_grad() -> None:
    layer = MLAAttention(PRESETS["tiny-v2-lite"])
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_other_layers_are_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match=r"MLAAttention: deepseek_v4 has a compressor. Use MLAAttentionV4"
    ):
        MLAAttention(PRESETS["deepseek-v4-flash"])
    gated = replace(PRESETS["tiny-v3.2"], model_type="axk2")
    with pytest.raises(
        UnsupportedError, match=r"MLAAttention: the output gate of axk2 is not supported"
    ):
        MLAAttention(gated)
    with pytest.raises(ConfigError, match="layer must be an integer of at least 0, got -1"):
        MLAAttention(PRESETS["tiny-v3"], layer=-1)
