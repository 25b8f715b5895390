"""The recipe of the bundled pair. README.md tells how to run it; it is not installed."""
