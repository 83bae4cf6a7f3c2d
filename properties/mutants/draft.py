"""Wrong embeddings of the draft layer."""
