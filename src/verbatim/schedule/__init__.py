"""Scheduler and KV-cache block accounting: integers only, no arrays, no text. Imports base only."""
