"""The keys of a draft's config that are known. Any other one may change what a draft computes.

The models of a format declare the keys that it reads. Those here need no reading, or one value.
"""

from __future__ import annotations

# Values that the layers of other models have, beside those that a Qwen 3 layer implies.
OF_OTHER_LAYERS = {
    "add_cross_attention": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "attn_logit_softcapping": None,
    "is_encoder_decoder": False,
    "is_neox_style": True,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "qk_norm": True,
    "rope_dim": None,
    "rope_is_neox_style": True,
    "use_gemma_norm": False,
    "use_qk_norm": True,
}

# The loss and the data of training.
TRAINING = (
    *("num_anchors", "max_anchors", "loss_decay_gamma", "training_mode", "prefix_weight_base"),
    *("ce_loss_alpha", "embed_requires_grad"),
    "variable_block_size",  # of this project's early drafts
)

# Trainers copy the target's config, and its experts and linear attention with it. A draft that had
# them would have their tensors, which are refused.
OF_TARGETS = (
    *("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob"),
    *("num_experts", "num_experts_per_tok", "num_local_experts", "output_router_logits"),
    *("router_aux_loss_coef", "shared_expert_intermediate_size"),
    *("attn_output_gate", "output_gate_type", "full_attention_interval", "mamba_ssm_dtype"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "linear_value_head_dim"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
)

# What Transformers writes into any config: the origin of a file, its data type, and defaults of
# training and generation. A draft is loaded and drafts without them.
BOOKKEEPING = (
    *("architectures", "auto_map", "model_type", "transformers_version", "dtype", "torch_dtype"),
    *("_name_or_path", "_commit_hash", "_attn_implementation", "_experts_implementation"),
    *("_attn_implementation_autoset", "attn_implementation", "base_model_ep_plan"),
    *("attention_dropout", "initializer_range", "use_cache", "tie_word_embeddings"),
    *("pretraining_tp", "tokenizer_class", "task_specific_params", "finetuning_task"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("id2label", "label2id", "problem_type", "prefix", "is_decoder", "chunk_size_feed_forward"),
    *("output_attentions", "output_hidden_states", "output_scores", "return_dict", "torchscript"),
    *("return_dict_in_generate", "remove_invalid_values", "use_bfloat16", "tf_legacy_loss"),
    *("pruned_heads", "cross_attention_hidden_size", "tie_encoder_decoder"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_return_sequences"),
    *("num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p"),
    *("typical_p", "repetition_penalty", "length_penalty", "exponential_decay_length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
)
