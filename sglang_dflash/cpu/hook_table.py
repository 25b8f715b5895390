"""The hooks of a CPU that every release has, with the reason why each must exist."""

from __future__ import annotations

from sglang_dflash.seam.hook import Hook

EVERYWHERE = (
    Hook(
        "mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
        "REPLACE",
        "cpu.shims:no_kv_copy_kernel",
        "Triton kernel",
    ),
    Hook(
        "batch_invariant_ops.enable_batch_invariant_mode",
        "REPLACE",
        "cpu.shims:skip_batch_invariant_mode",
        "Triton kernels; a row's result on CPU is the same up to rounding",
    ),
    Hook(
        "models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler",
        "AROUND",
        "cpu.shims:latent_handler",
        "SGLang computes a prefill from K and V of each head, which the pool does not have",
    ),
    Hook(
        "layers.rotary_embedding.factory.get_rope_cpu",
        "AROUND",
        "cpu.shims:plain_rope",
        "SGLang makes no plain RoPE for latent attention on a CPU",
    ),
    Hook(
        "constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask",
        "AROUND",
        "cpu.shims:apply_vocab_mask",
        "no CPU branch",
    ),
    *(
        Hook(f"lora.{function}", "AROUND", "cpu.shims:without_pinning", "pins memory")
        for function in (
            "lora_manager.LoRAManager.init_state",
            "backend.torch_backend.TorchNativeLoRABackend.prepare_lora_batch",
        )
    ),
)
