"""What requests ask of the target's logits: penalties, grammars, processors, log probabilities."""
