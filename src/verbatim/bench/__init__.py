"""The benchmark and the rivals it compares with."""
