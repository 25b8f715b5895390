"""A DFlash draft in plain PyTorch, written from the paper and the formats' own code alone.

No KV cache: every call recomputes the whole context from the target's hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding


@dataclass(frozen=True)
class Domino:
    """How Domino's GRU is to be read."""

    shift_label: bool = False
    pure_prefix: int = 0
    # The tokens that the GRU reads, of the text up to the anchor and of the drafts so far.
    reads: Callable[[list[int], list[int]], list[int]] = lambda ids, drafts: ids[-1:] + drafts


@dataclass(frozen=True)
class Correlated:
    """How LiLiCorr's candidates are to be read."""

    candidates: int
    heads: int = 4
    scale: float = 10.0
    reads_context: bool = True
    reads_ranks: bool = True


@dataclass
class Semantics:
    """How a checkpoint is to be read; the tests fill it in, not our adapters."""

    hidden_state_ids: list[int]  # indices into Transformers' hidden_states
    block_size: int
    mask_token_id: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float = 1e-6
    rope: list[dict[str, Any]] = field(default_factory=list)  # rope_parameters of each layer
    max_positions: int = 512
    # (convention, window) of each layer: "full", "zlab" or "speculators"; causal in the block
    layers: list[tuple[str, int | None, bool]] = field(default_factory=list)
    sample_from_anchor: bool = False
    embedding_scale: float = 1.0
    mask_embedding: Tensor | None = None
    logit_multiplier: float = 1.0
    logit_cap: float | None = None
    columns: int | None = None  # of the logits that may be drafted; None: all
    markov: str | None = None  # kind of the Markov head
    domino: Domino | None = None
    convolved: int | None = None  # channels that share a kernel
    candidates: int | None = None  # of each position, for the selector
    edges_read_hidden: bool = True
    refined: int | None = None  # candidates of each position, for DSpine's refinement
    correlated: Correlated | None = None
    told_anchor: bool = True  # the position behind the anchor hears the anchor's code

    @classmethod
    def of_zlab(cls, config: dict[str, Any], **changes: Any) -> Semantics:
        """A plain z-lab config, without windows or other extras."""
        method, layers = config["dflash_config"], config["num_hidden_layers"]
        values: dict[str, Any] = {
            "hidden_state_ids": [k + 1 for k in method["target_layer_ids"]],
            "block_size": config["block_size"],
            "mask_token_id": method["mask_token_id"],
            "heads": config["num_attention_heads"],
            "kv_heads": config["num_key_value_heads"],
            "head_dim": config["head_dim"],
            "rope": [{"rope_type": "default", "rope_theta": config["rope_theta"]}] * layers,
            "layers": [("full", None, False)] * layers,
        }
        return cls(**values | changes)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rope(x: Tensor, positions: Tensor, semantics: Semantics, layer: int) -> Tensor:
    """Rotate by Transformers' own tables. x: [n, heads, D]."""
    config = Qwen3Config(
        head_dim=semantics.head_dim,
        hidden_size=semantics.heads * semantics.head_dim,
        num_attention_heads=semantics.heads,
        max_position_embeddings=semantics.max_positions,
        rope_parameters=dict(semantics.rope[layer]),
    )
    cos, sin = Qwen3RotaryEmbedding(config)(x, positions[None])
    cos, sin, half = cos[0][:, None], sin[0][:, None], x.shape[-1] // 2
    rotated: Tensor = x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
    return rotated


def _seen(semantics: Semantics, layer: int, context: Tensor, block: Tensor) -> Tensor:
    """[n, context + n] bool: which keys each block position may see."""
    kind, window, causal = semantics.layers[layer]
    keys, query = torch.cat([context, block]), block[:, None]
    in_block = torch.arange(len(keys)) >= len(context)
    seen = torch.ones(len(block), len(keys), dtype=torch.bool)
    if causal:
        seen &= keys <= query
    if kind == "zlab":
        assert window is not None
        seen &= (query - keys < window) & (keys - query < window)
    if kind == "speculators":
        assert window is not None
        seen &= in_block | (keys >= block[0] - window)
    return seen


@torch.no_grad()
def features(target: PreTrainedModel, ids: list[int], hidden_state_ids: list[int]) -> Tensor:
    """These of Transformers' hidden states, concatenated: [n, K * H]."""
    states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[k][0] for k in hidden_state_ids], dim=-1)


@torch.no_grad()
def draft_block(
    target: PreTrainedModel,
    semantics: Semantics,
    weights: dict[str, Tensor],
    ids: list[int],
    width: int | None = None,
    first: int = 0,
    noise: Tensor | None = None,
) -> list[int]:
    """Drafts behind `ids`, whose last token is the anchor, reading `width` positions.

    Context tokens before position `first` are not seen. noise: [drafts, V], added to the logits of
    the target's tokens.
    """
    n, s = width or semantics.block_size, semantics
    context, anchor = ids[:-1], ids[-1]
    embedding = weights.get("embed_tokens.weight", target.get_input_embeddings().weight.float())
    head = weights.get("lm_head.weight", target.get_output_embeddings().weight.float())
    f = features(target, context, s.hidden_state_ids)
    c = _norm(f @ weights["fc.weight"].T, weights["hidden_norm.weight"], s.eps)[first:]
    x = embedding[torch.tensor([anchor] + [s.mask_token_id] * (n - 1))] * s.embedding_scale
    if s.mask_embedding is not None:
        x = torch.cat([x[:1], s.mask_embedding.expand(n - 1, -1)])
    context_at = torch.arange(first, len(context))
    block_at = torch.arange(n) + len(context)
    for i in range(len(s.layers)):
        output = x = _layer(s, weights, i, x, c, context_at, block_at)
        if s.refined is not None:
            x = _injected(s, weights, i, output, anchor)
    h = _norm(x, weights["norm.weight"], s.eps)
    base = (h @ head.T) * s.logit_multiplier
    if s.logit_cap is not None:
        base = (base / s.logit_cap).tanh() * s.logit_cap
    if noise is None:
        noise = torch.zeros(n, max(len(embedding), len(head)))
    if s.domino is not None:
        return _domino(s.domino, weights, embedding * s.embedding_scale, h, base, noise, ids)
    if s.correlated is not None:
        embedding = target.get_input_embeddings().weight.float()
        return _correlated(s, s.correlated, weights, embedding, h[1:], base[1:], c[-1], noise)
    token, state = anchor, torch.zeros(0)
    tokens: list[int] = []
    target_ids = torch.arange(len(head))[: s.columns]
    if "d2t" in weights:
        target_ids = target_ids + weights["d2t"]
    for i in range(n):
        bias, state = _markov(s, weights, h[i], token, state)
        if i == 0 and not s.sample_from_anchor:
            continue
        here = noise[len(tokens)]
        token_before = token
        if s.refined is not None:
            token = _refined(s, weights, output[i], base[i], head, here, token_before)
            tokens.append(token)
            continue
        token = int(target_ids[((base[i] + bias)[: s.columns] + here[target_ids]).argmax()])
        if s.candidates is not None:
            token = _selected(s, weights, h[i], base[i], here, token_before)
        tokens.append(token)
    return tokens


def _domino(
    d: Domino,
    weights: dict[str, Tensor],
    embedding: Tensor,
    h: Tensor,
    base: Tensor,
    noise: Tensor,
    ids: list[int],
) -> list[int]:
    """SpecForge's rule. The GRU begins anew for each draft, and reads all tokens before it."""
    w_ih, w_hh = weights["prefix_gru.weight_ih_l0"], weights["prefix_gru.weight_hh_l0"]
    gru = torch.nn.GRU(w_ih.shape[1], w_hh.shape[1], bias=False)
    gru.load_state_dict({"weight_ih_l0": w_ih, "weight_hh_l0": w_hh})
    drafts: list[int] = []
    for n in range(len(h) - 1):
        row = n if d.shift_label else n + 1
        logits = base[row]
        if n >= d.pure_prefix:
            read = embedding[torch.tensor(d.reads(ids, drafts), dtype=torch.int64)]
            state = gru(read)[0][-1] if len(read) else torch.zeros(w_hh.shape[1])
            inner = weights["embed_proj.0.weight"] @ torch.cat([h[row], state])
            logits = logits + weights["embed_proj.2.weight"] @ torch.nn.functional.silu(inner)
        drafts.append(int((logits + noise[n][: len(logits)]).argmax()))
    return drafts


def _selected(
    s: Semantics,
    weights: dict[str, Tensor],
    hidden: Tensor,
    logits: Tensor,
    noise: Tensor,
    before: int,
) -> int:
    """DFlash 2's rule: the best of the likeliest tokens behind `before`, by score and noise."""
    prefix = "candidate_selector."
    w = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    w = {k.replace("codebook.weight", "codebook"): v for k, v in w.items()}
    gate = w["hidden_projection.weight"] @ hidden
    row = w["predecessor_codebook"][before]
    scores = {}
    for token in logits.argsort(descending=True)[: s.candidates].tolist():
        product = row * w["successor_codebook"][token]
        edge = (product * gate).sum() if s.edges_read_hidden else product.sum()
        scores[token] = float(logits[token] + edge + noise[token])
    best: int = max(scores, key=lambda token: scores[token])
    return best


def _correlated(
    s: Semantics,
    r: Correlated,
    weights: dict[str, Tensor],
    embedding: Tensor,
    h: Tensor,
    base: Tensor,
    context: Tensor,
    noise: Tensor,
) -> list[int]:
    """LiLiCorr's rule, as SGLang 0.5.23 has it. h: [S, H]; context: [H], before the anchor."""
    prefix = "lilicorr."
    w = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def unit(x: Tensor) -> Tensor:
        scaled: Tensor = x / x.norm()
        return scaled

    silu = torch.nn.functional.silu
    k, slots = r.candidates, range(len(h))
    log_probs, ids = base[:, : len(embedding)].log_softmax(-1).sort(dim=-1, descending=True)
    states, at = [], []
    for slot in slots:
        for rank in range(k):
            logp = log_probs[slot, rank]
            share = rank / max(1, k - 1) if r.reads_ranks else 0.0
            gap, top = float(logp - log_probs[slot, 0]), float(rank == 0)
            features = torch.tensor([float(logp), float(logp.exp()), gap, share, top])
            normed = (features - features.mean()) / (features.var(unbiased=False) + 1e-5).sqrt()
            normed = normed * w["feature_norm.weight"] + w["feature_norm.bias"]
            token = embedding[ids[slot, rank]]
            x = linear("token_proj", token) if "token_proj.weight" in w else token
            x = x + linear("pass_hidden_proj", h[slot])
            x = x + linear("feature_mlp.down_proj", silu(linear("feature_mlp.up_proj", normed)))
            states.append(
                x + w["slot_embedding"][0, 0, slot, 0] + w["rank_embedding"][0, 0, 0, rank]
            )
            at.append(slot)
    x, size = torch.stack(states), len(states[0])
    for i in range(len([name for name in w if name.endswith("attn.in_proj_bias")])):
        layer = f"layers.{i}."
        y = _norm(x, w[f"{layer}attn_norm.weight"], s.eps)
        qkv = y @ w[f"{layer}attn.in_proj_weight"].T + w[f"{layer}attn.in_proj_bias"]
        mixed = torch.empty_like(x)
        place = torch.tensor(at)
        apart = place[:, None] - place
        bias = w["relative_slot_bias"][:, apart + s.block_size - 1]
        bias = bias + (apart == 0) * w["same_slot_bias"][:, None, None]
        for head in range(r.heads):
            part = slice(head * size // r.heads, (head + 1) * size // r.heads)
            q, key, value = (each[:, part] for each in qkv.chunk(3, dim=1))
            score = q @ key.T / q.shape[1] ** 0.5 + bias[head]
            mixed[:, part] = score.softmax(-1) @ value
        x = x + linear(f"{layer}attn.out_proj", mixed)
        y = _norm(x, w[f"{layer}mlp_norm.weight"], s.eps)
        x = x + linear(f"{layer}mlp.down_proj", silu(linear(f"{layer}mlp.up_proj", y)))
    x = _norm(x, w["output_norm.weight"], s.eps).view(len(h), k, size)
    anchor = linear("context_proj", context if r.reads_context else torch.zeros_like(context))
    anchor = _norm(anchor, w["anchor_norm.weight"], s.eps)
    going, drafts = unit(linear("anchor_out_head", anchor)), []
    for slot in slots:
        coming, leaving = [], []
        for state in x[slot]:
            factor = silu(linear("factor_input_proj", torch.cat([state, anchor, state * anchor])))
            coming.append(unit(linear("in_head", factor)))
            leaving.append(unit(linear("out_head", factor)))
        tokens = ids[slot, :k]
        best = int((r.scale * torch.stack(coming) @ going + noise[slot][tokens]).argmax())
        drafts.append(int(tokens[best]))
        going = leaving[best]
    return drafts


def _told(rank: int, vector: Tensor) -> Tensor:
    told: Tensor = rank**0.5 * vector / vector.norm()
    return told


def _heard(weights: dict[str, Tensor], layer: int, x: Tensor, before: Tensor) -> Tensor:
    """DSpine's rule: one position behind another that tells `before`, [R]. x: [H]."""
    w = {k.removeprefix("injection."): v for k, v in weights.items()}
    own = _told(len(before), w[f"readouts.{layer}.weight"] @ x)
    gate = w["receiver_gate.weight"] @ own + w["predecessor_gate.weight"] @ before + w["bias"]
    written = w[f"writes.{layer}.weight"] @ (gate.sigmoid() * (w["message.weight"] @ before))
    heard: Tensor = x + x.norm() / len(x) ** 0.5 * written
    return heard


def _injected(s: Semantics, weights: dict[str, Tensor], i: int, x: Tensor, anchor: int) -> Tensor:
    """DSpine's rule after a layer. The anchor hears nothing, and tells its code. x: [n, H]."""
    readout, codes = weights[f"injection.readouts.{i}.weight"], weights["transfer_codes"]
    told = [_told(len(readout), readout @ position) for position in x]
    if s.told_anchor:
        told[0] = _told(len(readout), codes[anchor])
    heard = [_heard(weights, i, x[j], told[j - 1]) for j in range(1, len(x))]
    return torch.stack([x[0], *heard])


def _refined(
    s: Semantics,
    weights: dict[str, Tensor],
    output: Tensor,
    base: Tensor,
    head: Tensor,
    noise: Tensor,
    before: int,
) -> int:
    """DSpine's rule: the last layer's output hears the token `before`. output: [H]."""
    codes, last = weights["transfer_codes"], len(s.layers) - 1
    hidden = _heard(weights, last, output, _told(codes.shape[1], codes[before]))
    logits = head @ _norm(hidden, weights["norm.weight"], s.eps) * s.logit_multiplier
    if s.logit_cap is not None:
        logits = (logits / s.logit_cap).tanh() * s.logit_cap
    likely = base.argsort(descending=True)[: s.refined].tolist()
    best: int = max(likely, key=lambda token: float(logits[token] + noise[token]))
    return best


def _convolved(s: Semantics, x: Tensor, base: Tensor, of_hidden: Tensor) -> Tensor:
    """DFlash 2's rule: position i reads positions i, i - 1, .. of its block.

    x: [n, H]; base: [taps, H]; of_hidden: [n, taps, groups].
    """
    assert s.convolved is not None
    y = torch.zeros_like(x)
    for i in range(len(x)):
        for tap in range(min(len(base), i + 1)):
            kernel = base[tap] + of_hidden[i, tap].repeat_interleave(s.convolved)
            y[i] += kernel * x[i - tap]
    return y


def _markov(
    s: Semantics, weights: dict[str, Tensor], hidden: Tensor, token: int, state: Tensor
) -> tuple[Tensor | float, Tensor]:
    """DeepSpec's rule: the bias of the logits behind `token`, and the next state."""
    if s.markov is None:
        return 0.0, state
    w = {k.split(".", 1)[1]: v for k, v in weights.items() if k.startswith("markov_head.")}
    row = w["markov_w1.weight"][token]
    latent = row
    if s.markov == "gated":
        joint = w["gate_proj.weight"] @ torch.cat([hidden, row]) + w["gate_proj.bias"]
        latent = joint.sigmoid() * row
    if s.markov == "rnn":
        old = state if len(state) else torch.zeros_like(row)
        joint = w["joint_proj.weight"] @ torch.cat([old, row, hidden]) + w["joint_proj.bias"]
        gate, candidate, output = joint.chunk(3)
        state = gate.sigmoid() * old + (1 - gate.sigmoid()) * candidate.tanh()
        latent = output.tanh()
    return w["markov_w2.weight"] @ latent, state


def _layer(
    s: Semantics,
    weights: dict[str, Tensor],
    i: int,
    x: Tensor,
    c: Tensor,
    context_at: Tensor,
    block_at: Tensor,
) -> Tensor:
    prefix = f"layers.{i}."
    w = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}

    def project(source: Tensor, name: str, count: int) -> Tensor:
        out = source @ w[f"self_attn.{name}_proj.weight"].T
        out = out + w.get(f"self_attn.{name}_proj.bias", torch.zeros(()))
        return out.view(-1, count, s.head_dim)

    h = _norm(x, w["input_layernorm.weight"], s.eps)
    h, behind = _before(s, w, "attention_conv", h)
    q = _norm(project(h, "q", s.heads), w["self_attn.q_norm.weight"], s.eps)
    source, at = torch.cat([c, h]), torch.cat([context_at, block_at])
    k = _norm(project(source, "k", s.kv_heads), w["self_attn.k_norm.weight"], s.eps)
    v = project(source, "v", s.kv_heads)
    q, k = _rope(q, block_at, s, i), _rope(k, at, s, i)
    seen = _seen(s, i, context_at, block_at)
    out = torch.empty(len(x), s.heads, s.head_dim)
    for head in range(s.heads):
        kv = head // (s.heads // s.kv_heads)
        score = (q[:, head] @ k[:, kv].T) * s.head_dim**-0.5
        out[:, head] = score.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, kv]
    o = out.flatten(1) @ w["self_attn.o_proj.weight"].T
    x = x + behind(o + w.get("self_attn.o_proj.bias", torch.zeros(())))
    h = _norm(x, w["post_attention_layernorm.weight"], s.eps)
    h, behind = _before(s, w, "mlp_conv", h)
    gate = torch.nn.functional.silu(h @ w["mlp.gate_proj.weight"].T)
    return x + behind((gate * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T)


def _before(
    s: Semantics, w: dict[str, Tensor], name: str, x: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A sublayer's input, and what is done to its output."""
    if s.convolved is None:
        return x, lambda z: z
    base = w[f"{name}.base_kernel"]
    kernels = (x @ w[f"{name}.kernel_projection.weight"].T).view(len(x), 2, base.shape[1], -1)
    y = _convolved(s, x, base[0], kernels[:, 0])
    return y, lambda z: _convolved(s, z, base[1], kernels[:, 1])
