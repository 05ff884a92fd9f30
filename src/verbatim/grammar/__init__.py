"""Structured output: JSON schema, regex, grammar and choice constraints as token masks."""
