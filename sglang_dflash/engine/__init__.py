"""The one place that knows this SGLang: hooks, server arguments, capture, pools."""
