"""Exporters: a loaded model or tokenizer written as GGUF."""
