"""SGLang's attention backends, taught to serve blocks.

Draft and target attend with one. What a block's forward has:

- The mode is `TARGET_VERIFY`, so `forward_extend` attends, for the draft as for the target.
- `forward_batch.spec_info` is a `VerifyInput` of `draft_token_num` positions a request, without a
  mask: `custom_mask` is None, `topk` is 1.
- Layers of `AttentionType.DECODER` are causal, aligned to the lower right: the target's, and causal
  ones of a draft. In those of `ENCODER_ONLY`, the draft's, each position sees the context and the
  whole block.
- `seq_lens` has the tokens of context on the device, the block not counted. `seq_lens_cpu` has at
  least as many: buffers may be sized by it, results may not depend on it.
- The last block ends after the context: on CUDA `hooks.room_for_a_block` adds a block to
  `backend.max_context_len`.
- `WidthGraphs` makes a backend for each width. Those in `_takes_any_rows` (`build.py`) read
  `dflash_lens`.
"""
