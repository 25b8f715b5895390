"""Each Triton kernel beside its torch twin, same signature."""
