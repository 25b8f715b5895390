"""The draft model on SGLang's layers. SGLang's model registry scans this package."""
