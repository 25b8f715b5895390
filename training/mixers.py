"""Training of the hybrid's mixers: each GDN learns to replace the attention of its layer.

First layer by layer: a mixer reads what the attention reads in the bundled target, and learns its
output. Then end to end: logits and the draft's features learn to be those of the bundled target.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from sglang_dflash.tiny import TARGET
from training.rows import alone, documents
from training.run import Run
from training.shapes import DRAFT_CONFIG, HYBRID_CONFIG, is_linear
from training.target import load_target

LEARNING_RATE = 3e-3
CHUNK = 32  # tokens
MEMORIES = (4, 16, 64, 256)  # tokens in which a head's state decays to 1/e, before training

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of a batch of `alone`


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Transformers' `torch_chunk_gated_delta_rule` from an empty state, by solves instead of loops.

    query, key: [B, T, heads, K]; value: [B, T, heads, V]; g, beta: [B, T, heads].
    -> [B, T, heads, V] in the dtype of `value`
    """
    length, dtype = value.shape[1], value.dtype
    query, key = (qwen3_next.l2norm(x.float()) for x in (query, key))
    query, key, value, g, beta = (
        F.pad(x.float().transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, -length % CHUNK)).unflatten(
            2, (-1, CHUNK)
        )  # [B, heads, chunks, CHUNK, ..]
        for x in (query, key, value, g, beta)
    )
    g, beta = g.cumsum(-1), beta[..., None]
    between = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
    since = g.exp()[..., None]  # decay since the chunk began
    overlap = (beta * key) @ key.mT * between
    known = torch.cat([beta * value, beta * key * since], dim=-1)
    solved = torch.linalg.solve_triangular(overlap, known, upper=False, unitriangular=True)
    new, old = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    seen = query @ key.mT * between * key.shape[-1] ** -0.5
    query = query * since * key.shape[-1] ** -0.5
    kept = key * (g[..., -1:] - g).exp()[..., None]
    out = []
    state = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1])
    for q, k, n, o, s, d in zip(
        *(x.unbind(2) for x in (query, kept, new, old, seen, since)), strict=True
    ):
        n = n - o @ state
        out.append(q @ state + s @ n)
        state = state * d[..., -1:, :] + k.mT @ n
    return torch.cat(out, dim=2)[:, :, :length].transpose(1, 2).to(dtype), None


class Mixer(nn.Module):
    """A GDN in the place of an attention. While it is `taught`, the attention still answers."""

    def __init__(self, attention: nn.Module, layer: int) -> None:
        super().__init__()
        self.gdn = qwen3_next.Qwen3NextGatedDeltaNet(Qwen3NextConfig(**HYBRID_CONFIG), layer)
        device = next(attention.parameters()).device.type
        self.gdn.chunk_gated_delta_rule = torch.autocast(device, enabled=False)(delta_rule)
        nn.init.zeros_(self.gdn.A_log)
        self.gdn.dt_bias.data = torch.tensor([math.log(math.expm1(1 / m)) for m in MEMORIES])
        self.attention = attention
        self.taught = True
        self.answer = self.wanted = torch.zeros(0)  # [B, T, H] each, of the last forward

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        self.answer = self.gdn(hidden_states)
        if not self.taught:
            return self.answer, None
        self.wanted, _ = self.attention(hidden_states, **kwargs)
        return self.wanted, None


def train_mixers(work: Path, layer_steps: int, steps: int, device: str) -> Path:
    """Train in `work`, and return the file of the mixers' tensors."""
    torch.manual_seed(5)
    teacher = load_target(TARGET.parent, device)
    student = copy.deepcopy(teacher)
    mixers = []
    for index, layer in enumerate(student.model.layers):
        if is_linear(index):
            layer.self_attn = Mixer(layer.self_attn, index).to(device)
            mixers.append(layer.self_attn)
    trained = nn.ModuleDict({str(mixer.gdn.layer_idx): mixer.gdn for mixer in mixers})

    def layer_loss(ids: Tensor, real: Tensor, _: Tensor) -> Tensor:
        student.model(ids, use_cache=False)
        return torch.stack([_error(m.answer[real], m.wanted[real]) for m in mixers]).mean()

    def loss(ids: Tensor, real: Tensor, counted: Tensor) -> Tensor:
        with torch.no_grad():
            wanted, wanted_features = _outputs(teacher, ids, counted)
        logits, features = _outputs(student, ids, counted)
        divergence = F.kl_div(logits, wanted, reduction="batchmean", log_target=True)
        errors = [
            _error(of[real], by[real]) for of, by in zip(features, wanted_features, strict=True)
        ]
        return divergence + torch.stack(errors).mean()

    _train(trained, layer_loss, Run(trained, LEARNING_RATE, layer_steps, work / "layers.pt"), 6)
    for mixer in mixers:
        mixer.taught = False
    _train(trained, loss, Run(trained, LEARNING_RATE, steps, work / "mixers.pt"), 7)
    return _save(trained, work / "hybrid.safetensors")


def _train(trained: nn.Module, loss_of: Loss, run: Run, seed: int) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TARGET)
    batches = alone(documents(tokenizer, seed + run.done), seed)
    device = next(trained.parameters()).device
    for bar in run.steps_left(run.path.stem):
        tensors = [tensor.to(device) for tensor in next(batches)]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(*tensors)
        run.step(loss)
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)


def _outputs(model: PreTrainedModel, ids: Tensor, counted: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Log probabilities of the counted tokens, [counted, V] float32; features, [B, T, H] each."""
    out = model.model(ids, output_hidden_states=True, use_cache=False)
    logits = model.lm_head(out.last_hidden_state[:, :-1][counted[:, 1:]])
    layers = DRAFT_CONFIG["dflash_config"]["target_layer_ids"]
    return logits.float().log_softmax(-1), [out.hidden_states[k + 1] for k in layers]


def _error(x: Tensor, wanted: Tensor) -> Tensor:
    """The share of the variance that is not explained. x, wanted: [n, H]."""
    x, wanted = x.float(), wanted.float()
    return F.mse_loss(x, wanted) / wanted.var(0).mean()


def _save(trained: nn.Module, file: Path) -> Path:
    tensors = {}
    for name, weight in trained.state_dict().items():
        layer, _, part = name.partition(".")
        tensors[f"model.layers.{layer}.linear_attn.{part}"] = weight.to(torch.bfloat16).cpu()
    save_file(tensors, file, metadata={"format": "pt"})
    return file
