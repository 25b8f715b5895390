"""All that this package hangs on objects of SGLang: its attributes by name, and whose they are."""

from __future__ import annotations

ATTACHED = {
    "dflash": "of `ServerArgs`: the options of this package, which processes get by pickle",
    "dflash_arrivals": "of the target's `ReqToTokenPool`: takes requests prefilled elsewhere",
    "dflash_features": "of a `Req`: what is taken of its features",
    "dflash_flags": "of `ServerArgs`: the flags of this package on their command line",
    "dflash_path": "of the draft's Transformers config: the folder of its checkpoint",
    "dflash_seed": "of a `Req`: the seed of its noise",
    "dflash_kv": "of a `Req` that a decode server retracts: its draft KV on the host",
    "dflash_late": "of a `Req`: what its grammar says of its last token, if that is no end",
    "dflash_drafts": "of a `GenerationBatchResult`: the drafts of watched requests",
    "dflash_slots": "of the target's `ReqToTokenPool`: the slots that a step needs next",
    "dflash_new_weights": "of the target's `ModelRunner`: what gives the draft new weights",
    "dflash_selector": "of a request to update weights: whose they are",
    "dflash_target": "of a `LogitsProcessor`: it is the target's",
    "dflash_append_final": "of the target's `LogitsProcessor`: append the last layer's state",
    "dflash_anchor_window": "of a draft's `RadixAttention`: tokens before the anchor that are seen",
    "dflash_states": "of a `MambaPool`: views of its recurrent states",
    "dflash_inputs": "of a `MambaPool`: what the last verify read",
    "dflash_schedules": "of FlashAttention 3's tensor of KV lengths: the schedules of a forward",
    "dflash_lens": "of an attention backend: the rows of each request, where these differ",
    "dflash_steps": "of the tokenizer's state of a request: its watched steps",
}
