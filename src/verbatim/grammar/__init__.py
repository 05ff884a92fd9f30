"""Structured output: JSON schema, regex and grammar constraints as token masks."""
