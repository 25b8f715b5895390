"""The verify width by expected throughput."""
