"""Recurrent states after a verify: the committed tokens of each block are run through them again.

A verify leaves the states of linear attention as they were, and remembers what each layer read. It
would take a state per position to store them all, and a state is a hundred times larger than what a
token adds to it. The layers are gated delta networks (Yang et al. 2024, arXiv 2412.06464). A head
keeps a matrix S of values by keys: S = d S, S = S + b (v - S k) k^T, with decay d and strength b.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

TINY = 1e-6  # keeps the norm of a key from 0


@dataclass(frozen=True)
class Layer:
    """The weights of a layer: H heads of K keys, HV heads of V values, C = 2 H K + HV V channels.

    A convolution of width W is ahead of the recurrence. Its channels are queries, keys and values.
    """

    conv: Tensor  # [C, W], without a bias, followed by SiLU
    a_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV]
    key_heads: int


@dataclass(frozen=True)
class States:
    """The states of L layers in S slots."""

    windows: Tensor  # [L, S, C, W - 1], the last inputs of the convolution
    matrices: Tensor  # [L, S, HV, V, K]


@dataclass(frozen=True)
class BlockInputs:
    """The inputs of L layers in the last verify: of up to R requests, N positions."""

    tokens: Tensor  # [L, R, W - 1 + N, C], the window before the block and the block's own inputs
    a: Tensor  # [L, R, N, HV], of the decay
    b: Tensor  # [L, R, N, HV], of the strength

    @classmethod
    def zeros(cls, states: States, max_requests: int, positions: int) -> BlockInputs:
        """Room for blocks, in the dtype and on the device of the windows."""
        layers, _, channels, window = states.windows.shape
        heads = states.matrices.shape[2]

        def room(*shape: int) -> Tensor:
            return states.windows.new_zeros(layers, max_requests, *shape)

        return cls(
            room(window + positions, channels), room(positions, heads), room(positions, heads)
        )

    def store(self, layer: int, window: Tensor, tokens: Tensor, a: Tensor, b: Tensor) -> None:
        """Store what a layer reads.

        window: [B, C, W - 1]; tokens: [B, w, C]; a, b: [B, w, HV], w at most N.
        """
        requests, width, _ = tokens.shape
        before = window.shape[2]
        self.tokens[layer, :requests, :before] = window.transpose(1, 2)
        self.tokens[layer, :requests, before : before + width] = tokens
        self.a[layer, :requests, :width] = a
        self.b[layer, :requests, :width] = b

    def tensors(self) -> list[Tensor]:
        return [self.tokens, self.a, self.b]


@dataclass(frozen=True)
class Copies:
    """Slots that get the states after the first tokens of a block, too."""

    slots: Tensor  # [B] integers
    after: Tensor  # [B] int64, how many tokens, at most those that were committed; 0: no copy


class Weights:
    """The weights of all layers. They stay where they are, so that new ones are seen."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self.conv_addresses = _addresses([layer.conv for layer in layers])
        self.a_log_addresses = _addresses([layer.a_log for layer in layers])
        self.dt_bias_addresses = _addresses([layer.dt_bias for layer in layers])


def _addresses(tensors: list[Tensor]) -> Tensor:
    """The address of each tensor, [L] int64 on their device. All have one dtype."""
    first = tensors[0]
    assert all(t.is_contiguous() and t.dtype == first.dtype for t in tensors)
    addresses = [t.data_ptr() for t in tensors]
    return torch.tensor(addresses, dtype=torch.int64, device=first.device)


def replay_on(device: str) -> Callable[..., None]:
    """`launch_replay_states`, or its reference where Triton does not run. device: its type."""
    return launch_replay_states if device == "cuda" else replay_states_in_torch


def launch_replay_states(
    states: States,
    inputs: BlockInputs,
    weights: Weights,
    slots: Tensor,
    num_committed: Tensor,
    copies: Copies | None,
) -> None:
    """Advance the states of requests by their committed tokens, in every layer.

    slots: [B] integers, the slot of each request, in the order of the verify; num_committed: [B]
    int64, 1 to N. One program per request, layer, value head and BV values.
    """
    matrices, tokens, first = states.matrices, inputs.tokens, weights.layers[0]
    layers, _, heads, values, keys = matrices.shape
    values_of_program = min(32, triton.next_power_of_2(values))
    assert matrices.is_contiguous()
    assert states.windows.is_contiguous()
    assert all(part.is_contiguous() for part in inputs.tensors())
    _replay[(len(slots), layers * heads, triton.cdiv(values, values_of_program))](
        matrices,
        states.windows,
        tokens,
        inputs.a,
        inputs.b,
        slots,
        num_committed,
        None if copies is None else copies.slots,
        None if copies is None else copies.after,
        first.conv,
        weights.conv_addresses,
        first.a_log,
        weights.a_log_addresses,
        first.dt_bias,
        weights.dt_bias_addresses,
        matrices.shape[1],
        *inputs.a.shape[1:3],
        tokens.shape[3],
        WIDTH=first.conv.shape[1],
        H=first.key_heads,
        HV=heads,
        K=keys,
        V=values,
        BK=triton.next_power_of_2(keys),
        BV=values_of_program,
        COPIES=copies is not None,
        num_warps=1,
    )


def replay_states_in_torch(
    states: States,
    inputs: BlockInputs,
    weights: Weights,
    slots: Tensor,
    num_committed: Tensor,
    copies: Copies | None,
) -> None:
    """The reference of `launch_replay_states`."""
    heads, values, keys = states.matrices.shape[2:]
    requests, longest = len(slots), int(num_committed.max())
    window = states.windows.shape[3]
    tokens = inputs.tokens[:, :requests, : window + longest]
    stacked = [
        torch.stack(parts)
        for parts in zip(*((w.conv, w.a_log, w.dt_bias) for w in weights.layers), strict=True)
    ]
    conv, a_log, dt_bias = stacked
    key_heads = weights.layers[0].key_heads
    queries = key_heads * keys  # channels that no state needs
    kept = causal_conv(tokens[..., queries:], conv[:, None, queries:])
    key, value = kept.split([key_heads * keys, heads * values], dim=3)
    key = l2_normalize(key.unflatten(3, (key_heads, keys)))
    key = key.repeat_interleave(heads // key_heads, dim=3)
    value = value.unflatten(3, (heads, values)).float()
    log_decay, strength = decay_and_strength(
        inputs.a[:, :requests, :longest],
        inputs.b[:, :requests, :longest],
        a_log[:, None, None],
        dt_bias[:, None, None],
    )
    rows, matrices = torch.arange(requests), states.matrices[:, slots.long()].float()

    def store(slots: Tensor, rows: Tensor, count: Tensor) -> None:
        """Store the states of some requests, which have run through `count` of their tokens."""
        states.matrices[:, slots.long()] = matrices[:, rows].to(states.matrices.dtype)
        states.windows[:, slots.long()] = _windows(tokens, rows, count, window)

    for t in range(longest):
        decay = log_decay[:, :, t, :, None, None].exp()  # [L, B, HV, 1, 1]
        k = key[:, :, t, :, None]  # [L, B, HV, 1, K]
        decayed = matrices * decay
        held = (decayed * k).sum(-1)  # [L, B, HV, V]
        change = (value[:, :, t] - held) * strength[:, :, t, :, None]
        is_committed = (t < num_committed)[:, None, None, None]
        matrices = torch.where(is_committed, decayed + change[..., None] * k, matrices)
        if copies is not None:
            [due] = (copies.after == t + 1).nonzero(as_tuple=True)
            store(copies.slots[due], due, copies.after[due])
    store(slots, rows, num_committed)


def _windows(tokens: Tensor, rows: Tensor, after: Tensor, window: int) -> Tensor:
    """The windows of requests after so many of their tokens, [L, B, C, W - 1]. after: [B]."""
    last = after[:, None] + torch.arange(window, device=after.device)
    return tokens[:, rows[:, None], last].transpose(2, 3)


def causal_conv(tokens: Tensor, weight: Tensor) -> Tensor:
    """The causal convolution and its SiLU. As in SGLang's kernel, products have the tokens' dtype.

    tokens: [.., W - 1 + T, C], a window and T inputs; weight: [.., C, W]. Returns [.., T, C].
    """
    width = weight.shape[-1]
    steps, taps = tokens.shape[-2] - width + 1, weight.unsqueeze(-3)  # [.., 1, C, W]
    total = (tokens[..., :steps, :] * taps[..., 0]).float()
    for j in range(1, width):
        total += tokens[..., j : j + steps, :] * taps[..., j]
    return F.silu(total).to(tokens.dtype)


def decay_and_strength(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """The logarithm of the decay, and the strength, of tokens, float32.

    a, b: [.., HV]; a_log, dt_bias: broadcast to it.
    """
    rate = F.softplus(a.float() + dt_bias.float())
    return -a_log.float().exp() * rate, b.float().sigmoid()


def l2_normalize(x: Tensor) -> Tensor:
    """Vectors of length 1, float32."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + TINY).rsqrt()


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit
def _causal_conv(tokens, weight, channels, row, present, count, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One output of the convolution, [channels] float32.

    Products and the output are rounded to the tokens' dtype, as by SGLang's kernel in the verify.
    """
    total = tl.zeros(channels.shape, dtype=tl.float32)
    for j in tl.static_range(WIDTH):
        x = tl.load(tokens + (row + j) * count + channels, present, 0).to(tl.float32)
        product = x * tl.load(weight + channels * WIDTH + j, present, 0).to(tl.float32)
        total += product.to(tokens.dtype.element_ty).to(tl.float32)
    total = total / (1.0 + tl.exp(-total))
    return total.to(tokens.dtype.element_ty).to(tl.float32)


@triton.jit
def _keep_window(window, inputs, channels, present, count, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the next WIDTH - 1 inputs of some channels."""
    for j in tl.static_range(WIDTH - 1):
        x = tl.load(inputs + j * count + channels, present, 0)
        tl.store(window + channels * (WIDTH - 1) + j, x, present)


@triton.jit(do_not_specialize=["num_slots", "max_requests", "positions"])
def _replay(  # type: ignore[no-untyped-def]
    matrices,  # [L, S, HV, V, K]
    windows,  # [L, S, C, W - 1]
    tokens,  # [L, R, W - 1 + N, C]
    a,  # [L, R, N, HV]
    b,  # [L, R, N, HV]
    slots,  # [B]
    num_committed,  # [B] int64
    copy_slots,  # [B] or None
    copy_after,  # [B] int64 or None
    conv,  # [C, W] of the first layer, for its type
    conv_addresses,  # [L] int64
    a_log,  # [HV]
    a_log_addresses,  # [L] int64
    dt_bias,  # [HV]
    dt_bias_addresses,  # [L] int64
    num_slots,
    max_requests,
    positions,
    count,  # C
    WIDTH: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    COPIES: tl.constexpr,
):
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1) % HV
    layer = (tl.program_id(1) // HV).to(tl.int64)
    slot = layer * num_slots + tl.load(slots + request).to(tl.int64)
    row = layer * max_requests + request
    steps = tl.load(num_committed + request)
    tokens += row * (WIDTH - 1 + positions) * count
    gate = row * positions * HV + head
    weight = tl.load(conv_addresses + layer).to(conv.dtype)
    a_log = tl.load(a_log_addresses + layer).to(a_log.dtype)
    dt_bias = tl.load(dt_bias_addresses + layer).to(dt_bias.dtype)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)

    of_key, of_value = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    is_key, is_value = of_key < K, of_value < V
    queries = head // (HV // H) * K + of_key
    keys = H * K + queries
    values = 2 * H * K + head * V + of_value
    of_head = (head * V + of_value[:, None]) * K + of_key[None, :]
    present = is_value[:, None] & is_key[None, :]
    size = HV * V * K
    matrix = tl.load(matrices + slot * size + of_head, present, 0).to(tl.float32)
    if COPIES:
        copy_slot = layer * num_slots + tl.load(copy_slots + request).to(tl.int64)
        copied = tl.load(copy_after + request)
    for t in range(steps):
        key = _causal_conv(tokens, weight, keys, t, is_key, count, WIDTH)
        key = key / tl.sqrt(tl.sum(key * key) + 1e-6)
        value = _causal_conv(tokens, weight, values, t, is_value, count, WIDTH)
        x = tl.load(a + gate + t * HV).to(tl.float32) + bias
        softplus = tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
        strength = 1.0 / (1.0 + tl.exp(-tl.load(b + gate + t * HV).to(tl.float32)))
        matrix *= tl.exp(rate * softplus)
        change = (value - tl.sum(matrix * key[None, :], 1)) * strength
        matrix += change[:, None] * key[None, :]
        if COPIES:
            due = present & (t + 1 == copied)
            tl.store(matrices + copy_slot * size + of_head, matrix, due)
    tl.store(matrices + slot * size + of_head, matrix, present)

    # The heads of a group share its queries and keys, of which the first one takes care.
    is_first = is_key & (head % (HV // H) == 0) & (tl.program_id(2) == 0)
    window, inputs = windows + slot * count * (WIDTH - 1), tokens + steps * count
    _keep_window(window, inputs, values, is_value, count, WIDTH)
    _keep_window(window, inputs, queries, is_first, count, WIDTH)
    _keep_window(window, inputs, keys, is_first, count, WIDTH)
    if COPIES:
        window, inputs = windows + copy_slot * count * (WIDTH - 1), tokens + copied * count
        _keep_window(window, inputs, values, is_value & (copied > 0), count, WIDTH)
        _keep_window(window, inputs, queries, is_first & (copied > 0), count, WIDTH)
        _keep_window(window, inputs, keys, is_first & (copied > 0), count, WIDTH)
