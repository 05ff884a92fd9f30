"""Exporters: write a loaded model or tokenizer as GGUF."""
