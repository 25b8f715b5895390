"""The rows of a verify by expected throughput."""
