"""The life of a request, beside its KV."""
