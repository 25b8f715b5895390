"""The method in pure torch. Nothing in this folder imports SGLang."""
