"""Loading models and running them on paged attention through transformers."""
