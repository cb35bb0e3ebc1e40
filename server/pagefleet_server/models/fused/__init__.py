"""The fused decoder: one implementation of the Llama-shaped architectures, by a table, without transformers."""
