"""The recipe of the bundled pair. README.md explains how to run it. It is not installed."""
