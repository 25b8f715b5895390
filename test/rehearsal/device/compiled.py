"""References of the compiled kernels that SGLang calls: sgl_kernel's, its own, FlashInfer's."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from test.rehearsal.device import kernels, memory
from test.rehearsal.device.attention import (
    FlashInferLatent,
    FlashInferPrefill,
    flash_attention_3,
    make_schedule,
    merge_state,
)


def kernel(name: str, reference: Callable[..., None]) -> Callable[..., None]:
    """A launch of a kernel that writes into its arguments."""

    def launch(*args: Any, **kwargs: Any) -> None:
        for tensor in memory.tensors_in([*args, *kwargs.values()]):
            if not memory.on_device(tensor) and tensor.numel():
                raise memory.DeviceError(f"{name} is given the host tensor ({memory.caller()})")
        _launch(name, reference, args, kwargs)

    return launch


def kernel_between(name: str, reference: Callable[..., None]) -> Callable[..., None]:
    """The same for a kernel that copies between the device and pinned host memory."""

    def launch(*args: Any, **kwargs: Any) -> None:
        for tensor in memory.tensors_in([*args, *kwargs.values()]):
            if not memory.on_device(tensor) and not memory.is_pinned(tensor):
                raise memory.DeviceError(f"{name} is given pageable memory ({memory.caller()})")
        _launch(name, reference, args, kwargs)

    return launch


def _launch(name: str, reference: Callable[..., None], args: Any, kwargs: Any) -> None:
    def run() -> None:
        with memory.inside():
            reference(*args, **kwargs)

    run()
    memory.launched(name, run)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (x32 * weight.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    out.copy_(_normed(x, weight, eps))


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.add_(x)
    x.copy_(_normed(residual, weight, eps))


def gemma_rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float, _: bool) -> None:
    out.copy_(_normed(x, weight.float() + 1, eps))


def gemma_fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, _: bool
) -> None:
    residual.add_(x)
    x.copy_(_normed(residual, weight.float() + 1, eps))


def qk_norm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    rms_norm(q, q_weight, q, eps)
    rms_norm(k, k_weight, k, eps)


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def store_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, _: int, limit: int
) -> None:
    assert bool(((slots >= 0) & (slots < limit)).all()), "a slot outside of the KV pool"
    k_cache[slots], v_cache[slots] = k, v


def clamp_position(out: Tensor, lens: Tensor) -> None:
    out.copy_((lens - 1).clamp_(min=0))


def top_k_top_p_sampling(
    probs: Tensor,
    samples: Tensor,
    valid: Tensor,
    indices: None,
    top_k: Tensor,
    _: int,
    top_p: Tensor,
    *__: Any,
) -> None:
    """Draw one token per row, from the k likeliest tokens whose sum is below p."""
    ordered, order = probs.sort(descending=True)
    out = torch.arange(probs.shape[1]) >= top_k[:, None]
    out |= ordered.cumsum(-1) - ordered > top_p[:, None]
    rank = torch.multinomial(ordered.masked_fill(out, 0.0), 1)
    samples.copy_(order.gather(1, rank).squeeze(1))


def load_layer(
    k: Tensor, v: Tensor, there: Tensor, host_k: Tensor, host_v: Tensor, here: Tensor
) -> None:
    k[there], v[there] = host_k[here], host_v[here]


def _back_up(size: int) -> Callable[..., None]:
    """Copies K and V of all layers, of `size` bytes per token, whose addresses are in tensors."""

    def back_up(
        host_k: Tensor,
        host_v: Tensor,
        there: Tensor,
        k: Tensor,
        v: Tensor,
        here: Tensor,
        stride: int,
        host_stride: int,
    ) -> None:
        slots = list(zip(there.tolist(), here.tolist(), strict=True))
        for to, of in zip((host_k, host_v), (k, v), strict=True):
            for layer, source in zip(to.tolist(), of.tolist(), strict=True):
                for host, slot in slots:
                    ctypes.memmove(layer + host * host_stride, source + slot * stride, size)

    return back_up


def copy_slots(
    sources: list[Tensor], targets: list[Tensor], here: Tensor, there: Tensor, _: int
) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[there] = source[here]


def load_pages(
    host: list[Tensor], pools: list[Tensor], here: Tensor, there: Tensor, layer: int, page: int
) -> None:
    """host: K and V, [pages, layers, page, heads, head_dim]; pools: of this layer, [slots, ..]."""
    for pages, pool in zip(host, pools, strict=True):
        pool[there] = pages[here // page, layer, here % page]


def back_up_pages(
    pools: list[Tensor], host: list[Tensor], here: Tensor, there: Tensor, page: int
) -> None:
    """pools: K of all layers, then V; host: as in `load_pages`."""
    layers = len(pools) // 2
    for number, pool in enumerate(pools):
        host[number // layers][there // page, number % layers, there % page] = pool[here]


def _rope(is_neox: str) -> Callable[..., None]:
    """RoPE of both halves of a head, or of its neighbouring pairs."""

    def rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
        for x in (q, k):
            halves = x.float().chunk(2, dim=-1)
            first, second = (
                halves if is_neox == "true" else x.float().unflatten(-1, (-1, 2)).unbind(-1)
            )
            turned = first * cos - second * sin, second * cos + first * sin
            x.copy_(
                torch.cat(turned, dim=-1)
                if is_neox == "true"
                else torch.stack(turned, dim=-1).flatten(-2)
            )

    return rope


def whole_heads_rope(
    positions: Tensor, q: Tensor, k: Tensor | None, size: int, cos_sin: Tensor, is_neox: bool
) -> None:
    parts = [x.view(len(positions), -1, size) for x in (q, k) if x is not None]
    _rope("true" if is_neox else "false")(*parts, cos_sin, positions)


def load_jit(*marks: str, **_: Any) -> SimpleNamespace:
    """Replaces `sglang.jit_kernel.utils.load_jit`, which compiles a module's kernels with nvcc."""

    def activation(x: Tensor, out: Tensor, kind: str) -> None:
        assert kind == "silu"
        silu_and_mul(x, out)

    references: dict[str, dict[str, Callable[..., None]]] = {
        "qknorm": {"qknorm": qk_norm},
        "rmsnorm": {"rmsnorm": rms_norm},
        "fused_add_rmsnorm": {"fused_add_rmsnorm": fused_add_rms_norm},
        "activation": {"run_activation": activation},
        "kvcache": {"store_cache": store_cache},
        "rotary_embedding": {"rotary_embedding": whole_heads_rope},
        "clamp_position": {"clamp_position": clamp_position},
        "fused_rope": {"run_rope": _rope(marks[1]) if marks[0] == "fused_rope" else qk_norm},
    }
    if marks[0] == "hicache":
        copies = {"launch_one": load_layer, "launch_all": _back_up(int(marks[1]))}
        return SimpleNamespace(
            **{name: kernel_between(f"jit:{name}", reference) for name, reference in copies.items()}
        )
    if marks[0] not in references:
        raise memory.DeviceError(f"no reference of the kernels {marks}")
    return SimpleNamespace(**{n: kernel(f"jit:{n}", t) for n, t in references[marks[0]].items()})


def _flashinfer_prefill(backend: str) -> SimpleNamespace:
    module = FlashInferPrefill(backend)
    names = ("paged_run", "ragged_run")
    runs = {name: kernel(f"flashinfer:{name}", getattr(module, name)) for name in names}
    return SimpleNamespace(plan=module.plan, **runs)


def _spec(module: SimpleNamespace) -> SimpleNamespace:
    """The result of FlashInfer's `gen_..._module`, without its compilation by nvcc."""
    return SimpleNamespace(build_and_load=lambda: module)


def pretend() -> None:
    memory.REFERENCES |= {
        "sgl_kernel::fwd": flash_attention_3,
        "sgl_kernel::rmsnorm": lambda out, x, w, eps, _: rms_norm(x, w, out, eps),
        "sgl_kernel::fused_add_rmsnorm": lambda x, r, w, eps, _: fused_add_rms_norm(x, r, w, eps),
        "sgl_kernel::gemma_rmsnorm": gemma_rms_norm,
        "sgl_kernel::gemma_fused_add_rmsnorm": gemma_fused_add_rms_norm,
        "sgl_kernel::get_scheduler_metadata": make_schedule,
        "sgl_kernel::transfer_kv_direct": copy_slots,
        "sgl_kernel::transfer_kv_per_layer_direct_pf_lf": load_pages,
        "sgl_kernel::transfer_kv_all_layer_direct_lf_pf": back_up_pages,
        "sgl_kernel::silu_and_mul": lambda out, x, *_: silu_and_mul(x, out),
    }
    _pretend_flashinfer()
    _pretend_jit()
    _pretend_gated_delta_rule()


def _pretend_jit() -> None:
    from sglang.jit_kernel import utils

    utils.load_jit = load_jit
    from sglang.srt.utils import common

    register = common.direct_register_custom_op

    def registered(op_name: str, op_func: Any, *args: Any, **kwargs: Any) -> None:
        memory.BODIES[f"sglang::{op_name}"] = op_func
        register(op_name, op_func, *args, **kwargs)

    common.direct_register_custom_op = registered


def _pretend_flashinfer() -> None:
    from flashinfer import cascade, norm, prefill, sampling
    from flashinfer.jit.core import JitSpec
    from flashinfer.jit.utils import filename_safe_dtype_map
    from flashinfer.mla import _core as mla

    filename_safe_dtype_map[torch.float32] = "f32"  # FlashInfer's own kernels do not support fp32
    prefill.gen_batch_prefill_module = lambda backend, *_: _spec(_flashinfer_prefill(backend))
    latent = FlashInferLatent()
    run = kernel("flashinfer:mla_run", latent.run)
    mla.gen_batch_mla_module = lambda *_: _spec(SimpleNamespace(plan=latent.plan, run=run))
    merge = kernel("flashinfer:merge_state", merge_state)
    cascade.gen_cascade_module = lambda: _spec(SimpleNamespace(merge_state=merge))
    norm._USE_CUDA_NORM = True  # not the norms that CuTe compiles
    norms = {
        "rmsnorm": lambda out, x, w, eps, _: rms_norm(x, w, out, eps),
        "fused_add_rmsnorm": lambda x, r, w, eps, _: fused_add_rms_norm(x, r, w, eps),
        "gemma_rmsnorm": gemma_rms_norm,
        "gemma_fused_add_rmsnorm": gemma_fused_add_rms_norm,
    }
    norms = {name: kernel(f"flashinfer:{name}", reference) for name, reference in norms.items()}
    norm.gen_norm_module = lambda: _spec(SimpleNamespace(**norms))
    sampling.get_seed_and_offset = lambda *_: (0, 0)  # the device's own generator
    drawn = {"top_k_top_p_sampling_from_probs": top_k_top_p_sampling}
    drawn = {name: kernel(f"flashinfer:{name}", reference) for name, reference in drawn.items()}
    sampling.gen_sampling_module = lambda: _spec(SimpleNamespace(**drawn))

    def refuse(spec: Any) -> None:
        raise memory.DeviceError(f"no reference of {spec.name}")

    JitSpec.build_and_load = refuse


def _pretend_gated_delta_rule() -> None:
    """Let the prefill of gated delta networks take fp32. Its kernels do in the interpreter."""
    from sglang.srt.layers.attention.fla import op

    op.exp = kernels.exp
    from sglang.srt.layers.attention.fla import chunk

    source = inspect.getsource(chunk.chunk_gated_delta_rule)
    check = "q.dtype != torch.float32"
    assert check in source
    exec(source.replace(check, "True"), vars(chunk))
    from sglang_dflash.settings.platforms import PLATFORMS

    platform = PLATFORMS["cuda"]
    PLATFORMS["cuda"] = replace(platform, gdn_dtypes=(*platform.gdn_dtypes, torch.float32))
