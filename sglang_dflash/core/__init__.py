"""The method in pure torch: no SGLang below this line."""
