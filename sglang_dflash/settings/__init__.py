"""Options and platforms, frozen."""
